// Forward attention on tensor cores by mma.sync (sm_80 and later).
//
// Shapes: q [batch, q_rows, num_heads, head_dim], k and v per block, out as in
// attention_kernel.h; all in global memory of the launching device. One thread
// block computes one q tile (kRows rows, of one head, or of head_pack heads of
// a group for short queries) against the tile's key ranges.
//
// Shared memory: q [kRows][kDim]; k and v [2][kKeys][kDim] each, filled by
// cp.async one tile ahead, one barrier per key tile. Registers: the fp32 output
// of the warp's kRows / kWarps rows, the scores of one key tile, and the
// probabilities of 16 keys.
//
// Why this shape: shared-memory reads bound an mma.sync kernel first (a warp
// rereads all of k and v), so a warp takes 32 rows, for which the output
// accumulator leaves room up to head_dim 128 (above, see
// sm80_attention_forward_wide.cuh). The products of 16 keys with V are issued
// between the exponentials of the next 16. (Deferring the whole product by a
// tile, to overlap it with the next softmax, was slower: the second set of
// probabilities left no registers to prefetch fragments.)
//
// Softmax: raw scores are compared, the scale is folded into one multiply-add
// before exp2. The reference maximum of a row moves only when the new one is
// larger by more than 2^8 (exact after normalisation), which makes rescaling
// the output rare.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_ATTENTION_FORWARD_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_ATTENTION_FORWARD_CUH_

#include "worker/kernels/cuda/device_primitives.cuh"
#include "worker/kernels/cuda/forward_epilogue.cuh"
#include "worker/kernels/cuda/forward_softmax.cuh"

namespace ringattn::worker::cuda {

template <typename T, int kDim, int kRows, int kKeys, int kWarps>
struct Sm80Forward {
  static constexpr int kTileRows = kRows;
  static constexpr int kTileKeys = kKeys;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRowTiles = kRows / (16 * kWarps);  // m16 tiles per warp
  static constexpr int kDimSteps = kDim / 16;
  static constexpr int kKeySteps = kKeys / 16;
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr bool kQInRegisters = kRowTiles * kDimSteps * 4 <= 32;
  // Copying a tile's values later than its keys keeps a burst of copies from
  // blocking ldmatrix; measured better from head_dim 128 on, worse below.
  static constexpr bool kSpreadCopies = kDim >= 128;
  static constexpr int kQBytes = kRows * kDim * 2;
  static constexpr int kKvBytes = kKeys * kDim * 2;
  static constexpr int kSharedBytes = kQBytes + 4 * kKvBytes;

  using Tile = SharedTile<kDim>;
  using Scores = float[kRowTiles][kKeyTiles][4];
  using Probabilities = uint32_t[kRowTiles][4];  // of 16 keys
  using Output = float[kRowTiles][kDim / 8][4];
  using QFragments = uint32_t[kRowTiles][kDimSteps][4];

  // Running statistics of the lane's rows: [row tile][upper or lower half].
  // Probabilities are exp2(score * multiplier - offset); a row's offset moves when
  // a score exceeds its limit (-inf until a key was seen).
  struct Rows {
    float limit[kRowTiles][2];
    float offset[kRowTiles][2];
    float sum[kRowTiles][2];  // this lane's columns only, until the end
  };

  template <int kStep>
  static __device__ __forceinline__ void ScoreStep(Scores& scores, const QFragments& q_fragments,
                                                   uint32_t q_base, uint32_t k_base) {
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if constexpr (kQInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = q_fragments[m][kStep][i];
      } else {
        LoadMatrices(a[m], Tile::Step(q_base, kStep) + m * 16 * Tile::kRowBytes);
      }
    }
#pragma unroll
    for (int n = 0; n < kKeySteps; ++n) {
      uint32_t b[4];
      LoadMatrices(b, Tile::Step(k_base, kStep) + n * 16 * Tile::kRowBytes);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        MultiplyAdd<T, kStep == 0>(scores[m][2 * n], a[m], b[0], b[1]);
        MultiplyAdd<T, kStep == 0>(scores[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
    if constexpr (kStep + 1 < kDimSteps) {
      ScoreStep<kStep + 1>(scores, q_fragments, q_base, k_base);
    }
  }

  template <int kStep>
  static __device__ __forceinline__ void LoadQFragments(QFragments& fragments, uint32_t q_base) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      LoadMatrices(fragments[m][kStep], Tile::Step(q_base, kStep) + m * 16 * Tile::kRowBytes);
    }
    if constexpr (kStep + 1 < kDimSteps) LoadQFragments<kStep + 1>(fragments, q_base);
  }

  // output += probabilities of 16 keys times their values.
  template <int kColumnStep>
  static __device__ __forceinline__ void ValueStep(Output& output, const Probabilities& p,
                                                   int key_step, uint32_t v_base) {
    uint32_t b[4];
    LoadMatricesTransposed(b, Tile::Step(v_base, kColumnStep) + key_step * 16 * Tile::kRowBytes);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      MultiplyAdd<T>(output[m][2 * kColumnStep], p[m], b[0], b[1]);
      MultiplyAdd<T>(output[m][2 * kColumnStep + 1], p[m], b[2], b[3]);
    }
    if constexpr (kColumnStep + 1 < kDimSteps) {
      ValueStep<kColumnStep + 1>(output, p, key_step, v_base);
    }
  }

  // Moves the offsets of rows whose maximum grew, and rescales what they have.
  static __device__ __forceinline__ void UpdateOffsets(const Scores& scores, float multiplier,
                                                       float headroom, Rows& rows, Output& output) {
    float max[kRowTiles][2];
    bool grew = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = fmaxf(scores[m][0][half * 2], scores[m][0][half * 2 + 1]);
#pragma unroll
        for (int n = 1; n < kKeyTiles; ++n) {
          x = fmaxf(x, fmaxf(scores[m][n][half * 2], scores[m][n][half * 2 + 1]));
        }
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
        max[m][half] = x;
        grew |= x > rows.limit[m][half];
      }
    }
    if (!__any_sync(0xffffffff, grew)) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float factor = 1.0f;
        if (max[m][half] > rows.limit[m][half]) {
          const float offset = max[m][half] * multiplier;
          factor = rows.limit[m][half] == NegativeInfinity() ? 0.0f
                                                             : Exp2(rows.offset[m][half] - offset);
          rows.offset[m][half] = offset;
          rows.limit[m][half] = max[m][half] + headroom;
          rows.sum[m][half] *= factor;
        }
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          output[m][n][half * 2] *= factor;
          output[m][n][half * 2 + 1] *= factor;
        }
      }
    }
  }

  static __device__ __forceinline__ void Run(const ForwardParams& params, char* shared) {
    const CommonParams& common = params.common;
    if (Stopped(common.stop_word)) return;
    const ForwardTile tile = params.tiles[blockIdx.x];
    const int pack = params.head_pack;
    const int first_head = blockIdx.y * pack;
    const int kv_head = first_head / common.group_size;
    const int64_t batch = common.batch_begin + blockIdx.z;
    const unsigned thread = OpaqueThread();
    const int lane = thread & 31;
    const int warp_row = (thread >> 5) * 16 * kRowTiles;

    const uint32_t q_tile = SharedAddress(shared);
    const uint32_t k_tiles = q_tile + kQBytes;
    const uint32_t v_tiles = k_tiles + 2 * kKvBytes;
    // Where a lane points ldmatrix: A and transposed B by (lane % 16, lane / 16),
    // plain B (keys are rows) by (lane % 8 + 8 * (lane / 16), lane / 8 % 2).
    const uint32_t q_base = q_tile + Tile::Offset(warp_row + (lane & 15), lane >> 4);
    const uint32_t k_lane = Tile::Offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
    const uint32_t v_lane = Tile::Offset(lane & 15, lane >> 4);

    // What is loaded next: a tile of the range `load_index` from row `load_row`.
    using Copy = TileCopy<T, kDim, kKeys, kThreads>;
    const int64_t k_stride = int64_t{common.num_kv_heads} * common.head_dim;
    const int64_t v_stride = int64_t{common.num_kv_heads} * common.head_dim_v;
    const T* k_source = nullptr;  // this thread's, in the next tile
    const T* v_source = nullptr;
    int load_index = tile.range_begin;
    int load_row = 0;
    int load_count = 0;
    const auto open_range = [&] {
      const KvRange& range = params.ranges[load_index];
      const int64_t token = batch * range.block_rows + range.row_begin;
      k_source =
          Copy::First(static_cast<const T*>(range.k) + token * k_stride + kv_head * common.head_dim,
                      thread, k_stride, common.vector_qk);
      v_source = Copy::First(
          static_cast<const T*>(range.v) + token * v_stride + kv_head * common.head_dim_v, thread,
          v_stride, common.vector_v);
      load_row = 0;
      load_count = range.row_count;
    };
    const auto load_keys = [&](int buffer) {
      Copy::Next(k_tiles + buffer * kKvBytes, thread, k_source, k_stride, load_count - load_row,
                 common.head_dim, common.vector_qk);
    };
    // The values of the same tile; then the next tile's turn.
    const auto load_values = [&](int buffer) {
      Copy::Next(v_tiles + buffer * kKvBytes, thread, v_source, v_stride, load_count - load_row,
                 common.head_dim_v, common.vector_v);
      load_row += kKeys;
      if (load_row >= load_count && ++load_index < tile.range_end) open_range();
    };

    LoadQTile<T, kDim, kRows, kThreads>(q_tile, params, tile, first_head, batch);
    if (load_index < tile.range_end) {
      open_range();
      load_keys(0);
      load_values(0);
    }
    CommitCopies();

    Output output;
    Rows rows;
    QFragments q_fragments;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[m][n][i] = 0.0f;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows.limit[m][half] = NegativeInfinity();
        rows.offset[m][half] = 0.0f;
        rows.sum[m][half] = 0.0f;
      }
    }
    const bool transform = common.softcap > 0.0f || common.scale_log2 <= 0.0f;
    const float multiplier = transform ? 1.0f : common.scale_log2;
    const float headroom = kOffsetHeadroom / multiplier;

    int buffer = 0;
    for (int index = tile.range_begin; index < tile.range_end; ++index) {
      const KvRange& range = params.ranges[index];
      const int row_count = range.row_count;
      const int full_begin = range.full_begin;
      const int full_end = range.full_end;
      for (int row = 0; row < row_count; row += kKeys) {
        WaitCopies<0>();
        __syncthreads();  // this tile is there, and everyone has left the other buffer
        const bool more = load_index < tile.range_end;
        if (more) load_keys(buffer ^ 1);
        if (!kSpreadCopies && more) load_values(buffer ^ 1);
        if (kQInRegisters && row == 0) LoadQFragments<0>(q_fragments, q_base);
        Scores scores;
        ScoreStep<0>(scores, q_fragments, q_base, k_tiles + buffer * kKvBytes + k_lane);
        if (kSpreadCopies && more) load_values(buffer ^ 1);
        if (more) CommitCopies();
        if (transform) TransformScores(scores, common);
        if (row < full_begin || row + kKeys > full_end) {
          MaskScores<16>(scores, range, warp_row + (lane >> 2), row + 2 * (threadIdx.x & 3), pack);
        }
        UpdateOffsets(scores, multiplier, headroom, rows, output);
#pragma unroll
        for (int step = 0; step < kKeySteps; ++step) {
          Probabilities p;
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              Exponentials<T>(scores[m][2 * step + n], n, multiplier, rows.offset[m], rows.sum[m],
                              p[m]);
            }
          }
          ValueStep<0>(output, p, step, v_tiles + buffer * kKvBytes + v_lane);
        }
        buffer ^= 1;
      }
    }

#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = QuadSum(rows.sum[m][half]);
        const int packed_row = warp_row + m * 16 + half * 8 + (lane >> 2);
        ForwardRow target(params, tile, first_head, batch, packed_row,
                          RowLse(rows.offset[m][half], sum), sum == 0.0f ? 0.0f : 1.0f / sum);
        __syncwarp();  // all lanes of a row have read the previous lse
        if (!target.exists) continue;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          target.template Store2<T>(n * 8 + (lane & 3) * 2, output[m][n][half * 2],
                                    output[m][n][half * 2 + 1]);
        }
        if ((lane & 3) == 0) target.StoreLse();
      }
    }
  }
};

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_ATTENTION_FORWARD_CUH_
