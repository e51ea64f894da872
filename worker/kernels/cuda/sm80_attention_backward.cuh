// Backward attention on tensor cores by mma.sync (sm_80 and later).
//
// Shapes as in attention_kernel.h (BackwardCall), all in global memory of the
// launching device. One thread block owns kKeys keys of one kv head and walks
// every q tile of kRows rows that sees them, over the query heads of the group:
//   S = q k^T, dP = dout v^T            [kRows x kKeys]
//   P = exp(S - lse), dS = P (dP - delta), both rounded, to shared memory
//   dV += P^T dout, dK += dS^T q        in registers, fp32
//   dq_acc += scale dS k                by reductions in global memory
// At the end dK and dV are added to the received buffers by reductions too, so
// several thread blocks may share a key tile (they then take different heads).
//
// Where shared memory allows (sm_90) dq tiles are staged there, and the copy
// engine adds them to global memory while the next tile's S is computed.
// Reductions straight from the accumulators, and also whole rows by red.v4, hold
// up the load/store unit that ldmatrix needs (measured: 8 to 10% of the kernel).
//
// Shared memory: k, v [kKeys][kDim]; q, dout [2][kRows][kDim] with lse and delta
// [2][kRows], filled by cp.async one tile ahead; P, dS [kRows][kKeys]; where it
// fits, dq in boxes [kDim / 32][kRows][32] fp32, 128-byte swizzle. Eight warps; each product deals
// its 16-row and 16-column groups to the warps in turn (warp w takes groups
// w, w + n, ...), which keeps every address one exclusive or away from the
// warp's base for any head-dim class.
//
// Why this shape: dK and dV of 128 keys fill half of the register file at
// head_dim 128, so one block of 8 warps runs per SM; two-dimensional warp tiles
// (32 x 32 and 32 x 64) halve the shared-memory reads that one-dimensional ones
// need, and those reads are what bounds an mma.sync kernel.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_ATTENTION_BACKWARD_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_ATTENTION_BACKWARD_CUH_

#include "worker/kernels/cuda/device_primitives.cuh"

namespace ringattn::cuda {

// kScoreWarps, kKvWarps, kQWarps: warps along the rows of S/dP, dK/dV and dQ;
// the remaining factor of 8 lies along the columns.
template <typename T, int kDim, int kRows, int kKeys, int kScoreWarps, int kKvWarps, int kQWarps>
struct Sm80Backward {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * 32;
  using Tile = SharedTile<kDim>;
  using ScoreTile = SharedTile<kKeys>;

  static constexpr int kScoreColumnWarps = kWarps / kScoreWarps;
  static constexpr int kScoreM = kRows / (16 * kScoreWarps);
  static constexpr int kScoreN = kKeys / (16 * kScoreColumnWarps);  // 16-column groups
  static constexpr int kKvColumnWarps = kWarps / kKvWarps;
  static constexpr int kKvM = kKeys / (16 * kKvWarps);
  static constexpr int kKvN = kDim / (16 * kKvColumnWarps);
  static constexpr int kQColumnWarps = kWarps / kQWarps;
  static constexpr int kQM = kRows / (16 * kQWarps);
  static constexpr int kQN = kDim / (16 * kQColumnWarps);
  static_assert(kScoreM * 16 * kScoreWarps == kRows && kScoreN * 16 * kScoreColumnWarps == kKeys);
  static_assert(kKvM * 16 * kKvWarps == kKeys && kKvN * 16 * kKvColumnWarps == kDim);
  static_assert(kQM * 16 * kQWarps == kRows && kQN * 16 * kQColumnWarps == kDim);

  static constexpr int kKvBytes = kKeys * kDim * 2;
  static constexpr int kQBytes = kRows * kDim * 2;
  static constexpr int kScoreBytes = kRows * kKeys * 2;
  static constexpr int kStatisticsBytes = kRows * 4;
  static constexpr int kStagedOffset = 2 * kKvBytes + 4 * kQBytes + 2 * kScoreBytes;
  static constexpr int kSharedBytes = kStagedOffset + 4 * kStatisticsBytes;
  static constexpr int kBoxBytes = kRows * 128;
  static constexpr int kStagedBytes = kDim / 32 * kBoxBytes;
  static constexpr bool kStagedFits = kSharedBytes + kStagedBytes <= 227 * 1024;
  static constexpr int kSharedBytesSm90 = kSharedBytes + (kStagedFits ? kStagedBytes : 0);
#if __CUDA_ARCH__ >= 900
  static constexpr bool kStaged = kStagedFits;
#else
  static constexpr bool kStaged = false;
#endif
  static_assert(2 * kRows <= kThreads);

  using ScoreAccumulator = float[kScoreM][2 * kScoreN][4];
  using KvAccumulator = float[kKvM][2 * kKvN][4];

  // `fresh` is known at compile time once the caller's loop is unrolled.
  static __device__ __forceinline__ void Product(bool fresh, float (&d)[4],
                                                 const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
    if (fresh) {
      MultiplyAdd<T, true>(d, a, b0, b1);
    } else {
      MultiplyAdd<T>(d, a, b0, b1);
    }
  }

  // acc = a b^T over the head dim; a and b are row-major tiles.
  static __device__ __forceinline__ void ScoreProduct(ScoreAccumulator& acc, uint32_t a_base,
                                                      uint32_t b_base) {
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t a[kScoreM][4];
#pragma unroll
      for (int m = 0; m < kScoreM; ++m) {
        LoadMatrices(a[m], Tile::Step(a_base, step) + m * kScoreWarps * 16 * Tile::kRowBytes);
      }
#pragma unroll
      for (int n = 0; n < kScoreN; ++n) {
        uint32_t b[4];
        LoadMatrices(b, Tile::Step(b_base, step) + n * kScoreColumnWarps * 16 * Tile::kRowBytes);
#pragma unroll
        for (int m = 0; m < kScoreM; ++m) {
          Product(step == 0, acc[m][2 * n], a[m], b[0], b[1]);
          Product(step == 0, acc[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // acc += scores^T b over the q rows of the tile.
  static __device__ __forceinline__ void KvProduct(KvAccumulator& acc, uint32_t score_base,
                                                   uint32_t b_base) {
#pragma unroll
    for (int step = 0; step < kRows / 16; ++step) {
      uint32_t a[kKvM][4];
#pragma unroll
      for (int m = 0; m < kKvM; ++m) {
        LoadMatricesTransposed(a[m], ScoreTile::Step(score_base, m * kKvWarps) +
                                         step * 16 * ScoreTile::kRowBytes);
      }
#pragma unroll
      for (int n = 0; n < kKvN; ++n) {
        uint32_t b[4];
        LoadMatricesTransposed(
            b, Tile::Step(b_base, n * kKvColumnWarps) + step * 16 * Tile::kRowBytes);
#pragma unroll
        for (int m = 0; m < kKvM; ++m) {
          MultiplyAdd<T>(acc[m][2 * n], a[m], b[0], b[1]);
          MultiplyAdd<T>(acc[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // The lane's rows in the 16-row group `m` of S: lse in log2 units (+inf where
  // p must be 0) and delta.
  struct RowStatistics {
    float lse[kScoreM][2];
    float delta[kScoreM][2];
  };

  // Starts the copies of lse and delta of a tile's rows to `target` and behind.
  // Missing rows get zeros: their q and dout are zero as well, so that they add
  // nothing.
  static __device__ __forceinline__ void StartStatistics(uint32_t target, unsigned thread,
                                                         const BackwardParams& params,
                                                         int64_t offset, int valid_rows) {
    const int row = static_cast<int>(thread % kRows);
    if (thread >= 2 * kRows) return;
    const float* source = (thread < kRows ? params.lse : params.delta) + offset + row;
    CopyAsync4(target + thread * 4, source, row < valid_rows);
  }

  static __device__ __forceinline__ void LoadStatistics(RowStatistics& statistics,
                                                        const float* lse, int first_row) {
#pragma unroll
    for (int m = 0; m < kScoreM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + m * kScoreWarps * 16 + half * 8;
        const float x = lse[row];
        statistics.lse[m][half] = x == NegativeInfinity() ? -x : x * kLog2E;
        statistics.delta[m][half] = lse[kRows + row];
      }
    }
  }

  // scores becomes P, gradients (dP) becomes dS.
  static __device__ __forceinline__ void Differentiate(ScoreAccumulator& scores,
                                                       ScoreAccumulator& gradients,
                                                       const RowStatistics& statistics,
                                                       const CommonParams& common) {
    const float cap = common.softcap;
    if (cap > 0.0f) {
      const float inner = common.softmax_scale / cap;
#pragma unroll
      for (int m = 0; m < kScoreM; ++m) {
#pragma unroll
        for (int n = 0; n < 2 * kScoreN; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float t = Tanh(scores[m][n][i] * inner);
            const float p = Exp2(fmaf(t, cap * kLog2E, -statistics.lse[m][i / 2]));
            gradients[m][n][i] =
                p * (gradients[m][n][i] - statistics.delta[m][i / 2]) * (1.0f - t * t);
            scores[m][n][i] = p;
          }
        }
      }
      return;
    }
#pragma unroll
    for (int m = 0; m < kScoreM; ++m) {
#pragma unroll
      for (int n = 0; n < 2 * kScoreN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float p =
              Exp2(fmaf(scores[m][n][i], common.scale_log2, -statistics.lse[m][i / 2]));
          gradients[m][n][i] = p * (gradients[m][n][i] - statistics.delta[m][i / 2]);
          scores[m][n][i] = p;
        }
      }
    }
  }

  // `first_row` counts from the range's first row; `first_column` is the lane's.
  static __device__ __forceinline__ void Mask(ScoreAccumulator& scores,
                                              ScoreAccumulator& gradients, const QRange& range,
                                              int first_row, int first_column, int key_count) {
#pragma unroll
    for (int m = 0; m < kScoreM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int lower, upper;
        RowLimits(range.limits, first_row + m * kScoreWarps * 16 + half * 8, &lower, &upper);
        upper = min(upper, key_count - 1);
#pragma unroll
        for (int n = 0; n < 2 * kScoreN; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int column =
                first_column + (n / 2) * kScoreColumnWarps * 16 + (n % 2) * 8 + i;
            if (column < lower || column > upper) {
              scores[m][n][half * 2 + i] = 0.0f;
              gradients[m][n][half * 2 + i] = 0.0f;
            }
          }
        }
      }
    }
  }

  // `base` addresses the lane's first row and its 4 bytes in the warp's first chunk.
  static __device__ __forceinline__ void StoreScores(const ScoreAccumulator& values,
                                                     uint32_t base) {
#pragma unroll
    for (int m = 0; m < kScoreM; ++m) {
#pragma unroll
      for (int n = 0; n < 2 * kScoreN; ++n) {
        const uint32_t address = (ScoreTile::Step(base, (n / 2) * kScoreColumnWarps) ^
                                  ((n % 2) * 16)) +
                                 m * kScoreWarps * 16 * ScoreTile::kRowBytes;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(address),
                     "r"(Pack<T>(values[m][n][0], values[m][n][1]))
                     : "memory");
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(address + 8 * ScoreTile::kRowBytes),
                     "r"(Pack<T>(values[m][n][2], values[m][n][3]))
                     : "memory");
      }
    }
  }

  // dq_acc += scale dS k, or staged = scale dS k. `target` is the lane's first
  // element in the q tile.
  static __device__ __forceinline__ void QProduct(uint32_t score_base, uint32_t k_base,
                                                  uint32_t staged, float* target,
                                                  int64_t row_stride, int valid_rows,
                                                  const CommonParams& common) {
    float acc[kQM][2 * kQN][4];
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      uint32_t a[kQM][4];
#pragma unroll
      for (int m = 0; m < kQM; ++m) {
        LoadMatrices(a[m], ScoreTile::Step(score_base, step) +
                               m * kQWarps * 16 * ScoreTile::kRowBytes);
      }
#pragma unroll
      for (int n = 0; n < kQN; ++n) {
        uint32_t b[4];
        LoadMatricesTransposed(
            b, Tile::Step(k_base, n * kQColumnWarps) + step * 16 * Tile::kRowBytes);
#pragma unroll
        for (int m = 0; m < kQM; ++m) {
          Product(step == 0, acc[m][2 * n], a[m], b[0], b[1]);
          Product(step == 0, acc[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
    if constexpr (kStaged) {
      const int row = LaneRow<kQWarps>();
      const int column = LaneColumn<kQWarps>();
#pragma unroll
      for (int n = 0; n < 2 * kQN; ++n) {
        const uint32_t base = staged + StagedOffset(row, column + n / 2 * kQColumnWarps * 16 +
                                                             n % 2 * 8);
#pragma unroll
        for (int m = 0; m < kQM; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(
                             base + (m * kQWarps * 16 + half * 8) * 128),
                         "f"(common.softmax_scale * acc[m][n][half * 2]),
                         "f"(common.softmax_scale * acc[m][n][half * 2 + 1])
                         : "memory");
          }
        }
      }
      return;
    }
    ReduceTile<kQM, 2 * kQN, kQWarps * 16, kQColumnWarps * 16>(
        acc, common.softmax_scale, target, row_stride, LaneRow<kQWarps>(), valid_rows,
        LaneColumn<kQWarps>(), common.head_dim, valid_rows >= kRows && common.head_dim == kDim);
  }

  // Byte offset of an element of the staged dq tile: its 16-byte chunk in the
  // box's row is permuted by row mod 8, as the copy engine expects.
  static __device__ __forceinline__ uint32_t StagedOffset(int row, int column) {
    const int chunk = column % 32 / 4 ^ (row & 7);
    return column / 32 * kBoxBytes + row * 128 + chunk * 16 + column % 4 * 4;
  }

  // Where the staged dq tile belongs.
  struct StagedTile {
    int head = 0;
    int rows = 0;     // that exist; 0 = nothing is staged
    int64_t row = 0;  // of q
  };

  // Starts adding the staged tile to dq_acc. Before it is overwritten: WaitBulkReads
  // by thread 0 and a barrier. Tiles that end inside, whose missing rows belong to
  // other pieces, are added by the threads themselves.
  static __device__ __forceinline__ void AddStaged(const BackwardParams& params,
                                                   const char* staged, unsigned thread,
                                                   const StagedTile& tile, int64_t batch) {
    const CommonParams& common = params.common;
    if (params.has_dq_map && tile.rows >= kRows) {
      if (thread == 0) {
#pragma unroll
        for (int box = 0; box < kDim / 32; ++box) {
          if (box * 32 < common.head_dim) {
            StartTensorAdd(params.dq_map, SharedAddress(staged) + box * kBoxBytes, box * 32,
                           tile.head, static_cast<int>(tile.row), static_cast<int>(batch));
          }
        }
        CommitBulk();
      }
      return;
    }
    float* target = params.dq_acc +
                    ((batch * common.q_rows + tile.row) * common.num_heads + tile.head) *
                        common.head_dim;
    const int64_t row_stride = int64_t{common.num_heads} * common.head_dim;
#pragma unroll 1
    for (int index = thread; index < kRows * kDim; index += kThreads) {
      const int row = index / kDim;
      const int column = index % kDim;
      if (row < tile.rows && column < common.head_dim) {
        ReduceAdd(target + row * row_stride + column,
                  *reinterpret_cast<const float*>(staged + StagedOffset(row, column)));
      }
    }
  }

  // The lane's first row and column in an accumulator dealt to kRowWarps warps
  // along the rows.
  template <int kRowWarps>
  static __device__ __forceinline__ int LaneRow() {
    return static_cast<int>((threadIdx.x >> 5) % kRowWarps * 16 + (threadIdx.x & 31) / 4);
  }
  template <int kRowWarps>
  static __device__ __forceinline__ int LaneColumn() {
    return static_cast<int>((threadIdx.x >> 5) / kRowWarps * 16 + (threadIdx.x & 3) * 2);
  }

  // `target` is the first element of the key tile.
  static __device__ __forceinline__ void StoreKv(const KvAccumulator& acc, float scale,
                                                 float* target, int64_t row_stride, int rows,
                                                 int columns) {
    const int row = LaneRow<kKvWarps>();
    const int column = LaneColumn<kKvWarps>();
    ReduceTile<kKvM, 2 * kKvN, kKvWarps * 16, kKvColumnWarps * 16>(
        acc, scale, target + row * row_stride + column, row_stride, row, rows, column, columns,
        rows == kKeys && columns == kDim);
  }

  static __device__ __forceinline__ void Clear(KvAccumulator& acc) {
#pragma unroll
    for (int m = 0; m < kKvM; ++m) {
#pragma unroll
      for (int n = 0; n < 2 * kKvN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.0f;
      }
    }
  }

  static __device__ __forceinline__ void Run(const BackwardParams& params, char* shared) {
    const CommonParams& common = params.common;
    if (Stopped(common.stop_word)) return;
    const BackwardTile& tile = params.tiles[blockIdx.x];
    const int heads = params.heads_per_block;
    const int first_head = blockIdx.y * heads;
    const int kv_head = first_head / common.group_size;
    const int64_t batch = common.batch_begin + blockIdx.z;
    const unsigned thread = OpaqueThread();
    const int lane = thread & 31;
    const int warp = thread >> 5;

    const uint32_t k_tile = SharedAddress(shared);
    const uint32_t v_tile = k_tile + kKvBytes;
    const uint32_t q_tiles = v_tile + kKvBytes;
    const uint32_t dout_tiles = q_tiles + 2 * kQBytes;
    const uint32_t p_tile = dout_tiles + 2 * kQBytes;
    const uint32_t ds_tile = p_tile + kScoreBytes;
    // The staged tile is aligned to 1024 bytes, so it comes before the statistics.
    char* staged = shared + kStagedOffset;
    char* statistics_memory = staged + (kStaged ? kStagedBytes : 0);

    // ldmatrix positions; see the table in device_primitives.cuh.
    const int score_row = (warp % kScoreWarps) * 16;
    const int score_column = (warp / kScoreWarps) * 16;
    const uint32_t score_a = Tile::Offset(score_row + (lane & 15), lane >> 4);
    const uint32_t score_b =
        Tile::Offset(score_column + (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
    const uint32_t score_store =
        ScoreTile::Offset(score_row + (lane >> 2), score_column / 8) + (lane & 3) * 4;
    const uint32_t kv_a =
        ScoreTile::Offset((lane & 7) + ((lane >> 4) << 3),
                          (warp % kKvWarps) * 2 + ((lane >> 3) & 1));
    const uint32_t kv_b = Tile::Offset(lane & 15, (warp / kKvWarps) * 2 + (lane >> 4));
    const uint32_t q_a = ScoreTile::Offset((warp % kQWarps) * 16 + (lane & 15), lane >> 4);
    const uint32_t q_b = Tile::Offset(lane & 15, (warp / kQWarps) * 2 + (lane >> 4));

    using QCopy = TileCopy<T, kDim, kRows, kThreads>;
    using KvCopy = TileCopy<T, kDim, kKeys, kThreads>;
    const int64_t kv_row = batch * tile.block_rows + tile.row_begin;
    const int64_t k_stride = int64_t{common.num_kv_heads} * common.head_dim;
    const int64_t v_stride = int64_t{common.num_kv_heads} * common.head_dim_v;
    const int key_count = tile.rows;
    const int range_begin = tile.range_begin;
    const int range_end = tile.range_end;
    KvCopy::Load(k_tile,
                 static_cast<const T*>(tile.k) + kv_row * k_stride + kv_head * common.head_dim,
                 k_stride, key_count, common.head_dim, common.vector_qk);
    KvCopy::Load(v_tile,
                 static_cast<const T*>(tile.v) + kv_row * v_stride + kv_head * common.head_dim_v,
                 v_stride, key_count, common.head_dim_v, common.vector_v);

    // What is loaded next: the q tile from row `load_row` of range `load_index`,
    // for head `load_head`.
    const int end_head = first_head + heads;
    const int64_t q_stride = int64_t{common.num_heads} * common.head_dim;
    const int64_t dout_stride = int64_t{common.num_heads} * common.head_dim_v;
    const T* q_source = nullptr;  // this thread's, in the next tile
    const T* dout_source = nullptr;
    int load_head = first_head;
    int load_index = range_begin;
    int load_row = 0;
    int load_count = 0;
    int64_t load_statistics = 0;  // offset of row load_row in lse and delta
    const auto open_range = [&] {
      const QRange& range = params.ranges[load_index];
      const int64_t token = batch * common.q_rows + range.row_begin;
      q_source =
          static_cast<const T*>(params.q) + token * q_stride + load_head * common.head_dim;
      dout_source =
          static_cast<const T*>(params.dout) + token * dout_stride + load_head * common.head_dim_v;
      if (common.vector_qk) q_source += QCopy::ThreadOffset(thread, q_stride);
      if (common.vector_v) dout_source += QCopy::ThreadOffset(thread, dout_stride);
      load_row = 0;
      load_count = range.row_count;
      load_statistics = (batch * common.num_heads + load_head) * common.q_rows + range.row_begin;
    };
    const auto load_queries = [&](int buffer) {
      const int valid_rows = load_count - load_row;
      const uint32_t q_tile = q_tiles + buffer * kQBytes;
      if (common.vector_qk) {
        QCopy::Start(q_tile, thread, q_source, q_stride, valid_rows, common.head_dim);
      } else {
        QCopy::CopyUnaligned(q_tile, q_source, q_stride, valid_rows, common.head_dim);
      }
      StartStatistics(SharedAddress(statistics_memory) + buffer * 2 * kStatisticsBytes, thread,
                      params, load_statistics, valid_rows);
      load_statistics += kRows;
      q_source += kRows * q_stride;
    };
    // dout of the same tile; then the next tile's turn.
    const auto load_gradients = [&](int buffer) {
      const int valid_rows = load_count - load_row;
      const uint32_t dout_tile = dout_tiles + buffer * kQBytes;
      if (common.vector_v) {
        QCopy::Start(dout_tile, thread, dout_source, dout_stride, valid_rows, common.head_dim_v);
      } else {
        QCopy::CopyUnaligned(dout_tile, dout_source, dout_stride, valid_rows, common.head_dim_v);
      }
      dout_source += kRows * dout_stride;
      load_row += kRows;
      if (load_row < load_count) return;
      if (++load_index == range_end) {
        load_index = range_begin;
        ++load_head;
      }
      if (load_head < end_head) open_range();
    };
    open_range();
    load_queries(0);
    load_gradients(0);
    CommitCopies();

    KvAccumulator dk, dv;
    Clear(dk);
    Clear(dv);
    int buffer = 0;
    StagedTile staged_tile;
    for (int head = first_head; head < end_head; ++head) {
      for (int index = range_begin; index < range_end; ++index) {
        const QRange& range = params.ranges[index];
        const int row_count = range.row_count;
        const int full_begin = range.full_begin;
        const int full_end = range.full_end;
        float* dq_target =
            params.dq_acc + (batch * common.q_rows + range.row_begin) * q_stride +
            head * common.head_dim;
        if (!kStaged) dq_target += LaneRow<kQWarps>() * q_stride + LaneColumn<kQWarps>();
        for (int row = 0; row < row_count; row += kRows) {
          WaitCopies<0>();
          if (kStaged) FenceBulkReads();
          __syncthreads();  // this tile is there, and everyone has left the other buffer
          if (kStaged && staged_tile.rows > 0) {
            AddStaged(params, staged, thread, staged_tile, batch);
          }
          const bool more = load_head < end_head;
          if (more) load_queries(buffer ^ 1);
          RowStatistics statistics;
          LoadStatistics(
              statistics,
              reinterpret_cast<const float*>(statistics_memory + buffer * 2 * kStatisticsBytes),
              score_row + (lane >> 2));
          const uint32_t q_tile = q_tiles + buffer * kQBytes;
          const uint32_t dout_tile = dout_tiles + buffer * kQBytes;
          {
            ScoreAccumulator scores, gradients;
            ScoreProduct(scores, q_tile + score_a, k_tile + score_b);
            // Not with the queries: a burst of copies blocks ldmatrix.
            if (more) {
              load_gradients(buffer ^ 1);
              CommitCopies();
            }
            ScoreProduct(gradients, dout_tile + score_a, v_tile + score_b);
            Differentiate(scores, gradients, statistics, common);
            if (row < full_begin || min(row + kRows, row_count) > full_end) {
              Mask(scores, gradients, range, row + score_row + (lane >> 2),
                   score_column + 2 * (lane & 3), key_count);
            }
            StoreScores(scores, p_tile + score_store);
            StoreScores(gradients, ds_tile + score_store);
          }
          if (kStaged && thread == 0) WaitBulkReads();
          __syncthreads();
          QProduct(ds_tile + q_a, k_tile + q_b, SharedAddress(staged), dq_target, q_stride,
                   row_count - row, common);
          staged_tile = {head, row_count - row, range.row_begin + row};
          KvProduct(dv, p_tile + kv_a, dout_tile + kv_b);
          KvProduct(dk, ds_tile + kv_a, q_tile + kv_b);
          dq_target += kRows * q_stride;
          buffer ^= 1;
        }
      }
    }
    if (kStaged) {
      FenceBulkReads();
      __syncthreads();
      AddStaged(params, staged, thread, staged_tile, batch);
    }
    StoreKv(dk, common.softmax_scale, tile.dk + kv_row * k_stride + kv_head * common.head_dim,
            k_stride, key_count, common.head_dim);
    StoreKv(dv, 1.0f, tile.dv + kv_row * v_stride + kv_head * common.head_dim_v, v_stride,
            key_count, common.head_dim_v);
    if (kStaged && thread == 0) WaitBulk();  // shared memory is read until then
  }
};

}  // namespace ringattn::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_ATTENTION_BACKWARD_CUH_
