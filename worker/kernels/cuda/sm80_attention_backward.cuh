// Backward attention on tensor cores by mma.sync (sm_80 and later).
//
// Shapes as in attention_kernel.h (BackwardCall), all in global memory of the
// launching device. One thread block owns kKeys keys of one kv head and walks
// every q tile of kRows rows that sees them, over the query heads of the group.
// Two groups of four warps share the work of a tile:
//   values group:    S = q k^T, P = exp(S - lse), dV += P^T dout,
//                    dq_acc += scale dS k for the first columns
//   gradients group: dP = dout v^T, dS = P (dP - delta), dK += dS^T q,
//                    dq_acc += scale dS k for the other columns, one tile late
// P (rounded) goes from one group to the other through shared memory, where both
// groups read it; dS lives there too. dV and dK stay in registers (fp32) and are
// added to the received buffers by reductions at the end, so several thread
// blocks may share a key tile (they then take different heads).
//
// Why two groups: shared-memory reads bound an mma.sync kernel, and a warp's
// output tile of given accumulators costs reads in proportion to its height plus
// its width. A warp that keeps only one of dK and dV, and computes only one of S
// and dP, has twice the accumulators for it: 32 x 64 instead of 32 x 32 (S) and
// 64 x 64 instead of 32 x 64 (dK, dV) at head_dim 128, a quarter fewer reads in
// all. The groups run the same code on their own operands (q, k, dV against dout,
// v, dK), and each scheduler of the SM holds one warp of each, so that one
// group's exponentials run beside the other's products.
//
// Where shared memory allows (sm_90) dq tiles are staged there, and the copy
// engine adds them to global memory while the next tile's products run.
// Reductions straight from the accumulators, and also whole rows by red.v4, hold
// up the load/store unit that ldmatrix needs (measured: 8 to 10% of the kernel).
//
// Shared memory: k, v [kKeys][kDim]; q, dout [2][kRows][kDim] with lse and delta
// [2][2][kRows], filled by cp.async one tile ahead; P, dS [kRows][kKeys]; the walk
// over q tiles (Span); where they fit, the columns of dq that each group computes at
// a time, in boxes [columns / 32][kRows][32] fp32, 128-byte swizzle. Each product
// deals its 16-row and 16-column groups to the four warps in turn (warp w takes
// groups w, w + n, ...), which keeps every address one exclusive or away from the
// warp's base for any head-dim class.
//
// Order: __syncthreads begins a tile and protects q, dout, dV's and dK's operands of
// the last one. Inside a tile the gradients group waits for P, and each group for
// itself; dS is overwritten only once P of the next tile is there, which the values
// group announces after its last use of dS, and after the gradients group's own dq.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_ATTENTION_BACKWARD_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_ATTENTION_BACKWARD_CUH_

#include "worker/kernels/cuda/device_primitives.cuh"

namespace ringattn::cuda {

// kScoreWarps, kKvWarps, kQWarps: warps along the rows of S/dP, dK/dV and dQ;
// the remaining factor of 4 lies along the columns. dQ is computed in kQPasses
// parts of its columns; the values group takes the first kValuesPasses. It also
// starts all copies with kValuesLoad; otherwise each group starts those of its own
// operand. (Which is faster depends on which group has time left.)
template <typename T, int kDim, int kRows, int kKeys, int kScoreWarps, int kKvWarps, int kQWarps,
          int kQPasses, int kValuesPasses, bool kValuesLoad>
struct Sm80Backward {
  static constexpr int kWarps = 4;  // of a group
  static constexpr int kGroupThreads = kWarps * 32;
  static constexpr int kThreads = 2 * kGroupThreads;
  using Tile = SharedTile<kDim>;
  using ScoreTile = SharedTile<kKeys>;

  static constexpr int kScoreColumnWarps = kWarps / kScoreWarps;
  static constexpr int kScoreM = kRows / (16 * kScoreWarps);
  static constexpr int kScoreN = kKeys / (16 * kScoreColumnWarps);  // 16-column groups
  static constexpr int kKvColumnWarps = kWarps / kKvWarps;
  static constexpr int kKvM = kKeys / (16 * kKvWarps);
  static constexpr int kKvN = kDim / (16 * kKvColumnWarps);
  static constexpr int kQColumns = kDim / kQPasses;
  static constexpr int kQColumnWarps = kWarps / kQWarps;
  static constexpr int kQM = kRows / (16 * kQWarps);
  static constexpr int kQN = kQColumns / (16 * kQColumnWarps);
  static_assert(kScoreM * 16 * kScoreWarps == kRows && kScoreN * 16 * kScoreColumnWarps == kKeys);
  static_assert(kKvM * 16 * kKvWarps == kKeys && kKvN * 16 * kKvColumnWarps == kDim);
  static_assert(kQM * 16 * kQWarps == kRows && kQN * 16 * kQColumnWarps * kQPasses == kDim);
  static_assert(kQColumns % 32 == 0 && kValuesPasses < kQPasses);

  static constexpr int kKvBytes = kKeys * kDim * 2;
  static constexpr int kQBytes = kRows * kDim * 2;
  static constexpr int kScoreBytes = kRows * kKeys * 2;
  static constexpr int kStatisticsBytes = kRows * 4;
  static constexpr int kSpans = 4;  // that are kept: of the last tile to the next but one
  static constexpr int kStagedOffset = 2 * kKvBytes + 4 * kQBytes + 2 * kScoreBytes;
  static constexpr int kSharedBytes = kStagedOffset + 4 * kStatisticsBytes + kSpans * 32;
  static constexpr int kBoxBytes = kRows * 128;
  static constexpr int kPassBytes = kQColumns / 32 * kBoxBytes;
  // Parts that can be staged, of the gradients group first: with two, one pass is
  // added while the next is written.
  static constexpr int kValuesParts = kValuesPasses > 0;
  static constexpr int kGradientsParts =
      kQPasses - kValuesPasses > 1 &&
              kSharedBytes + (2 + kValuesParts) * kPassBytes <= 227 * 1024
          ? 2
          : 1;
  static constexpr int kLastPart =  // of the gradients group, as an offset
      (kQPasses - kValuesPasses - 1) % kGradientsParts * kPassBytes;
  static constexpr int kStagedBytes = (kValuesParts + kGradientsParts) * kPassBytes;
  static constexpr bool kStagedFits = kSharedBytes + kStagedBytes <= 227 * 1024;
  static constexpr int kSharedBytesSm90 = kSharedBytes + (kStagedFits ? kStagedBytes : 0);
#if __CUDA_ARCH__ >= 900
  static constexpr bool kStaged = kStagedFits;
#else
  static constexpr bool kStaged = false;
#endif
  static_assert(kRows <= kGroupThreads);

  // P is kept times 2^kShift, so that fp16 has no subnormals to round it to.
  static constexpr int kShift = __is_same(T, __half) ? 14 : 0;
  static constexpr float kUnshift = 1.0f / (1 << kShift);

  // Named barriers; 0 is __syncthreads.
  static constexpr int kProbabilitiesReady = 1;  // the gradients group waits for P
  static constexpr int kDerivativesFree = 2;     // the values group waits until dS is unused
  static constexpr int kDerivativesReady = 3;    // the values group waits for dS
  static constexpr int kGroupBarrier = 4;        // and 5: of one group

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
    KeepHere(a_base);
    KeepHere(b_base);
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
    KeepHere(score_base);
    KeepHere(b_base);
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

  // The lane's row in half `half` of the 16-row group `m` of S: `values` of the
  // warp's first row is at `first`.
  static __device__ __forceinline__ float Statistic(const float* first, int m, int half) {
    return first[m * kScoreWarps * 16 + half * 8];
  }

  // Where the warp's 16 x 16 group (m, n) of a score tile is, for the position
  // whose group (0, 0) is at `base`.
  static __device__ __forceinline__ uint32_t ScoreAddress(uint32_t base, int m, int n) {
    return ScoreTile::Step(base, n * kScoreColumnWarps) +
           m * kScoreWarps * 16 * ScoreTile::kRowBytes;
  }

  // Scores become P. `lse` as in Statistic; -inf, where p must be 0, yields an
  // offset of -inf. With a softcap, P times the cap's derivative goes to the score
  // tile at `derivatives`, for the gradients group.
  static __device__ __forceinline__ void Exponentials(ScoreAccumulator& scores, const float* lse,
                                                      uint32_t derivatives,
                                                      const CommonParams& common) {
    KeepHere(derivatives);
    const float cap = common.softcap;
    const float inner = cap > 0.0f ? common.softmax_scale / cap : 0.0f;
#pragma unroll
    for (int m = 0; m < kScoreM; ++m) {
      float offset[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float x = Statistic(lse, m, half);
        offset[half] = x == NegativeInfinity() ? x : fmaf(x, -kLog2E, kShift);
      }
      if (cap > 0.0f) {
#pragma unroll
        for (int n = 0; n < kScoreN; ++n) {
          uint32_t packed[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float scaled[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              float& x = scores[m][2 * n + i / 2][i % 2 * 2 + j];
              const float t = Tanh(x * inner);
              x = Exp2(fmaf(t, cap * kLog2E, offset[i % 2]));
              scaled[j] = x * (1.0f - t * t);
            }
            packed[i] = Pack<T>(scaled[0], scaled[1]);
          }
          StoreMatrices(ScoreAddress(derivatives, m, n), packed);
        }
      } else {
#pragma unroll
        for (int n = 0; n < 2 * kScoreN; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            scores[m][n][i] = Exp2(fmaf(scores[m][n][i], common.scale_log2, offset[i / 2]));
          }
        }
      }
    }
  }

  // Gradients (dP) become dS, with P from the score tile at `probabilities`.
  static __device__ __forceinline__ void Differentiate(ScoreAccumulator& gradients,
                                                       const float* delta,
                                                       uint32_t probabilities) {
    KeepHere(probabilities);
#pragma unroll
    for (int m = 0; m < kScoreM; ++m) {
      float offset[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) offset[half] = -kUnshift * Statistic(delta, m, half);
#pragma unroll
      for (int n = 0; n < kScoreN; ++n) {
        uint32_t p[4];
        LoadMatrices(p, ScoreAddress(probabilities, m, n));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair = Unpack<T>(p[i]);
          float(&x)[4] = gradients[m][2 * n + i / 2];
          x[i % 2 * 2] = pair.x * fmaf(x[i % 2 * 2], kUnshift, offset[i % 2]);
          x[i % 2 * 2 + 1] = pair.y * fmaf(x[i % 2 * 2 + 1], kUnshift, offset[i % 2]);
        }
      }
    }
  }

  // `first_row` counts from the range's first row; `first_column` is the lane's.
  static __device__ __forceinline__ void Mask(ScoreAccumulator& values, const QRange& range,
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
            if (column < lower || column > upper) values[m][n][half * 2 + i] = 0.0f;
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void StoreScores(const ScoreAccumulator& values,
                                                     uint32_t base) {
    KeepHere(base);
#pragma unroll
    for (int m = 0; m < kScoreM; ++m) {
#pragma unroll
      for (int n = 0; n < kScoreN; ++n) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&x)[4] = values[m][2 * n + i / 2];
          packed[i] = Pack<T>(x[i % 2 * 2], x[i % 2 * 2 + 1]);
        }
        StoreMatrices(ScoreAddress(base, m, n), packed);
      }
    }
  }

  // A range of q rows of one head: the block walks its ranges for each head in
  // turn. One thread describes them to all ahead of their use, for registers are
  // too short for every thread to keep more of the walk than two numbers.
  struct alignas(16) Span {
    int32_t row_count;
    int32_t full_begin;
    int32_t full_end;
    int32_t last;  // no other follows
    int64_t row_begin;  // of q
    int32_t range;
    int32_t head;
  };
  static_assert(sizeof(Span) == 32);

  // A tile's rows of a span.
  struct QTile {
    const Span* span;
    int row;   // first, in the span
    int rows;  // that exist

    // Where the first one starts in dq_acc.
    __device__ __forceinline__ float* Target(const BackwardParams& params, int64_t batch) const {
      const CommonParams& common = params.common;
      return params.dq_acc +
             ((batch * common.q_rows + span->row_begin + row) * common.num_heads + span->head) *
                 common.head_dim;
    }
  };

  // Which of eight rows of dS is row i of dq's accumulators: the rows of half a warp
  // are two apart, so that its stores to the staged part meet no bank twice.
  static __device__ __forceinline__ int QRowOf(int i) { return i % 4 * 2 + i / 4; }

  // Byte offset of an element of a staged dq part: its 16-byte chunk in the
  // box's row is permuted by row mod 8, as the copy engine expects.
  static __device__ __forceinline__ uint32_t StagedOffset(int row, int column) {
    const int chunk = column % 32 / 4 ^ (row & 7);
    return column / 32 * kBoxBytes + row * 128 + chunk * 16 + column % 4 * 4;
  }

  // dq_acc += scale dS k for the passes [kFirst, kEnd), for the threads of group
  // `group`. The last pass, if staged, is left for AddStaged, after another barrier
  // of the group. Before: the kParts parts at `staged` are free.
  template <int kFirst, int kEnd, int kParts>
  static __device__ __forceinline__ void AddQ(const BackwardParams& params, int group,
                                              unsigned thread, const QTile& tile, int64_t batch,
                                              uint32_t score_base, uint32_t k_base,
                                              uint32_t staged, uint32_t staged_position) {
#pragma unroll 1
    for (int pass = kFirst; pass < kEnd; ++pass) {
      float acc[kQM][2 * kQN][4];
      QProduct(acc, score_base, Tile::Step(k_base, pass * kQN * kQColumnWarps));
      if constexpr (kStaged) {
        const uint32_t part = (pass - kFirst) % kParts * kPassBytes;
        if (kParts == 1 && pass > kFirst) {
          if (thread == 0) WaitBulkReads();
          SyncThreads<kGroupThreads>(kGroupBarrier + group);
        }
        Stage(acc, params.common.softmax_scale, staged_position + part);
        if (pass + 1 < kEnd) {
          if (kParts == 2 && thread == 0) WaitBulkReads();  // of the other part
          SyncThreads<kGroupThreads>(kGroupBarrier + group);
          AddStaged(params, thread, tile, batch, pass, staged + part);
        }
      } else {
        const CommonParams& common = params.common;
        const int row = QRow(thread);
        const int column = pass * kQColumns + LaneColumn<kQWarps>(thread);
        const int64_t row_stride = int64_t{common.num_heads} * common.head_dim;
        ReduceTile<kQM, 2 * kQN, kQWarps * 16, kQColumnWarps * 16>(
            acc, common.softmax_scale, tile.Target(params, batch) + row * row_stride + column,
            row_stride, row, tile.rows, column, common.head_dim,
            tile.rows >= kRows && common.head_dim == kDim);
      }
    }
  }

  // acc = dS k for the columns of a pass.
  static __device__ __forceinline__ void QProduct(float (&acc)[kQM][2 * kQN][4],
                                                  uint32_t score_base, uint32_t k_base) {
    KeepHere(score_base);
    KeepHere(k_base);
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
  }

  // `position` is the thread's first element in the staged part.
  static __device__ __forceinline__ void Stage(const float (&acc)[kQM][2 * kQN][4], float scale,
                                               uint32_t position) {
    KeepHere(position);
#pragma unroll
    for (int n = 0; n < 2 * kQN; ++n) {
      const int step = n / 2 * kQColumnWarps * 16 + n % 2 * 8;  // columns
      const uint32_t base = (position ^ (step % 32 * 4)) + step / 32 * kBoxBytes;
#pragma unroll
      for (int m = 0; m < kQM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(
                           base + (m * kQWarps * 16 + half * 8) * 128),
                       "f"(scale * acc[m][n][half * 2]), "f"(scale * acc[m][n][half * 2 + 1])
                       : "memory");
        }
      }
    }
    FenceBulkReads();
  }

  // Starts adding a staged pass to dq_acc. Before it is overwritten: WaitBulkReads
  // by thread 0 of the group and a barrier. Tiles that end inside, whose missing
  // rows belong to other pieces, are added by the threads themselves.
  static __device__ __forceinline__ void AddStaged(const BackwardParams& params, unsigned thread,
                                                   const QTile& tile, int64_t batch, int pass,
                                                   uint32_t staged) {
    const CommonParams& common = params.common;
    const int first = pass * kQColumns;
    if (params.has_dq_map && tile.rows >= kRows) {
      if (thread == 0) {
#pragma unroll
        for (int box = 0; box < kQColumns / 32; ++box) {
          if (first + box * 32 < common.head_dim) {
            StartTensorAdd(params.dq_map, staged + box * kBoxBytes, first + box * 32,
                           tile.span->head, static_cast<int>(tile.span->row_begin + tile.row),
                           static_cast<int>(batch));
          }
        }
        CommitBulk();
      }
      return;
    }
    float* target = tile.Target(params, batch) + first;
    const int64_t row_stride = int64_t{common.num_heads} * common.head_dim;
#pragma unroll 1
    for (int index = thread; index < kRows * kQColumns; index += kGroupThreads) {
      const int row = index / kQColumns;
      const int column = index % kQColumns;
      if (row < tile.rows && first + column < common.head_dim) {
        ReduceAdd(target + row * row_stride + column,
                  LoadShared(staged + StagedOffset(row, column)));
      }
    }
  }

  // The thread's first row in dq's accumulators.
  static __device__ __forceinline__ int QRow(unsigned thread) {
    return (thread >> 5) % kQWarps * 16 + QRowOf(thread % 32 / 4);
  }
  // The first row and column of a group's thread in an accumulator dealt to
  // kRowWarps warps along the rows.
  template <int kRowWarps>
  static __device__ __forceinline__ int LaneRow(unsigned thread) {
    return static_cast<int>((thread >> 5) % kRowWarps * 16 + (thread & 31) / 4);
  }
  template <int kRowWarps>
  static __device__ __forceinline__ int LaneColumn(unsigned thread) {
    return static_cast<int>((thread >> 5) / kRowWarps * 16 + (thread & 3) * 2);
  }

  static __device__ __forceinline__ void Run(const BackwardParams& params, char* shared) {
    const CommonParams& common = params.common;
    if (Stopped(common.stop_word)) return;
    // Read again wherever it is needed, rather than kept.
    const BackwardTile& tile = params.tiles[blockIdx.x];
    const int kv_head = blockIdx.y * params.heads_per_block / common.group_size;
    const int64_t batch = common.batch_begin + blockIdx.z;
    const unsigned block_thread = OpaqueThread();
    const bool gradients = block_thread >= kGroupThreads;  // which group
    const unsigned thread = block_thread % kGroupThreads;
    const int lane = thread & 31;
    const int warp = thread >> 5;

    // Of the two operands of a kind, the values group starts from the first (k, q,
    // P, lse) and the gradients group from the second (v, dout, dS, delta).
    const uint32_t kv_tiles = SharedAddress(shared);
    const uint32_t row_tiles = kv_tiles + 2 * kKvBytes;  // [q, dout][buffer]
    const uint32_t score_tiles = row_tiles + 4 * kQBytes;
    // The staged tile is aligned to 1024 bytes, so it comes before the statistics.
    const uint32_t staged = SharedAddress(shared) + kStagedOffset +
                            (gradients ? 0 : kGradientsParts * kPassBytes);
    char* statistics_memory = shared + kStagedOffset + (kStaged ? kStagedBytes : 0);
    Span* spans = reinterpret_cast<Span*>(statistics_memory + 4 * kStatisticsBytes);
    const uint32_t own_kv = kv_tiles + gradients * kKvBytes;
    const uint32_t own_rows = row_tiles + gradients * 2 * kQBytes;
    const uint32_t other_rows = row_tiles + !gradients * 2 * kQBytes;
    const uint32_t own_scores = score_tiles + gradients * kScoreBytes;
    const uint32_t ds_tile = score_tiles + kScoreBytes;

    // ldmatrix positions; see the table in device_primitives.cuh.
    const int score_row = (warp % kScoreWarps) * 16;
    const int score_column = (warp / kScoreWarps) * 16;
    const uint32_t score_a =
        Opaque(own_rows + Tile::Offset(score_row + (lane & 15), lane >> 4));
    const uint32_t score_b = Opaque(
        own_kv + Tile::Offset(score_column + (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1));
    const uint32_t score_position =
        Opaque(ScoreTile::Offset(score_row + (lane & 15), score_column / 8 + (lane >> 4)));
    const uint32_t kv_a = Opaque(
        own_scores + ScoreTile::Offset((lane & 7) + ((lane >> 4) << 3),
                                       (warp % kKvWarps) * 2 + ((lane >> 3) & 1)));
    const uint32_t kv_b =
        Opaque(other_rows + Tile::Offset(lane & 15, (warp / kKvWarps) * 2 + (lane >> 4)));
    const uint32_t q_a = Opaque(
        ds_tile +
        ScoreTile::Offset((warp % kQWarps) * 16 + (lane & 8) + QRowOf(lane & 7), lane >> 4));
    const uint32_t q_b =
        Opaque(kv_tiles + Tile::Offset(lane & 15, (warp / kQWarps) * 2 + (lane >> 4)));
    const uint32_t staged_position =
        Opaque(staged + StagedOffset(QRow(thread), LaneColumn<kQWarps>(thread)));

    using RowCopy = TileCopy<T, kDim, kRows, kGroupThreads>;
    using KvCopy = TileCopy<T, kDim, kKeys, kGroupThreads>;
    // Of the operands that the group loads: q and k, or dout and v.
    const int columns = gradients ? common.head_dim_v : common.head_dim;
    const bool vector = gradients ? common.vector_v : common.vector_qk;
    const int64_t kv_row = batch * tile.block_rows + tile.row_begin;
    const int64_t kv_stride = int64_t{common.num_kv_heads} * columns;
    KvCopy::Load(own_kv, thread,
                 static_cast<const T*>(gradients ? tile.v : tile.k) + kv_row * kv_stride +
                     kv_head * columns,
                 kv_stride, tile.rows, columns, vector);

    // Writes what span `number` of the walk is, if there is one.
    const auto describe = [&](int number) {
      const int ranges = tile.range_end - tile.range_begin;
      const int head = number / ranges;
      if (head >= params.heads_per_block) return;
      const int index = tile.range_begin + number % ranges;
      const QRange& range = params.ranges[index];
      spans[number % kSpans] = {range.row_count,
                                range.full_begin,
                                range.full_end,
                                number + 1 == ranges * params.heads_per_block,
                                range.row_begin,
                                index,
                                static_cast<int>(blockIdx.y) * params.heads_per_block + head};
    };
    // Starts the group's copies of a tile. Missing rows become zeros, statistics too,
    // so that they add nothing.
    const auto load_operand = [&](bool dout, const Span& span, int row, int buffer) {
      const int operand_columns = dout ? common.head_dim_v : common.head_dim;
      const int valid_rows = span.row_count - row;
      const int64_t token = batch * common.q_rows + span.row_begin + row;
      RowCopy::Load(row_tiles + (dout * 2 + buffer) * kQBytes, thread,
                    static_cast<const T*>(dout ? params.dout : params.q) +
                        (token * common.num_heads + span.head) * operand_columns,
                    int64_t{common.num_heads} * operand_columns, valid_rows, operand_columns,
                    dout ? common.vector_v : common.vector_qk);
      if (kRows == kGroupThreads || thread < kRows) {
        const float* source = (dout ? params.delta : params.lse) +
                              (batch * common.num_heads + span.head) * common.q_rows +
                              span.row_begin + row + thread;
        CopyAsync4(SharedAddress(statistics_memory) + (buffer * 2 + dout) * kStatisticsBytes +
                       thread * 4,
                   source, static_cast<int>(thread) < valid_rows);
      }
    };
    const auto load_tile = [&](const Span& span, int row, int buffer) {
      if constexpr (kValuesLoad) {
        if (!gradients) {
          load_operand(false, span, row, buffer);
          load_operand(true, span, row, buffer);
        }
      } else {
        load_operand(gradients, span, row, buffer);
      }
      CommitCopies();
    };
    if (block_thread == 0) {
      describe(0);
      describe(1);
    }
    __syncthreads();
    load_tile(spans[0], 0, 0);

    KvAccumulator sum;  // dV or dK
#pragma unroll
    for (int m = 0; m < kKvM; ++m) {
#pragma unroll
      for (int n = 0; n < 2 * kKvN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][n][i] = 0.0f;
      }
    }
    int buffer = 0;
    int row = 0;  // of the tile, in its span
    int span_number = 0;
    QTile last{nullptr, 0, 0};
    bool more;
    do {
      WaitCopies<0>();
      if (kStaged && gradients && thread == 0) WaitBulkReads();
      __syncthreads();  // this tile is there, and everyone has left the last one
      const Span* span = spans + span_number % kSpans;
      const QTile q_tile{span, row, span->row_count - row};
      const bool masked =
          row < span->full_begin || min(row + kRows, span->row_count) > span->full_end;
      more = !span->last || q_tile.rows > kRows;
      const bool first = last.rows == 0;
      if (!first) {
        if (gradients) {
          AddQ<kValuesPasses, kQPasses, kGradientsParts>(params, 1, thread, last, batch, q_a, q_b,
                                                         staged, staged_position);
        } else if (kStaged && kValuesPasses > 0) {
          AddStaged(params, thread, last, batch, kValuesPasses - 1, staged);
        }
      }
      if (more) {
        const bool same = q_tile.rows > kRows;
        load_tile(spans[(span_number + !same) % kSpans], same ? row + kRows : 0, buffer ^ 1);
      }
      ScoreAccumulator scores;  // S or dP
      ScoreProduct(scores, score_a + buffer * kQBytes, score_b);
      const float* statistics =
          reinterpret_cast<const float*>(statistics_memory +
                                         (buffer * 2 + gradients) * kStatisticsBytes) +
          score_row + (lane >> 2);
      const auto mask = [&] {
        if (!masked) return;
        Mask(scores, params.ranges[span->range], row + score_row + (lane >> 2),
             score_column + 2 * (lane & 3), tile.rows);
      };
      if (!gradients) {
        // With a softcap the factor for the other group is left in dS's place,
        // which the last tile's dq still reads.
        if (common.softcap > 0.0f) SyncThreads<kThreads>(kDerivativesFree);
        Exponentials(scores, statistics, ds_tile + score_position, common);
        mask();
        StoreScores(scores, own_scores + score_position);
        ArriveThreads<kThreads>(kProbabilitiesReady);
        if (row == 0 && thread == 0) describe(span_number + 2);
        if (kStaged && kValuesPasses > 0 && thread == 0) WaitBulkReads();
      } else {
        if (common.softcap > 0.0f) ArriveThreads<kThreads>(kDerivativesFree);
        SyncThreads<kThreads>(kProbabilitiesReady);
        if (kStaged && !first) {
          AddStaged(params, thread, last, batch, kQPasses - 1, staged + kLastPart);
        }
        Differentiate(scores, statistics,
                      (common.softcap > 0.0f ? ds_tile : score_tiles) + score_position);
        mask();
        StoreScores(scores, own_scores + score_position);
        if (kValuesPasses > 0) ArriveThreads<kThreads>(kDerivativesReady);
      }
      SyncThreads<kGroupThreads>(kGroupBarrier + gradients);
      KvProduct(sum, kv_a, kv_b + buffer * kQBytes);
      if (kValuesPasses > 0 && !gradients) {
        SyncThreads<kThreads>(kDerivativesReady);
        AddQ<0, kValuesPasses, 1>(params, 0, thread, q_tile, batch, q_a, q_b, staged,
                                  staged_position);
      }
      last = q_tile;
      buffer ^= 1;
      row += kRows;
      if (q_tile.rows <= kRows) {
        row = 0;
        ++span_number;
      }
    } while (more);
    if (gradients) {
      if (kStaged) {
        if (thread == 0) WaitBulkReads();
        SyncThreads<kGroupThreads>(kGroupBarrier + 1);
      }
      AddQ<kValuesPasses, kQPasses, kGradientsParts>(params, 1, thread, last, batch, q_a, q_b,
                                                     staged, staged_position);
    }
    if (kStaged && (gradients || kValuesPasses > 0)) {
      SyncThreads<kGroupThreads>(kGroupBarrier + gradients);
      AddStaged(params, thread, last, batch, gradients ? kQPasses - 1 : kValuesPasses - 1,
                staged + (gradients ? kLastPart : 0));
    }
    const int sum_columns = gradients ? common.head_dim : common.head_dim_v;
    const int64_t sum_stride = int64_t{common.num_kv_heads} * sum_columns;
    const int sum_row = LaneRow<kKvWarps>(thread);
    const int sum_column = LaneColumn<kKvWarps>(thread);
    ReduceTile<kKvM, 2 * kKvN, kKvWarps * 16, kKvColumnWarps * 16>(
        sum, gradients ? common.softmax_scale : kUnshift,
        (gradients ? tile.dk : tile.dv) + (kv_row + sum_row) * sum_stride +
            kv_head * sum_columns + sum_column,
        sum_stride, sum_row, tile.rows, sum_column, sum_columns,
        tile.rows == kKeys && sum_columns == kDim);
    if (kStaged && thread == 0) WaitBulk();  // shared memory is read until then
  }
};

}  // namespace ringattn::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_ATTENTION_BACKWARD_CUH_
