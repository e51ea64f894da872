// The portable paged kernel: one thread block computes the pieces of one column and pack, with
// plain fp32 multiply-adds.
//
// Scores: a warp has 32 keys of the tile, one for each lane, and the packed rows of its row group.
// Output: a thread has two columns of all packed rows, summed over its part of the tile's keys; the
// parts are added up at the end of a piece.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_PORTABLE_ATTENTION_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_PORTABLE_ATTENTION_CUH_

#include <cstdint>

#include "worker/kernels/cuda/paged/find_column.cuh"
#include "worker/kernels/cuda/paged/merge_pieces.cuh"
#include "worker/kernels/cuda/paged/portable/kernels.h"
#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/primitives/score_rule.cuh"

namespace ringattn::worker::cuda::paged {

template <typename T_, int kDim_, int kKeys_>
struct PortableShape {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr int kKeys = kKeys_;
  static constexpr int kThreads = 128;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kRows = kPortableRows;
  static constexpr int kRowsAtOnce = 4;  // in registers
  // Scores: kKeyGroups * kRowGroups warps.
  static constexpr int kKeyGroups = kKeys / 32;
  static constexpr int kRowGroups = kWarps / kKeyGroups;
  static constexpr int kRowsPerWarp = kRows / kRowGroups;
  // Elements of one 32-bit word. Rows of K are 4 words longer than they have to be, so that eight
  // lanes that read 16 bytes each meet all banks once.
  static constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
  static constexpr int kWords = kDim / kPerWord;
  static constexpr int kKeyWords = kWords + 4;
  // Output: kDim / 2 pairs of columns by kKeyParts.
  static constexpr int kKeyParts = kThreads / (kDim / 2);
  static constexpr int kPartKeys = kKeys / kKeyParts;
  static constexpr int kLoadsAtOnce = sizeof(T) == 4 && kDim > 128 ? 4 : 8;  // as registers allow
  static_assert(kKeyGroups >= 1 && kRowsPerWarp % kRowsAtOnce == 0 && kPartKeys % 4 == 0);

  struct Shared {
    float q[kRows][kDim];  // and the output's parts
    uint32_t k[kKeys][kKeyWords];
    uint32_t v[kKeys][kWords];
    float p[kRows][kKeys];
    float group_max[kKeyGroups][kRows];
    float group_sum[kKeyGroups][kRows];
    float max[2][kRows];  // of the tiles so far; the tile's parity says which is the newer one
    float factor[kRows];  // what a row's sums are multiplied with
    float lse[kRows];
    KeySpan seen[kRows];  // the entries that each packed row sees
    ColumnScratch<kThreads> scratch;
    uint32_t last;
  };
};

template <typename T>
__device__ __forceinline__ void WordToFloats(uint32_t word, float (&x)[4 / sizeof(T)]) {
  if constexpr (sizeof(T) == 4) {
    x[0] = __uint_as_float(word);
  } else {
    const float2 pair = Unpack<T>(word);
    x[0] = pair.x;
    x[1] = pair.y;
  }
}

template <typename Shape>
struct PortableAttention {
  using T = typename Shape::T;
  using Shared = typename Shape::Shared;

  const PortableParams& params;
  const SplitParams& split;  // CompiledSplit
  Shared& shared;
  const char* k_plane;
  const char* v_plane;
  int kv_head;
  int first_head;

  // Keys [first, first + kKeys) of one of K and V. Keys that no query sees become zero, and so do
  // columns from `dim` on.
  template <int kStride>
  __device__ __forceinline__ void LoadTile(uint32_t (&target)[Shape::kKeys][kStride],
                                           const char* plane, int dim, int64_t row_elements,
                                           const PagedRow& row, const KeySpan& keys,
                                           int32_t first) const {
    const StepParams& step = params.step;
    const auto source = [&](int32_t key) {
      const int32_t block = __ldg(step.tables + row.table + (key >> step.block_shift));
      const int64_t token =
          (int64_t{block} << step.block_shift) + (key & ((1 << step.block_shift) - 1));
      return reinterpret_cast<const T*>(plane) + token * row_elements + int64_t{kv_head} * dim;
    };
    const auto seen = [&](int32_t key) { return key >= keys.begin && key < keys.end; };
    constexpr int kWords = Shape::kWords;
    if (params.vector) {
      constexpr int kRowVectors = kWords / 4;
      constexpr int kVectors = Shape::kKeys * kRowVectors / Shape::kThreads;  // of a thread
      static_assert(Shape::kKeys * kRowVectors % Shape::kThreads == 0);
      static_assert(kVectors % Shape::kLoadsAtOnce == 0);
#pragma unroll 1
      for (int done = 0; done < kVectors; done += Shape::kLoadsAtOnce) {
        // All loads before the first store, which the compiler would not move them past.
        uint4 x[Shape::kLoadsAtOnce];
#pragma unroll
        for (int j = 0; j < Shape::kLoadsAtOnce; ++j) {
          const int i = (done + j) * Shape::kThreads + static_cast<int>(threadIdx.x);
          const int32_t key = first + i / kRowVectors;
          const int column = i % kRowVectors * 4 * Shape::kPerWord;
          x[j] = uint4{};
          if (seen(key) && column < dim)
            x[j] = *reinterpret_cast<const uint4*>(source(key) + column);
        }
#pragma unroll
        for (int j = 0; j < Shape::kLoadsAtOnce; ++j) {
          const int i = (done + j) * Shape::kThreads + static_cast<int>(threadIdx.x);
          *reinterpret_cast<uint4*>(&target[i / kRowVectors][i % kRowVectors * 4]) = x[j];
        }
      }
      return;
    }
    for (int i = threadIdx.x; i < Shape::kKeys * kWords; i += Shape::kThreads) {
      const int key = i / kWords;
      const int word = i % kWords;
      uint32_t x = 0;
      if (seen(first + key)) {
        const T* const from = source(first + key);
#pragma unroll
        for (int e = 0; e < Shape::kPerWord; ++e) {
          const int column = word * Shape::kPerWord + e;
          if (column >= dim) continue;
          if constexpr (sizeof(T) == 4) {
            x = __float_as_uint(from[column]);
          } else {
            x |= uint32_t{reinterpret_cast<const uint16_t*>(from)[column]} << 16 * e;
          }
        }
      }
      target[key][word] = x;
    }
  }

  __device__ __forceinline__ void LoadQueries(int64_t first_q, int rows) const {
    const CommonParams& common = params.forward.common;
    const int pack = params.forward.head_pack;
    for (int i = threadIdx.x; i < Shape::kRows * Shape::kDim; i += Shape::kThreads) {
      const int row = i / Shape::kDim;
      const int column = i % Shape::kDim;
      float x = 0.0f;
      if (row < rows && column < common.head_dim) {
        const int64_t at = ((first_q + row / pack) * common.num_heads + first_head + row % pack) *
                               common.head_dim +
                           column;
        x = ToFloat(static_cast<const T*>(params.forward.q)[at]);
      }
      shared.q[row][column] = x;
    }
  }

  // Scores of rows [first_row, first_row + kRowsAtOnce) and key `key` of the tile, in log2 units.
  __device__ __forceinline__ void Scores(int first_row, int key,
                                         float (&scores)[Shape::kRowsAtOnce]) const {
    constexpr int kElements = 4 * Shape::kPerWord;  // of 16 bytes
    const int words = (params.forward.common.head_dim + Shape::kPerWord - 1) / Shape::kPerWord;
#pragma unroll
    for (int i = 0; i < Shape::kRowsAtOnce; ++i) scores[i] = 0.0f;
#pragma unroll 2
    for (int word = 0; word < words; word += 4) {  // K and q are 0 after their last column
      const uint4 packed = *reinterpret_cast<const uint4*>(&shared.k[key][word]);
      const uint32_t k_words[4] = {packed.x, packed.y, packed.z, packed.w};
      float k[kElements];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float elements[Shape::kPerWord];
        WordToFloats<T>(k_words[w], elements);
#pragma unroll
        for (int e = 0; e < Shape::kPerWord; ++e) k[w * Shape::kPerWord + e] = elements[e];
      }
#pragma unroll
      for (int i = 0; i < Shape::kRowsAtOnce; ++i) {
#pragma unroll
        for (int e = 0; e < kElements; e += 4) {
          const float4 q = *reinterpret_cast<const float4*>(
              &shared.q[first_row + i][word * Shape::kPerWord + e]);
          scores[i] = fmaf(q.x, k[e], scores[i]);
          scores[i] = fmaf(q.y, k[e + 1], scores[i]);
          scores[i] = fmaf(q.z, k[e + 2], scores[i]);
          scores[i] = fmaf(q.w, k[e + 3], scores[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < Shape::kRowsAtOnce; ++i) {
      scores[i] = ExactScore(scores[i], params.forward.common).score;
    }
  }

  // output += P V of the thread's columns and keys, after `output` has become relative to the
  // newest maximum.
  __device__ __forceinline__ void AddValues(int rows, float (&output)[Shape::kRows][2]) const {
    constexpr int kAtOnce = Shape::kRowsAtOnce;
    const int pair = static_cast<int>(threadIdx.x) % (Shape::kDim / 2);
    const int first_key = static_cast<int>(threadIdx.x) / (Shape::kDim / 2) * Shape::kPartKeys;
#pragma unroll
    for (int first = 0; first < Shape::kRows; first += kAtOnce) {
      if (first >= rows) break;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        output[first + i][0] *= shared.factor[first + i];
        output[first + i][1] *= shared.factor[first + i];
      }
#pragma unroll 2
      for (int key = first_key; key < first_key + Shape::kPartKeys; key += 4) {
        float2 v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (sizeof(T) == 4) {
            v[j] = *reinterpret_cast<const float2*>(&shared.v[key + j][pair * 2]);
          } else {
            v[j] = Unpack<T>(shared.v[key + j][pair]);
          }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const float4 p = *reinterpret_cast<const float4*>(&shared.p[first + i][key]);
          const float weights[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            output[first + i][0] = fmaf(weights[j], v[j].x, output[first + i][0]);
            output[first + i][1] = fmaf(weights[j], v[j].y, output[first + i][1]);
          }
        }
      }
    }
  }

  // Adds the parts of the output to that of the threads of part 0.
  __device__ __forceinline__ void AddParts(int rows, float (&output)[Shape::kRows][2]) const {
    const int pair = static_cast<int>(threadIdx.x) % (Shape::kDim / 2);
    const int part = static_cast<int>(threadIdx.x) / (Shape::kDim / 2);
#pragma unroll 1
    for (int of = 1; of < Shape::kKeyParts; ++of) {
      __syncthreads();
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r) {
        if (part == of && r < rows) {
          *reinterpret_cast<float2*>(&shared.q[r][pair * 2]) =
              make_float2(output[r][0], output[r][1]);
        }
      }
      __syncthreads();
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r) {
        if (part == 0 && r < rows) {
          const float2 other = *reinterpret_cast<const float2*>(&shared.q[r][pair * 2]);
          output[r][0] += other.x;
          output[r][1] += other.y;
        }
      }
    }
  }

  // One tile of keys: its probabilities to shared.p, and what rows are multiplied with to
  // shared.factor. `parity` alternates between tiles. `sum` is that of row threadIdx.x.
  // `rows`: packed ones.
  __device__ __forceinline__ void Tile(int rows, int32_t first, int parity, float& sum) const {
    constexpr int kAtOnce = Shape::kRowsAtOnce;
    const int lane = threadIdx.x & 31;
    const int warp = threadIdx.x / 32;
    const int key_group = warp % Shape::kKeyGroups;
    const int warp_row = warp / Shape::kKeyGroups * Shape::kRowsPerWarp;
    const int key = key_group * 32 + lane;
    float scores[Shape::kRowsPerWarp / kAtOnce][kAtOnce];
#pragma unroll
    for (int g = 0; g < Shape::kRowsPerWarp / kAtOnce; ++g) {
      if (warp_row + g * kAtOnce >= rows) break;
      Scores(warp_row + g * kAtOnce, key, scores[g]);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int packed_row = warp_row + g * kAtOnce + i;
        float& score = scores[g][i];
        const KeySpan seen = shared.seen[packed_row];
        if (first + key < seen.begin || first + key >= seen.end) score = NegativeInfinity();
        float max = score;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
          const float other = __shfl_xor_sync(0xffffffff, max, step);
          max = other > max || other != other ? other : max;
        }
        if (lane == 0) shared.group_max[key_group][packed_row] = max;
      }
    }
    __syncthreads();
#pragma unroll
    for (int g = 0; g < Shape::kRowsPerWarp / kAtOnce; ++g) {
      if (warp_row + g * kAtOnce >= rows) break;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int packed_row = warp_row + g * kAtOnce + i;
        const float old_max = shared.max[parity ^ 1][packed_row];
        float max = old_max;
#pragma unroll
        for (int other_group = 0; other_group < Shape::kKeyGroups; ++other_group) {
          const float other = shared.group_max[other_group][packed_row];
          max = other > max || other != other ? other : max;
        }
        const float base = max == NegativeInfinity() ? 0.0f : max;
        const float p = exp2f(scores[g][i] - base);
        shared.p[packed_row][key] = p;
        float group_sum = p;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
          group_sum += __shfl_xor_sync(0xffffffff, group_sum, step);
        }
        if (lane == 0) {
          shared.group_sum[key_group][packed_row] = group_sum;
          if (key_group == 0) {
            shared.factor[packed_row] = exp2f(old_max - base);
            shared.max[parity][packed_row] = max;
          }
        }
      }
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < rows) {
      sum *= shared.factor[threadIdx.x];
#pragma unroll
      for (int group = 0; group < Shape::kKeyGroups; ++group) {
        sum += shared.group_sum[group][threadIdx.x];
      }
    }
  }

  __device__ __forceinline__ void Item(const PagedRow& row, int row_index, int32_t unit,
                                       const TileSpan& tiles, const UnitPiece& piece, int column,
                                       int pack_index) const {
    const ForwardParams& forward = params.forward;
    const CommonParams& common = forward.common;
    const UnitRule& rule = split.rule;
    const int pack = forward.head_pack;
    const int thread = threadIdx.x;
    const int32_t first_query = unit * rule.unit_queries;
    const int32_t queries = min(rule.unit_queries, row.q_tokens - first_query);
    const int rows = queries * pack;
    const KeySpan keys = VisibleKeys(row, rule.mask, first_query, first_query + queries);
    const int64_t first_q = int64_t{row.first_q} + first_query;
    // The tiles of the piece in which this unit's queries see a key.
    const int32_t tile_begin = max(tiles.begin + piece.begin, keys.begin / Shape::kKeys);
    const int32_t tile_end =
        min(tiles.begin + piece.end, (keys.end + Shape::kKeys - 1) / Shape::kKeys);

    float output[Shape::kRows][2] = {};
    float sum = 0.0f;
    int parity = 0;
    __syncthreads();  // the last item is done with shared memory
    LoadQueries(first_q, rows);
    if (thread < Shape::kRows) shared.max[1][thread] = NegativeInfinity();
    if (thread < rows) {
      const int32_t query = first_query + thread / pack;
      shared.seen[thread] = VisibleKeys(row, rule.mask, query, query + 1);
    }
#pragma unroll 1
    for (int32_t tile = tile_begin; tile < tile_end; ++tile) {
      const int32_t first = tile * Shape::kKeys;
      __syncthreads();  // the last tile has been used
      LoadTile(shared.k, k_plane, common.head_dim, params.k_row_elements, row, keys, first);
      LoadTile(shared.v, v_plane, common.head_dim_v, params.v_row_elements, row, keys, first);
      __syncthreads();
      Tile(rows, first, parity, sum);
      AddValues(rows, output);
      parity ^= 1;
    }
    AddParts(rows, output);

    const bool whole = piece.pieces == 1;
    const int64_t partial_row =
        PartialRow(forward, params.split.packs, PartialSlot(column, piece.begin == 0), pack_index);
    __syncthreads();
    if (thread < rows) {
      const int head = first_head + thread % pack;
      float lse =
          sum == 0.0f ? NegativeInfinity() : (shared.max[parity ^ 1][thread] + log2f(sum)) * kLn2;
      float weight = sum == 0.0f ? 0.0f : 1.0f / sum;
      float unused = 0.0f;
      if (whole && forward.sinks != nullptr) JoinSink(forward.sinks[head], lse, weight, unused);
      shared.factor[thread] = weight;
      if (whole) {
        forward.lse[head * common.q_rows + first_q + thread / pack] = lse;
      } else {
        forward.partial_lse[partial_row + thread] = lse;
      }
    }
    __syncthreads();
    if (thread < Shape::kDim / 2) {
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r) {
        if (r >= rows) break;
        const int64_t q_row = first_q + r / pack;
        const int head = first_head + r % pack;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int at = thread * 2 + c;
          if (at >= common.head_dim_v) continue;
          const float value = output[r][c] * shared.factor[r];
          const int64_t target = (q_row * common.num_heads + head) * common.head_dim_v + at;
          if (!whole) {
            forward.partial_out[(partial_row + r) * common.head_dim_v + at] = value;
          } else if (forward.final) {
            static_cast<T*>(forward.out)[target] = FromFloat<T>(value);
          } else {
            forward.out_acc[target] = value;
          }
        }
      }
    }
    if (whole) return;
    PackedUnit packed;
    packed.first_q = first_q;
    packed.rows = rows;
    packed.first_head = first_head;
    packed.pack_index = pack_index;
    packed.first_slot = PartialSlot(piece.first_column, true);
    packed.pieces = piece.pieces;
    const int64_t ticket =
        int64_t{TicketOf(row, row_index, unit, rule.unit_queries)} * split.packs + pack_index;
    // Eight pieces of wide rows would take more registers than sm_80's build has.
    constexpr int kAtOnce = Shape::kDim > 128 ? 4 : 8;
    FinishPiece<T, MergeShape<Shape::kDim, Shape::kWarps, 1, kAtOnce, 1, 8>>(
        forward, split, packed, PartialSlot(column, piece.begin == 0), ticket, &shared.last, thread,
        [] { __syncthreads(); });
  }
};

// kParted: the cache holds one of several parts of each sequence.
template <typename Shape, bool kParted>
__device__ __forceinline__ void RunPortable(const PortableParams& params, char* memory) {
  const SplitParams split = CompiledSplit<kParted>(params.split);
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
  const int column = static_cast<int>(blockIdx.x) / params.split.packs;
  const int pack_index = static_cast<int>(blockIdx.x) % params.split.packs;
  const ColumnStart start =
      FindColumn<Shape::kKeys, Shape::kThreads>(params.step, split, column, shared.scratch);
#if __CUDA_ARCH__ >= 900
  // The append in front of this kernel is complete from here on.
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const char* const k_plane =
      params.cache + start.plane * (params.k_plane_bytes + params.v_plane_bytes);
  const int first_head = pack_index * params.forward.head_pack;
  const PortableAttention<Shape> attention{params,
                                           split,
                                           shared,
                                           k_plane,
                                           k_plane + params.k_plane_bytes,
                                           first_head / params.forward.common.group_size,
                                           first_head};
  ForEachPiece<Shape::kKeys>(params.step, split, column, start,
                             [&](const PagedRow& row, int row_index, int32_t unit,
                                 const TileSpan& tiles, const UnitPiece& piece) {
                               attention.Item(row, row_index, unit, tiles, piece, column,
                                              pack_index);
                             });
}

}  // namespace ringattn::worker::cuda::paged

// Within namespace ringattn::worker::cuda::paged: the kernels for head dims up to `dim`, and the
// keys of their tiles.
#define RINGATTN_PAGED_PORTABLE_KERNEL(kernel, type, dim, keys, parted)  \
  __global__ void __launch_bounds__(128, 2)                              \
      kernel(const __grid_constant__ PortableParams params) {            \
    extern __shared__ __align__(16) char shared[];                       \
    RunPortable<PortableShape<type, dim, keys>, parted>(params, shared); \
  }
#define RINGATTN_PAGED_PORTABLE_KERNELS(name, dim, keys_fp32, keys_16, parted)     \
  RINGATTN_PAGED_PORTABLE_KERNEL(fp32_##name, float, dim, keys_fp32, parted)       \
  RINGATTN_PAGED_PORTABLE_KERNEL(bf16_##name, __nv_bfloat16, dim, keys_16, parted) \
  RINGATTN_PAGED_PORTABLE_KERNEL(fp16_##name, __half, dim, keys_16, parted)        \
  static PortableKernel KernelOf_##name() {                                        \
    using Single = PortableShape<float, dim, keys_fp32>;                           \
    using Half = PortableShape<__half, dim, keys_16>;                              \
    return {reinterpret_cast<const void*>(&fp32_##name),                           \
            reinterpret_cast<const void*>(&bf16_##name),                           \
            reinterpret_cast<const void*>(&fp16_##name),                           \
            dim,                                                                   \
            Half::kThreads,                                                        \
            static_cast<int32_t>(sizeof(Single::Shared)),                          \
            static_cast<int32_t>(sizeof(Half::Shared))};                           \
  }
#define RINGATTN_PAGED_PORTABLE(dim, keys_fp32, keys_16)                                        \
  RINGATTN_PAGED_PORTABLE_KERNELS(paged_attention_d##dim, dim, keys_fp32, keys_16, false)       \
  RINGATTN_PAGED_PORTABLE_KERNELS(paged_attention_part_d##dim, dim, keys_fp32, keys_16, true)   \
  PortableKernel PortableKernel_d##dim(bool parted) {                                           \
    return parted ? KernelOf_paged_attention_part_d##dim() : KernelOf_paged_attention_d##dim(); \
  }

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_PORTABLE_ATTENTION_CUH_
