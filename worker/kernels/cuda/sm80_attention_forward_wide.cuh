// Forward attention on tensor cores by mma.sync for wide heads (head_dim above 128;
// sm_80 and later). Contract, masks, softmax and epilogue are those of
// sm80_attention_forward.cuh.
//
// Shared memory: q [kRows][kDim]; k and v [2][kKeys][kDim] each, filled by cp.async;
// P [kRows][kKeys]; one float per thread to exchange. Registers: the fp32 output of 32
// rows and half of the columns, the scores of 32 rows and half of the tile's keys, the
// previous tile's probabilities for them, and q's first kQSteps fragments.
//
// Why this shape: shared-memory reads bound the kernel. A warp that keeps whole output
// rows has room for 16 of them at these dims and rereads all of k and v for them. Here
// two warps share 32 rows. Each computes the scores of half the keys and the output of
// half the columns, so that it reads half of k and half of v for twice the rows; for
// that P has to pass through shared memory, of which a warp reads only what the other
// made. At head_dim 256 a tile of 64 keys moves 480 instead of 640 KB, at 192 (with a
// third of q in registers) 336 instead of 480.
//
// Halves are dealt in groups of 16 (keys or columns), in turn, which keeps every
// address one exclusive or away from the warp's base for any head-dim class.
//
// Order: the product with V comes one tile late, so that no one waits for the other
// warp and the exponentials of a tile run beside the products of the last one:
//   S(t); own maxima to the other warp; O += the other's P(t-1) V;
//   pair barrier: maxima are exchanged and P is unused;
//   O += own P(t-1) V, and exponentials of S(t) between its products; P(t) is stored.
// k therefore runs one tile ahead of v, and __syncthreads, which begins a tile, is what
// makes P(t-1) visible. When a row's offset moves (rare), the products come first.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_ATTENTION_FORWARD_WIDE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_ATTENTION_FORWARD_WIDE_CUH_

#include "worker/kernels/cuda/device_primitives.cuh"
#include "worker/kernels/cuda/forward_epilogue.cuh"
#include "worker/kernels/cuda/forward_softmax.cuh"

namespace ringattn::worker::cuda {

// kQSteps: how many of q's kDim / 16 fragment columns stay in registers.
template <typename T, int kDim, int kRows, int kKeys, int kQSteps>
struct Sm80ForwardWide {
  static constexpr int kTileRows = kRows;
  static constexpr int kTileKeys = kKeys;
  static constexpr int kRowTiles = 2;  // m16 tiles per warp
  static constexpr int kWarps = kRows / 16;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kDimSteps = kDim / 16;
  static constexpr int kKeySteps = kKeys / 32;    // 16-key groups of a half
  static constexpr int kColumnSteps = kDim / 32;  // 16-column groups of a half
  static constexpr int kKeyTiles = 2 * kKeySteps;
  static constexpr int kAhead = 2;  // fragments of v that are on their way
  static_assert(kRows % 32 == 0 && kKeys % 32 == 0 && kDim % 64 == 0);
  static_assert(kWarps / 2 < 16, "a named barrier for each pair of warps");

  static constexpr int kQBytes = kRows * kDim * 2;
  static constexpr int kKvBytes = kKeys * kDim * 2;
  static constexpr int kPBytes = kRows * kKeys * 2;
  static constexpr int kSharedBytes = kQBytes + 4 * kKvBytes + kPBytes + kThreads * 4;

  using Tile = SharedTile<kDim>;
  using ProbabilityTile = SharedTile<kKeys>;
  using Copy = TileCopy<T, kDim, kKeys, kThreads>;
  using Scores = float[kRowTiles][kKeyTiles][4];
  using Probabilities = uint32_t[kKeySteps][kRowTiles][4];
  using Output = float[kRowTiles][2 * kColumnSteps][4];
  using QFragments = uint32_t[kQSteps + 1][kRowTiles][4];

  // Running statistics of the lane's rows [row tile][upper or lower half]; see
  // Sm80Forward. Both warps of a pair have the same limits and offsets, and sums over
  // their own columns.
  struct Rows {
    float limit;  // of row lane / 4 of m8 group lane % 4
    float offset[kRowTiles][2];
    float sum[kRowTiles][2];
  };

  // Which warps share rows. Neighbours are on different schedulers.
  static __device__ __forceinline__ void SyncPair(int row_group) { SyncThreads<64>(1 + row_group); }

  template <int kStep>
  static __device__ __forceinline__ void LoadScoreStep(uint32_t (&a)[kRowTiles][4],
                                                       uint32_t (&b)[kKeySteps][4],
                                                       const QFragments& q_fragments,
                                                       uint32_t q_base, uint32_t k_base) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if constexpr (kStep < kQSteps) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = q_fragments[kStep][m][i];
      } else {
        LoadMatrices(a[m], Tile::Step(q_base, kStep) + m * 16 * Tile::kRowBytes);
      }
    }
#pragma unroll
    for (int n = 0; n < kKeySteps; ++n) {
      LoadMatrices(b[n], Tile::Step(k_base, kStep) + n * 32 * Tile::kRowBytes);
    }
  }

  // Continues scores = q k^T from step kStep, whose fragments are in `a` and `b`; the
  // next step's are on their way while its products run.
  template <int kStep>
  static __device__ __forceinline__ void ScoreStep(Scores& scores,
                                                   const uint32_t (&a)[kRowTiles][4],
                                                   const uint32_t (&b)[kKeySteps][4],
                                                   const QFragments& q_fragments, uint32_t q_base,
                                                   uint32_t k_base) {
    uint32_t next_a[kRowTiles][4];
    uint32_t next_b[kKeySteps][4];
    if constexpr (kStep + 1 < kDimSteps) {
      LoadScoreStep<kStep + 1>(next_a, next_b, q_fragments, q_base, k_base);
    }
#pragma unroll
    for (int n = 0; n < kKeySteps; ++n) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        MultiplyAdd<T, kStep == 0>(scores[m][2 * n], a[m], b[n][0], b[n][1]);
        MultiplyAdd<T, kStep == 0>(scores[m][2 * n + 1], a[m], b[n][2], b[n][3]);
      }
    }
    if constexpr (kStep + 1 < kDimSteps) {
      ScoreStep<kStep + 1>(scores, next_a, next_b, q_fragments, q_base, k_base);
    }
  }

  static __device__ __forceinline__ void ScoreProduct(Scores& scores, const QFragments& q_fragments,
                                                      uint32_t q_base, uint32_t k_base) {
    KeepHere(q_base);
    KeepHere(k_base);
    uint32_t a[kRowTiles][4];
    uint32_t b[kKeySteps][4];
    LoadScoreStep<0>(a, b, q_fragments, q_base, k_base);
    ScoreStep<0>(scores, a, b, q_fragments, q_base, k_base);
  }

  template <int kStep>
  static __device__ __forceinline__ void HoldQ(QFragments& fragments, uint32_t q_base) {
    if constexpr (kStep < kQSteps) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        LoadMatrices(fragments[kStep][m], Tile::Step(q_base, kStep) + m * 16 * Tile::kRowBytes);
      }
      HoldQ<kStep + 1>(fragments, q_base);
    }
  }

  // output += P V for half of the keys. `load_p(step, a)` gets the A fragments of a
  // group of 16 keys; `between(i)` runs after the i-th of kKeySteps * kColumnSteps
  // groups of products.
  template <typename LoadP, typename Between>
  static __device__ __forceinline__ void ValueProduct(Output& output, uint32_t v_base,
                                                      const LoadP& load_p, const Between& between) {
    constexpr int kCount = kKeySteps * kColumnSteps;
    KeepHere(v_base);
    const auto load_v = [&](int i, uint32_t(&b)[4]) {
      LoadMatricesTransposed(
          b, Tile::Step(v_base, 2 * (i % kColumnSteps)) + i / kColumnSteps * 32 * Tile::kRowBytes);
    };
    uint32_t a[2][kRowTiles][4];
    uint32_t b[kAhead + 1][4];
    load_p(0, a[0]);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_v(i, b[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int step = i / kColumnSteps;
      const int column = i % kColumnSteps;
      if (i + kAhead < kCount) load_v(i + kAhead, b[(i + kAhead) % (kAhead + 1)]);
      if (column + kAhead == kColumnSteps && step + 1 < kKeySteps) {
        load_p(step + 1, a[(step + 1) % 2]);
      }
      const uint32_t(&v)[4] = b[i % (kAhead + 1)];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        MultiplyAdd<T>(output[m][2 * column], a[step % 2][m], v[0], v[1]);
        MultiplyAdd<T>(output[m][2 * column + 1], a[step % 2][m], v[2], v[3]);
      }
      between(i);
    }
  }

  // The lane's part of the row maxima: of row lane / 4 of m8 group lane % 4.
  static __device__ __forceinline__ float Maximum(const Scores& scores, int lane) {
    float max[kRowTiles * 2];
#pragma unroll
    for (int group = 0; group < kRowTiles * 2; ++group) {
      const int half = group % 2;
      float x = fmaxf(scores[group / 2][0][half * 2], scores[group / 2][0][half * 2 + 1]);
#pragma unroll
      for (int n = 1; n < kKeyTiles; ++n) {
        x = fmaxf(x, fmaxf(scores[group / 2][n][half * 2], scores[group / 2][n][half * 2 + 1]));
      }
      max[group] = x;
    }
    // Four lanes have four partial maxima each; each lane ends with a whole one.
    const bool odd = lane & 1;
    const bool high = lane & 2;
    const float low_pair =
        fmaxf(odd ? max[1] : max[0], __shfl_xor_sync(0xffffffff, odd ? max[0] : max[1], 1));
    const float high_pair =
        fmaxf(odd ? max[3] : max[2], __shfl_xor_sync(0xffffffff, odd ? max[2] : max[3], 1));
    return fmaxf(high ? high_pair : low_pair,
                 __shfl_xor_sync(0xffffffff, high ? low_pair : high_pair, 2));
  }

  // Moves the offsets of rows whose maximum grew, and rescales what they have.
  static __device__ __forceinline__ void MoveOffsets(float max, float multiplier, int lane,
                                                     Rows& rows, Output& output) {
    const float old_offset = lane & 2 ? (lane & 1 ? rows.offset[1][1] : rows.offset[1][0])
                                      : (lane & 1 ? rows.offset[0][1] : rows.offset[0][0]);
    float own_offset = old_offset;
    float own_factor = 1.0f;
    if (max > rows.limit) {
      own_offset = max * multiplier;
      own_factor = rows.limit == NegativeInfinity() ? 0.0f : Exp2(old_offset - own_offset);
      rows.limit = max + kOffsetHeadroom / multiplier;
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int source = (lane & 28) + m * 2 + half;
        rows.offset[m][half] = __shfl_sync(0xffffffff, own_offset, source);
        const float factor = __shfl_sync(0xffffffff, own_factor, source);
        rows.sum[m][half] *= factor;
#pragma unroll
        for (int n = 0; n < 2 * kColumnSteps; ++n) {
          output[m][n][half * 2] *= factor;
          output[m][n][half * 2 + 1] *= factor;
        }
      }
    }
  }

  static __device__ __forceinline__ void Run(const ForwardParams& params, char* shared) {
    const CommonParams& common = params.common;
    // One answer for all: the warps of a pair would wait for each other for ever.
    if (__syncthreads_or(Stopped(common.stop_word))) return;
    // Read again wherever it is needed, rather than kept.
    const ForwardTile& tile = params.tiles[blockIdx.x];
    const int pack = params.head_pack;
    const int first_head = blockIdx.y * pack;
    const int kv_head = first_head / common.group_size;
    const int64_t batch = common.batch_begin + blockIdx.z;
    const unsigned thread = OpaqueThread();
    const int lane = thread & 31;
    const int warp = thread >> 5;
    const int row_group = warp / 2;
    const int side = warp % 2;  // which half of the keys and columns
    const int warp_row = row_group * 32;

    const uint32_t q_tile = SharedAddress(shared);
    const uint32_t k_tiles = q_tile + kQBytes;
    const uint32_t v_tiles = k_tiles + 2 * kKvBytes;
    const uint32_t p_tile = v_tiles + 2 * kKvBytes;
    // ldmatrix positions; see the table in device_primitives.cuh.
    const uint32_t q_base = Opaque(q_tile + Tile::Offset(warp_row + (lane & 15), lane >> 4));
    const uint32_t k_base = Opaque(
        k_tiles + Tile::Offset(side * 16 + (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1));
    const uint32_t v_base =
        Opaque(v_tiles + Tile::Offset(side * 16 + (lane & 15), side * 2 + (lane >> 4)));
    const uint32_t other_v = side ? -16 * Tile::kRowBytes : 16 * Tile::kRowBytes;
    const uint32_t p_base =
        Opaque(p_tile + ProbabilityTile::Offset(warp_row + (lane & 15), side * 2 + (lane >> 4)));
    // One float of each lane: [warp][lane].
    float* const exchange = reinterpret_cast<float*>(shared + kQBytes + 4 * kKvBytes + kPBytes);

    const int64_t k_stride = int64_t{common.num_kv_heads} * common.head_dim;
    const int64_t v_stride = int64_t{common.num_kv_heads} * common.head_dim_v;
    const T* k_source = nullptr;  // this thread's, in the tile that is copied next
    const T* v_source = nullptr;
    const auto open_keys = [&](const KvRange& range) {
      const int64_t token = batch * range.block_rows + range.row_begin;
      k_source =
          Copy::First(static_cast<const T*>(range.k) + token * k_stride + kv_head * common.head_dim,
                      thread, k_stride, common.vector_qk);
    };
    const auto open_values = [&](const KvRange& range) {
      const int64_t token = batch * range.block_rows + range.row_begin;
      v_source = Copy::First(
          static_cast<const T*>(range.v) + token * v_stride + kv_head * common.head_dim_v, thread,
          v_stride, common.vector_v);
    };

    LoadQTile<T, kDim, kRows, kThreads>(q_tile, params, tile, first_head, batch);
    if (tile.range_begin < tile.range_end) {
      const KvRange& range = params.ranges[tile.range_begin];
      open_keys(range);
      Copy::Next(k_tiles, thread, k_source, k_stride, range.row_count, common.head_dim,
                 common.vector_qk);
    }
    CommitCopies();

    Output output;
    Rows rows;
    QFragments q_fragments;
    Probabilities p;  // of the last tile, this warp's keys
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < 2 * kColumnSteps; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[m][n][i] = 0.0f;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows.offset[m][half] = 0.0f;
        rows.sum[m][half] = 0.0f;
      }
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) p[step][m][i] = 0;
      }
    }
    rows.limit = NegativeInfinity();
    const bool transform = common.softcap > 0.0f || common.scale_log2 <= 0.0f;
    const float multiplier = transform ? 1.0f : common.scale_log2;

    // The two halves of O += P V, against the values in `buffer`.
    const auto nothing = [](int) {};
    const auto add_other = [&](int buffer) {
      ValueProduct(
          output, v_base + other_v + buffer * kKvBytes,
          [&](int step, uint32_t(&a)[kRowTiles][4]) {
            uint32_t base = p_base;
            KeepHere(base);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
              LoadMatrices(a[m], ProbabilityTile::Step(base ^ 32, 2 * step) +
                                     m * 16 * ProbabilityTile::kRowBytes);
            }
          },
          nothing);
    };
    const auto add_own = [&](int buffer, const auto& between) {
      ValueProduct(
          output, v_base + buffer * kKvBytes,
          [&](int step, uint32_t(&a)[kRowTiles][4]) {
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
              for (int i = 0; i < 4; ++i) a[m][i] = p[step][m][i];
            }
          },
          between);
    };

    int buffer = 0;
    bool first = true;
    for (int index = tile.range_begin; index < tile.range_end; ++index) {
      const KvRange& range = params.ranges[index];
      const int row_count = range.row_count;
      const int full_begin = range.full_begin;
      const int full_end = range.full_end;
      open_values(range);
      for (int row = 0; row < row_count; row += kKeys) {
        WaitCopies<0>();
        __syncthreads();  // k, the last v and P are there; everyone has left the others
        if (row + kKeys < row_count) {
          Copy::Next(k_tiles + (buffer ^ 1) * kKvBytes, thread, k_source, k_stride,
                     row_count - row - kKeys, common.head_dim, common.vector_qk);
        } else if (index + 1 < tile.range_end) {
          open_keys(params.ranges[index + 1]);
          Copy::Next(k_tiles + (buffer ^ 1) * kKvBytes, thread, k_source, k_stride,
                     params.ranges[index + 1].row_count, common.head_dim, common.vector_qk);
        }
        if (kQSteps > 0 && first) HoldQ<0>(q_fragments, q_base);
        Scores scores;
        ScoreProduct(scores, q_fragments, q_base, k_base + buffer * kKvBytes);
        Copy::Next(v_tiles + buffer * kKvBytes, thread, v_source, v_stride, row_count - row,
                   common.head_dim_v, common.vector_v);
        CommitCopies();
        if (transform) TransformScores(scores, common);
        if (row < full_begin || row + kKeys > full_end) {
          MaskScores<32>(scores, range, warp_row + (lane >> 2), row + side * 16 + 2 * (lane & 3),
                         pack);
        }
        float max = Maximum(scores, lane);
        exchange[thread] = max;
        if (!first) add_other(buffer ^ 1);
        SyncPair(row_group);
        max = fmaxf(max, exchange[thread ^ 32]);
        const bool grew = __any_sync(0xffffffff, max > rows.limit);

        // Half an A fragment of P(t).
        Probabilities next;
        const auto exponentials = [&](int i) {
          const int n = i % 2;
          const int m = i / 2 % kRowTiles;
          const int step = i / 2 / kRowTiles;
          Exponentials<T>(scores[m][2 * step + n], n, multiplier, rows.offset[m], rows.sum[m],
                          next[step][m]);
          if (n == 1) {
            uint32_t base = p_base;
            KeepHere(base);
            StoreMatrices(
                ProbabilityTile::Step(base, 2 * step) + m * 16 * ProbabilityTile::kRowBytes,
                next[step][m]);
          }
        };
        constexpr int kExponentials = kRowTiles * kKeyTiles;
        if (first || grew) {
          if (!first) add_own(buffer ^ 1, nothing);
          MoveOffsets(max, multiplier, lane, rows, output);
#pragma unroll
          for (int i = 0; i < kExponentials; ++i) exponentials(i);
        } else {
          add_own(buffer ^ 1, [&](int i) {
            constexpr int kProducts = kKeySteps * kColumnSteps;
#pragma unroll
            for (int e = i * kExponentials / kProducts; e < (i + 1) * kExponentials / kProducts;
                 ++e) {
              exponentials(e);
            }
          });
        }
#pragma unroll
        for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) p[step][m][i] = next[step][m][i];
          }
        }
        first = false;
        buffer ^= 1;
      }
    }
    WaitCopies<0>();
    __syncthreads();
    if (!first) {
      add_other(buffer ^ 1);
      add_own(buffer ^ 1, nothing);
    }

    // Computed again rather than kept.
    uint32_t z = blockIdx.z;
    KeepHere(z);
    float sums[kRowTiles * 2];
#pragma unroll
    for (int group = 0; group < kRowTiles * 2; ++group) {
      sums[group] = QuadSum(rows.sum[group / 2][group % 2]);
    }
    exchange[thread] = lane & 2 ? (lane & 1 ? sums[3] : sums[2]) : (lane & 1 ? sums[1] : sums[0]);
    SyncPair(row_group);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int group = m * 2 + half;
        const float sum = sums[group] + exchange[((thread & ~3u) ^ 32) + group];
        const int packed_row = warp_row + m * 16 + half * 8 + (lane >> 2);
        ForwardRow target(params, tile, first_head, int64_t{common.batch_begin} + z, packed_row,
                          RowLse(rows.offset[m][half], sum), sum == 0.0f ? 0.0f : 1.0f / sum);
        __syncwarp();
        SyncPair(row_group);  // both warps have read the previous lse
        if (!target.exists) continue;
#pragma unroll
        for (int n = 0; n < 2 * kColumnSteps; ++n) {
          target.template Store2<T>(n / 2 * 32 + side * 16 + n % 2 * 8 + (lane & 3) * 2,
                                    output[m][n][half * 2], output[m][n][half * 2 + 1]);
        }
        if (side == 0 && (lane & 3) == 0) target.StoreLse();
      }
    }
  }
};

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_ATTENTION_FORWARD_WIDE_CUH_
