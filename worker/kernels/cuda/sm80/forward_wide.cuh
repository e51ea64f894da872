// Forward attention on tensor cores by mma.sync for wide heads (head_dim above 128; sm_80 and
// later). Contract, masks, softmax and epilogue are those of forward.cuh.
//
// Reason for this shape: shared-memory reads bound the kernel. A warp that holds whole output rows
// has room for 16 of them at these dims, and rereads all of k and v for them. Here two warps share
// 32 rows. Each computes the scores of half the keys and the output of half the columns, so that it
// reads half of k and half of v for twice the rows. P must then pass through shared memory; a warp
// reads only the part that the other warp computed. At head_dim 256 a tile of 64 keys moves 480
// instead of 640 KB, at 192 (with a third of q in registers) 336 instead of 480.
//
// Order: the product with V comes one tile late, so that neither warp waits for the other and the
// exponentials of a tile run during the products of the last one:
//  S(t); own maxima to the other warp; O += the other's P(t-1) V;
//  pair barrier: maxima are exchanged and P is unused;
//  O += own P(t-1) V, and exponentials of S(t) between its products; P(t) is stored.
// k therefore runs one tile ahead of v. __syncthreads, which begins a tile, makes P(t-1) visible.
// If a row's offset moves (rare), the products come first.
//
// The parts are in forward_wide_shape.cuh (the numbers of a head-dim class), _products.cuh and
// _rows.cuh; loads are in forward_loads.cuh.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_WIDE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_WIDE_CUH_

#include "worker/kernels/cuda/primitives/copy_async.cuh"
#include "worker/kernels/cuda/primitives/forward_row.cuh"
#include "worker/kernels/cuda/primitives/mma.cuh"
#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm80/forward_loads.cuh"
#include "worker/kernels/cuda/sm80/forward_softmax.cuh"
#include "worker/kernels/cuda/sm80/forward_wide_products.cuh"
#include "worker/kernels/cuda/sm80/forward_wide_rows.cuh"
#include "worker/kernels/cuda/sm80/forward_wide_shape.cuh"
#include "worker/kernels/cuda/sm80/q_tile.cuh"

namespace ringattn::worker::cuda::sm80 {

template <typename ShapeOf>
struct ForwardWide {
  using Shape = ShapeOf;
  using T = typename Shape::T;
  using Tile = typename Shape::Tile;
  using ProbabilityTile = typename Shape::ProbabilityTile;
  using Products = ForwardWideProducts<Shape>;
  using Rows = ForwardWideRows<Shape>;
  using Scores = typename Shape::Scores;
  using Probabilities = typename Shape::Probabilities;
  using Output = typename Shape::Output;
  static constexpr int kRowTiles = Shape::kRowTiles;
  static constexpr int kKeySteps = Shape::kKeySteps;
  static constexpr int kKvBytes = Shape::kKvBytes;

  // A lane's ldmatrix addresses (the table in primitives/mma.cuh) and its position in the pair.
  struct Lane {
    unsigned thread;
    int lane;
    int row_group;  // of 32 rows, shared by a pair of neighbouring warps
    int side;       // which half of the keys and columns
    uint32_t q_base, k_base, v_base, p_base;
    uint32_t other_v;  // offset from this warp's half of v to the other's
    float* exchange;   // one float per lane: [warp][lane]

    __device__ __forceinline__ Lane(char* shared, uint32_t q_tile, uint32_t k_tiles,
                                    uint32_t v_tiles)
        : thread(OpaqueThread()) {
      lane = thread & 31;
      const int warp = thread >> 5;
      row_group = warp / 2;
      side = warp % 2;
      const uint32_t p_tile = v_tiles + 2 * kKvBytes;
      q_base = Opaque(q_tile + Tile::Offset(row() + (lane & 15), lane >> 4));
      k_base = Opaque(k_tiles +
                      Tile::Offset(side * 16 + (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1));
      v_base = Opaque(v_tiles + Tile::Offset(side * 16 + (lane & 15), side * 2 + (lane >> 4)));
      other_v = side ? -16 * Tile::kRowBytes : 16 * Tile::kRowBytes;
      p_base =
          Opaque(p_tile + ProbabilityTile::Offset(row() + (lane & 15), side * 2 + (lane >> 4)));
      exchange = reinterpret_cast<float*>(shared + Shape::kQBytes + 4 * kKvBytes + Shape::kPBytes);
    }

    __device__ __forceinline__ int row() const { return row_group * 32; }  // the warp's first
    // Neighbouring warps are on different schedulers.
    __device__ __forceinline__ void SyncPair() const { SyncThreads<64>(1 + row_group); }
  };

  static __device__ __forceinline__ void Run(const ForwardParams& params, char* shared) {
    const CommonParams& common = params.common;
    // All threads must get the same answer, because otherwise the warps of a pair would wait for
    // each other forever.
    if (__syncthreads_or(Stopped(common.stop_word))) return;
    // Read again at each use instead of being kept in registers.
    const ForwardTile& tile = params.tiles[blockIdx.x];
    const int pack = params.head_pack;
    const int first_head = blockIdx.y * pack;
    const int kv_head = first_head / common.group_size;
    const int64_t batch = blockIdx.z;
    const uint32_t q_tile = SharedAddress(shared);
    const uint32_t k_tiles = q_tile + Shape::kQBytes;
    const uint32_t v_tiles = k_tiles + 2 * kKvBytes;
    const Lane at(shared, q_tile, k_tiles, v_tiles);

    ForwardWideLoads<Shape> loads(params, at.thread, kv_head, batch);
    LoadQTile<T, Shape::kDim, Shape::kRows, Shape::kThreads>(q_tile, params, tile, first_head,
                                                             batch);
    if (tile.range_begin < tile.range_end) {
      loads.OpenKeys(params.ranges[tile.range_begin]);
      loads.LoadKeys(k_tiles, params.ranges[tile.range_begin].row_count);
    }
    CommitCopies();

    Output output;
    Rows rows;
    typename Shape::QFragments q_fragments;
    Probabilities p;  // of the last tile, this warp's keys
    ClearAccumulators(output);
    rows.Clear();
    Clear(p);
    const Transform transform(common);

    int buffer = 0;
    bool first = true;
    for (int index = tile.range_begin; index < tile.range_end; ++index) {
      const KvRange& range = params.ranges[index];
      const int row_count = range.row_count;
      const int full_begin = range.full_begin;
      const int full_end = range.full_end;
      loads.OpenValues(range);
      for (int row = 0; row < row_count; row += Shape::kKeys) {
        WaitCopies<0>();
        __syncthreads();  // k, the last v and P are complete; all threads have finished with the
                          // others
        if (row + Shape::kKeys < row_count) {
          loads.LoadKeys(k_tiles + (buffer ^ 1) * kKvBytes, row_count - row - Shape::kKeys);
        } else if (index + 1 < tile.range_end) {
          loads.OpenKeys(params.ranges[index + 1]);
          loads.LoadKeys(k_tiles + (buffer ^ 1) * kKvBytes, params.ranges[index + 1].row_count);
        }
        if (Shape::kQSteps > 0 && first) Products::HoldQ(q_fragments, at.q_base);
        Scores scores;
        Products::ScoreProduct(scores, q_fragments, at.q_base, at.k_base + buffer * kKvBytes);
        loads.LoadValues(v_tiles + buffer * kKvBytes, row_count - row);
        CommitCopies();
        if (transform.applies) transform.Apply(scores, common);
        if (row < full_begin || row + Shape::kKeys > full_end) {
          MaskScores<32>(scores, range, at.row() + (at.lane >> 2),
                         row + at.side * 16 + 2 * (at.lane & 3), pack);
        }
        float max = Rows::Maximum(scores, at.lane);
        at.exchange[at.thread] = max;
        if (!first) AddOther(output, at, buffer ^ 1);
        at.SyncPair();
        max = fmaxf(max, at.exchange[at.thread ^ 32]);
        AddOwn(output, rows, p, scores, max, transform.multiplier, at, buffer ^ 1, first);
        first = false;
        buffer ^= 1;
      }
    }
    WaitCopies<0>();
    __syncthreads();
    if (!first) {
      AddOther(output, at, buffer ^ 1);
      AddProbabilities(output, p, at, buffer ^ 1, [](int) {});
    }
    Store(params, tile, first_head, at, transform.multiplier, rows, output);
  }

 private:
  static __device__ __forceinline__ void Clear(Probabilities& p) {
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) p[step][m][i] = 0;
      }
    }
  }

  // O += P V for the other warp's keys, with the values in `buffer`.
  static __device__ __forceinline__ void AddOther(Output& output, const Lane& at, int buffer) {
    Products::ValueProduct(
        output, at.v_base + at.other_v + buffer * kKvBytes,
        [&](int step, uint32_t(&a)[kRowTiles][4]) {
          uint32_t base = at.p_base;
          KeepHere(base);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            LoadMatrices(a[m], ProbabilityTile::Step(base ^ 32, 2 * step) +
                                   m * 16 * ProbabilityTile::kRowBytes);
          }
        },
        [](int) {});
  }

  // The same for this warp's keys; `between` is that of ValueProduct.
  template <typename Between>
  static __device__ __forceinline__ void AddProbabilities(Output& output, const Probabilities& p,
                                                          const Lane& at, int buffer,
                                                          const Between& between) {
    Products::ValueProduct(
        output, at.v_base + buffer * kKvBytes,
        [&](int step, uint32_t(&a)[kRowTiles][4]) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[m][i] = p[step][m][i];
          }
        },
        between);
  }

  // O += P V for this warp's keys of the last tile, whose values are in `buffer`. Also computes the
  // probabilities of this tile's `scores`, which replace those of the last tile in `p`. `max` is
  // the pair's.
  static __device__ __forceinline__ void AddOwn(Output& output, Rows& rows, Probabilities& p,
                                                Scores& scores, float max, float multiplier,
                                                const Lane& at, int buffer, bool first) {
    const bool rare = __any_sync(0xffffffff, rows.wide || max > rows.limit);
    Probabilities next;
    // Computes half an A fragment of P(t).
    const auto exponentials = [&](int i) {
      const int n = i % 2;
      const int m = i / 2 % kRowTiles;
      const int step = i / 2 / kRowTiles;
      Exponentials<T>(scores[m][2 * step + n], n, multiplier, rows.offset[m], rows.sum[m],
                      next[step][m]);
      if (n == 1) {
        uint32_t base = at.p_base;
        KeepHere(base);
        StoreMatrices(ProbabilityTile::Step(base, 2 * step) + m * 16 * ProbabilityTile::kRowBytes,
                      next[step][m]);
      }
    };
    constexpr int kExponentials = kRowTiles * Shape::kKeyTiles;
    if (first || rare) {
      if (!first) AddProbabilities(output, p, at, buffer, [](int) {});
      rows.MoveOffsets(max, multiplier, at.lane, output);
      if (rows.wide) rows.SubtractLimits(scores, multiplier, at.lane);
#pragma unroll
      for (int i = 0; i < kExponentials; ++i) exponentials(i);
    } else {
      AddProbabilities(output, p, at, buffer, [&](int i) {
        constexpr int kProducts = kKeySteps * Shape::kColumnSteps;
#pragma unroll
        for (int e = i * kExponentials / kProducts; e < (i + 1) * kExponentials / kProducts; ++e) {
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
  }

  // The epilogue.
  static __device__ __forceinline__ void Store(const ForwardParams& params, const ForwardTile& tile,
                                               int first_head, const Lane& at, float multiplier,
                                               const Rows& rows, const Output& output) {
    // Computed again instead of being kept in registers.
    uint32_t z = blockIdx.z;
    KeepHere(z);
    const int lane = at.lane;
    float sums[kRowTiles * 2];
#pragma unroll
    for (int group = 0; group < kRowTiles * 2; ++group) {
      sums[group] = QuadSum(rows.sum[group / 2][group % 2]);
    }
    at.exchange[at.thread] =
        lane & 2 ? (lane & 1 ? sums[3] : sums[2]) : (lane & 1 ? sums[1] : sums[0]);
    at.SyncPair();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int group = m * 2 + half;
        const float sum = sums[group] + at.exchange[((at.thread & ~3u) ^ 32) + group];
        float base = rows.offset[m][half];
        if (rows.wide) base = rows.BaseOf(m, half, multiplier, lane);
        const int packed_row = at.row() + m * 16 + half * 8 + (lane >> 2);
        ForwardRow target(params, tile, first_head, int64_t{z}, packed_row, RowLse(base, sum),
                          sum == 0.0f ? 0.0f : 1.0f / sum);
        __syncwarp();
        at.SyncPair();  // both warps have read the previous lse
        if (!target.exists) continue;
#pragma unroll
        for (int n = 0; n < 2 * Shape::kColumnSteps; ++n) {
          target.template Store2<T>(n / 2 * 32 + at.side * 16 + n % 2 * 8 + (lane & 3) * 2,
                                    output[m][n][half * 2], output[m][n][half * 2 + 1]);
        }
        if (at.side == 0 && (lane & 3) == 0) target.StoreLse();
      }
    }
  }
};

}  // namespace ringattn::worker::cuda::sm80

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM80_FORWARD_WIDE_CUH_
