// What a forward's consumer thread does to its scores between the product and the softmax, when
// they have terms: two rows (eight apart), columns 8 n + 2 q and the next, as in
// forward_softmax.cuh. The order of docs/semantics.md: scale, softcap, bias, ALiBi, masks.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_FORWARD_SCORES_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_FORWARD_SCORES_CUH_

#include "worker/kernels/cuda/keep_bits.h"
#include "worker/kernels/cuda/primitives/numerics.cuh"
#include "worker/kernels/cuda/score_rule.cuh"
#include "worker/kernels/cuda/sm90/forward_epilogue.cuh"
#include "worker/kernels/cuda/sm90/forward_softmax.cuh"
#include "worker/kernels/cuda/sm90/terms_forward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

// The thread's two rows of an item, in shared memory: registers are short.
struct TermRows {
  TermRow* upper;  // the lower one is eight on

  __device__ __forceinline__ const TermRow& Of(int half) const { return upper[half * 8]; }

  // Executed by one whole warp. `document`: of a packed problem's tile.
  __device__ __forceinline__ void Load(const TermForwardKernelParams& params, const WorkSlot& slot,
                                       int packed_row, int document) const {
    const TermParams& terms = params.terms;
    const CommonParams& common = params.forward.common;
    const int pack = params.forward.head_pack;
    __syncwarp();  // everybody has left the rows of the last item
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int packed = packed_row + half * 8;
      const int head = slot.first_head + (pack == 1 ? 0 : packed % pack);
      TermRow row = {0.0f, -1, packed / pack, head, -1, 0};
      if (packed < slot.tile.q_rows * pack) {
        if (terms.slopes != nullptr) {
          const int64_t slopes = terms.packed ? document : slot.batch;
          row.slope = terms.slopes[(terms.slopes_per_batch ? slopes * common.num_heads : 0) + head];
        }
        const int64_t local_row = slot.tile.q_row_begin + row.q_row;
        if (terms.q_segment_ids != nullptr) {
          row.id = terms.q_segment_ids[slot.batch * common.q_rows + local_row];
        }
        const int64_t plane = (terms.bias_per_batch ? slot.batch : 0) *
                                  int64_t{terms.bias_per_head ? common.num_heads : 1} +
                              (terms.bias_per_head ? head : 0);
        row.bias_at = (plane * common.q_rows + local_row) * terms.columns;
      }
      if ((threadIdx.x & 3) == 0) upper[half * 8] = row;
    }
    __syncwarp();
  }
};

template <typename Shape>
struct TermForwardScores {
  using T = typename Shape::T;
  static constexpr int kKeys = Shape::kKeys;
  using Scores = float[kKeys / 2];

  // Whether scores leave Apply in natural units, finished; else as the product left them.
  static __device__ __forceinline__ bool Transforms(const TermForwardKernelParams& params) {
    const CommonParams& common = params.forward.common;
    return common.softcap > 0.0f || common.scale_log2 <= 0.0f || params.terms.slopes != nullptr ||
           (Shape::kAll && params.terms.bias != nullptr);
  }

  // `column` is the thread's first, 2 (lane mod 4). `words` are the mask's, if the tile asks for
  // them, `tile_ids` the keys' segments in shared memory, likewise.
  static __device__ __forceinline__ void Apply(Scores& scores,
                                               const TermForwardKernelParams& params,
                                               const TermKeyTile& tile, const TermRows& rows,
                                               int column, const uint32_t (&words)[2],
                                               const int32_t* tile_ids, bool transforms) {
    if (transforms) Transform(scores, params, tile, rows, column);
    if (tile.flags & KeyTile::kMasked) {
      const int q_rows[2] = {rows.Of(0).q_row, rows.Of(1).q_row};
      MaskScores(scores, tile, q_rows, column);
    }
    if (tile.flags & TermKeyTile::kIds) {
      const int32_t own[2] = {rows.Of(0).id, rows.Of(1).id};
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const int2 ids = *reinterpret_cast<const int2*>(tile_ids + n * 8 + column);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Hide(scores[n * 4 + half * 2], ids.x != own[half] || own[half] < 0);
          Hide(scores[n * 4 + half * 2 + 1], ids.y != own[half] || own[half] < 0);
        }
      }
    }
    if (tile.flags & TermKeyTile::kMaskWords) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            Hide(scores[n * 4 + half * 2 + i], (words[half] >> (n * 2 + i) & 1) == 0);
          }
        }
      }
    }
  }

  // Dropout's bits of the thread's two rows: bit 2 n + i is set where the pair is kept.
  static __device__ __forceinline__ void KeepPairs(uint32_t (&keep)[2],
                                                   const TermForwardKernelParams& params,
                                                   const TermKeyTile& tile, const TermRows& rows,
                                                   int column) {
    const TermParams& terms = params.terms;
    const uint64_t key = static_cast<uint64_t>(tile.first_key) +
                         static_cast<uint64_t>(int64_t{params.stride} * column) + terms.first_key;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PhiloxRow row = {
          terms.key0, terms.key1,
          static_cast<uint32_t>(tile.first_query + int64_t{params.stride} * rows.Of(half).q_row +
                                terms.first_query),
          rows.Of(half).head * terms.head_step + terms.first_head,
          tile.batch_row + terms.first_batch};
      keep[half] = params.stride == 1 ? KeepBits(row, key, terms.threshold)
                                      : StridedKeepBits(row, key, params.stride, terms.threshold);
    }
  }
  // Probabilities of dropped pairs become 0; their sum was taken before.
  static __device__ __forceinline__ void Drop(Scores& probabilities, const uint32_t (&keep)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if ((keep[half] >> (n * 2 + i) & 1) == 0) probabilities[n * 4 + half * 2 + i] = 0.0f;
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ void Hide(float& score, bool hidden) {
    if (hidden) score = NegativeInfinity();
  }

  static __device__ __forceinline__ void Transform(Scores& scores,
                                                   const TermForwardKernelParams& params,
                                                   const TermKeyTile& tile, const TermRows& rows,
                                                   int column) {
    const CommonParams& common = params.forward.common;
    const bool capped = common.softcap > 0.0f;
    const Softcap cap(common);
    const float scale = common.softmax_scale;
    if (Shape::kAll && params.terms.bias != nullptr) {
      const float inside = params.terms.bias_before_softcap ? 1.0f / common.softcap : 0.0f;
      const float outside = params.terms.bias_before_softcap ? 0.0f : 1.0f;
      ForBias(scores, params, tile, rows, column, [&](float& score, float bias) {
        float x = fmaf(score, scale, bias);
        if (capped) {
          // 0 times a bias that is not finite would be NaN.
          const float argument =
              inside != 0.0f ? fmaf(bias, inside, score * cap.inner) : score * cap.inner;
          x = common.softcap * Tanh(argument);
          if (outside != 0.0f) x += bias;
        }
        score = bias == NegativeInfinity() ? bias : x;
      });
    } else if (capped) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) scores[i] = common.softcap * cap.Tangent(scores[i]);
    } else if (params.terms.slopes == nullptr) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) scores[i] *= scale;
      return;
    }
    if (params.terms.slopes == nullptr) return;
    // From here on what the scores are multiplied with is 1, unless nothing was done to them yet.
    const bool raw = !capped && !(Shape::kAll && params.terms.bias != nullptr);
    const float factor = raw ? scale : 1.0f;
    const float stride = static_cast<float>(params.stride);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Whole numbers, exact below 2^24.
      const float distance =
          tile.distance + stride * static_cast<float>(rows.Of(half).q_row - column);
      const float slope = rows.Of(half).slope;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[n * 4 + half * 2 + i];
          const float away = fabsf(fmaf(-stride, static_cast<float>(n * 8 + i), distance));
          score = fmaf(score, factor, -slope * away);
        }
      }
    }
  }

  // Calls visit(score, bias) for all of the thread's scores; a bias that does not exist is 0.
  template <typename Visit>
  static __device__ __forceinline__ void ForBias(Scores& scores,
                                                 const TermForwardKernelParams& params,
                                                 const TermKeyTile& tile, const TermRows& rows,
                                                 int column, const Visit& visit) {
    const TermParams& terms = params.terms;
    const bool vectors = params.bias_vectors && tile.first_key % 8 == 0;
    const bool wide = terms.bias_dtype == DType::kFloat32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (vectors) {
        VisitVectors(scores, terms, tile.first_key, rows.Of(half).bias_at, half, column / 2, wide,
                     visit);
      } else {
        VisitSingles(scores, terms, tile, params.stride, rows.Of(half).bias_at, half, column, wide,
                     visit);
      }
    }
  }

  // The four lanes that share a row load eight columns each of 32, then exchange them.
  template <typename Visit>
  static __device__ __forceinline__ void VisitVectors(Scores& scores, const TermParams& terms,
                                                      int64_t first_key, int64_t at, int half,
                                                      int q, bool wide, const Visit& visit) {
#pragma unroll
    for (int group = 0; group < kKeys / 32; ++group) {
      const int64_t key = first_key + (group * 4 + q) * 8;
      const bool exists = at >= 0 && key < terms.columns;
      if (wide) {
        uint4 low = {}, high = {};
        if (exists) {
          const uint4* source =
              reinterpret_cast<const uint4*>(static_cast<const float*>(terms.bias) + at + key);
          low = source[0];
          high = source[1];
        }
        uint32_t even[4] = {low.x, low.z, high.x, high.z};
        uint32_t odd[4] = {low.y, low.w, high.y, high.w};
        TransposeQuad(even, q);
        TransposeQuad(odd, q);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float* pair = scores + (group * 4 + j) * 4 + half * 2;
          visit(pair[0], __uint_as_float(even[j]));
          visit(pair[1], __uint_as_float(odd[j]));
        }
        asm volatile("" ::: "memory");  // loads of all groups at once would spill
      } else {
        uint4 loaded = {};
        if (exists) {
          loaded = *reinterpret_cast<const uint4*>(static_cast<const T*>(terms.bias) + at + key);
        }
        uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        TransposeQuad(words, q);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 bias = Unpack<T>(words[j]);
          float* pair = scores + (group * 4 + j) * 4 + half * 2;
          visit(pair[0], bias.x);
          visit(pair[1], bias.y);
        }
        if (group % 2 == 1) asm volatile("" ::: "memory");
      }
    }
  }

  template <typename Visit>
  static __device__ __forceinline__ void VisitSingles(Scores& scores, const TermParams& terms,
                                                      const TermKeyTile& tile, int stride,
                                                      int64_t at, int half, int column, bool wide,
                                                      const Visit& visit) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int c = n * 8 + column + i;
        float bias = 0.0f;
        if (at >= 0 && c < tile.columns) {
          const int64_t element = at + tile.first_key + int64_t{stride} * c;
          bias = wide ? static_cast<const float*>(terms.bias)[element]
                      : ToFloat(static_cast<const T*>(terms.bias)[element]);
        }
        visit(scores[n * 4 + half * 2 + i], bias);
      }
      if (n % 4 == 3) asm volatile("" ::: "memory");  // as above
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_FORWARD_SCORES_CUH_
