// The two consumer warpgroups of a paired backward: the block's 64 keys against every q tile that
// sees those of the pair.
//
// The values group computes S^T = K Q^T, makes P^T of it, hands it to the keys group and sums dV +=
// P^T dout. The keys group computes dP^T = V dout^T, makes dS^T of both, and sums dK += dS^T Q. P
// is handed over where dS will lie: each thread finds there what it needs, and a warp writes what
// it has read itself. dS goes to the other block too (paired_backward_producer.cuh), and of both
// blocks' dS and keys each group computes its columns of dQ, one tile late: by then the other
// block's has arrived.
//
// The products in the order of issue, and what a group does meanwhile, at tile j:
//   values  [S(j) issued] exp, hand P, dV(j), dQ(j - 1), S(j + 1), [stage dQ]
//   keys    [dP(j) issued] wait for P, dS, tell, dK(j), dQ(j - 1), dP(j + 1), [stage dQ]
// At the first tile there is no dQ yet; the same product is issued on whatever lies there, for a
// branch would make the assembler wait for every product, and left alone.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_PAIRED_BACKWARD_CONSUMER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_PAIRED_BACKWARD_CONSUMER_CUH_

#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_consumer.cuh"
#include "worker/kernels/cuda/sm90/backward/paired_backward_shape.cuh"
#include "worker/kernels/cuda/sm90/primitives/cluster.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct PairedBackwardConsumer {
  using T = typename Shape::T;
  using Narrow = BackwardConsumer<Shape>;
  using Rules = BackwardScores<Shape>;
  using Scores = typename Rules::Scores;
  using Packed = typename Rules::Packed;
  using Sum = typename Narrow::Sum;  // dV or dK
  static constexpr int kDim = Shape::kDim;
  static constexpr int kBoth = Shape::kGroups * 128;

  // What StoreGradients wrote from the same threads' places, in the same registers.
  static __device__ __forceinline__ void LoadProbabilities(Packed& p, uint32_t source) {
#pragma unroll
    for (int step = 0; step < Shape::kRows / 16; ++step) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(p[step * 4]), "=r"(p[step * 4 + 1]), "=r"(p[step * 4 + 2]),
                     "=r"(p[step * 4 + 3])
                   : "r"(source + step * 16 * kPanelRowBytes)
                   : "memory");
    }
  }

  // A group's staged columns of dq.
  template <int kGroup>
  struct Staged {
    const uint32_t full, empty;  // barriers
    const uint32_t target;       // the thread's first element
    uint32_t phase = 1;

    __device__ __forceinline__ Staged(uint32_t shared, int warp, int lane)
        : full(shared + Shape::kStagedFull + 8 * kGroup),
          empty(shared + Shape::kStagedEmpty + 8 * kGroup),
          target(shared + Shape::kStaged + Shape::StagedOffset(kGroup) +
                 Narrow::StagedOffset(warp, Narrow::QueryRow(lane / 4), lane)) {}

    template <int kCount>
    __device__ __forceinline__ void Put(const float (&dq)[kCount], float scale) {
      constexpr int kColumns = Shape::StagedColumns(kGroup);
#pragma unroll
      for (int first = 0; first < kCount; first += kColumns / 2) {
        WaitBarrier(empty, phase);
        phase ^= 1;
        Narrow::template Stage<kColumns>(dq, first, scale, target);
        FenceBulkReads();
        Narrow::Release(full);
      }
    }
  };

  // What a thread knows of its place and of what the group multiplies; descriptors of q, dout and
  // dS are of the first of several.
  template <int kGroup>
  struct Place {
    static constexpr bool kValues = kGroup == 0;
    // Where the scores' B and the sum's B are: q and dout for the values, dout and q for the keys.
    static constexpr int kScoresB = kValues ? Shape::kQ : Shape::kDout;
    static constexpr int kScoresFull = kValues ? Shape::kQFull : Shape::kDoutFull;
    static constexpr int kScoresEmpty = kValues ? Shape::kQEmpty : Shape::kDoutEmpty;
    static constexpr int kSumB = kValues ? Shape::kDout : Shape::kQ;
    static constexpr int kSumFull = kValues ? Shape::kDoutFull : Shape::kQFull;
    static constexpr int kSumEmpty = kValues ? Shape::kDoutEmpty : Shape::kQEmpty;
    using ScoresAt = RingPosition<kValues ? Shape::kStages : Shape::kDoutSlots>;
    using SumAt = RingPosition<kValues ? Shape::kDoutSlots : Shape::kStages>;

    uint32_t own_rows;            // A of the scores: K or V
    uint32_t other_rows;          // their B
    uint32_t columns;             // B of the sum
    uint32_t ds_rows;             // A of dq: the block's keys, then the other block's
    uint32_t k_columns, other_k;  // its B likewise
    uint32_t gradient_target;     // the thread's position in dS
    int key, row;                 // of its first element, among the pair's keys

    // `operands`: the base as descriptors take it.
    __device__ __forceinline__ Place(uint32_t shared, uint32_t operands, int warp, int lane,
                                     int rank)
        : own_rows(RowDescriptor(operands + (kValues ? Shape::kK : Shape::kV))),
          other_rows(RowDescriptor(operands + kScoresB)),
          columns(ColumnDescriptor(operands + kSumB, Shape::kRowPanelBytes)),
          ds_rows(RowDescriptor(operands + Shape::kScores)),
          gradient_target(shared + Shape::kScores + Narrow::GradientOffset(warp, lane)),
          key(rank * Shape::kKeys + warp * 16 + lane / 4),
          row(lane % 4 * 2) {
      const int column = Shape::FirstColumn(kGroup, rank);
      const uint32_t within = column % kPanelColumns * 2;
      k_columns = ColumnDescriptor(
          operands + Shape::kK + column / kPanelColumns * Shape::kKeyPanelBytes + within,
          Shape::kKeyPanelBytes);
      other_k =
          ColumnDescriptor(operands + Shape::kOtherK + kGroup * Shape::kKeyPanelBytes + within,
                           Shape::kKeyPanelBytes);
    }
  };

  // Issues dq = dS K for the group's columns; dS of that stage is there, the other block's too.
  template <int kCount, int kGroup>
  static __device__ __forceinline__ void IssueDq(float (&dq)[kCount], const Place<kGroup>& place,
                                                 uint32_t stage) {
    const uint32_t ds = place.ds_rows + stage * DescriptorBytes(Shape::kScorePanelBytes);
    constexpr uint32_t kOther = DescriptorBytes(Shape::kOtherScores - Shape::kScores);
    uint32_t k_columns = place.k_columns;
    KeepHere(k_columns);
    ProductFence();
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
      MultiplySharedColumns<T>(dq, ds + DescriptorBytes(step * 32),
                               k_columns + DescriptorBytes(step * 16 * kPanelRowBytes), step > 0);
    }
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
      MultiplySharedColumns<T>(dq, ds + kOther + DescriptorBytes(step * 32),
                               place.other_k + DescriptorBytes(step * 16 * kPanelRowBytes), 1);
    }
    CommitProducts();
  }

  static __device__ __forceinline__ void AwaitGradients(uint32_t shared, uint32_t stage,
                                                        uint32_t phase) {
    WaitBarrier(shared + Shape::kScoresFull + 8 * stage, phase);
    WaitClusterBarrier(shared + Shape::kOtherScoresFull + 8 * stage, phase);
  }

  // kGroup 0 is the values group, 1 the keys group.
  template <int kGroup>
  static __device__ __forceinline__ void Run(const BackwardKernelParams& params, char* memory,
                                             uint32_t shared, const BackwardItem& item, int rank) {
    using Here = Place<kGroup>;
    constexpr bool kValues = Here::kValues;
    constexpr uint32_t kSlotStep = DescriptorBytes(Shape::kRowBytes);
    // With one slot dout comes late: there is better to do before anybody waits for it, and two
    // products in flight, dQ and the next scores, would take more registers than there are.
    constexpr bool kStagesFirst = Shape::kDoutSlots == 1;
    const CommonParams& common = params.common;
    const int keys = item.tile->rows;
    const int lane = threadIdx.x & 31;
    const int warp = (threadIdx.x & 127) / 32;
    const uint32_t operands = OperandAddress(shared);
    const Here place(shared, operands, warp, lane, rank);
    const BothBlocks both(shared, lane);
    const float* const statistics =
        reinterpret_cast<const float*>(memory + Shape::kRowStatistics) + place.row;
    const QueryTile* const tiles = reinterpret_cast<const QueryTile*>(memory + Shape::kTiles);
    Sum sum;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) sum[i] = 0.0f;
    Scores scores;
    Packed packed;
    float dq[Shape::DqColumns(kGroup) / 2];
    RingPosition<Shape::kStages> at;
    typename Here::ScoresAt scores_at;
    typename Here::SumAt sum_at;
    Staged<kGroup> staged(shared, warp, lane);
    bool first = true, last;
    WaitBarrier(shared + (kValues ? Shape::kKFull : Shape::kVFull), 0);
    if (!kValues) WaitBarrier(shared + Shape::kKFull, 0);  // for dQ
    const auto await_next = [&] {
      WaitBarrier(shared + Here::kScoresFull + 8 * scores_at.stage, scores_at.phase);
      WaitBarrier(shared + Shape::kTileFull + 8 * at.stage, at.phase);
    };
    const auto issue_scores = [&] {
      // Found anew: descriptors of every step would be kept through the loop, which is more than
      // the registers hold.
      uint32_t own_rows = place.own_rows;
      KeepHere(own_rows);
      Narrow::template IssueScores<kValues ? Shape::kAddsOffsets : Shape::kAddsDeltas>(
          scores, own_rows, place.other_rows + scores_at.stage * kSlotStep, operands, at.stage,
          kValues ? Addend::kOffset : Addend::kDelta);
    };
    await_next();
    issue_scores();
#pragma unroll 1
    do {
      const RingPosition<Shape::kStages> own = at;
      const QueryTile tile = tiles[own.stage];
      last = tile.flags & QueryTile::kLast;
      const float* const tile_statistics = statistics + own.stage * Shape::kStatistics;
      const uint32_t gradient_target = place.gradient_target + own.stage * Shape::kScorePanelBytes;
      WaitProducts<0>();
      PinRegisters(scores);
      both.Release(shared, Here::kScoresEmpty + 8 * scores_at.stage);
      if constexpr (kValues) {
        Packed weights;
        Rules::Probabilities(scores, packed, weights, tile_statistics, tile, place.key, place.row,
                             keys, common);
        WaitClusterBarrier(shared + Shape::kScoresEmpty + 8 * own.stage, own.phase ^ 1);
        Narrow::StoreGradients(weights, gradient_target);
        // A barrier for each stage: the values group can be a tile ahead.
        ArriveThreads<kBoth>(Shape::kProbabilitiesReady + own.stage);
      } else {
        Rules::SubtractSteep(scores, tile_statistics, tile.flags);
        SyncThreads<kBoth>(Shape::kProbabilitiesReady + own.stage);
        Packed weights;
        LoadProbabilities(weights, gradient_target);
        Rules::Weigh(scores, weights, packed, tile_statistics);
        __syncwarp();
        Narrow::StoreGradients(packed, gradient_target);
        FenceBulkReads();
        Narrow::Release(shared + Shape::kScoresFull + 8 * own.stage);
      }
      Narrow::Release(shared + Shape::kTileEmpty + 8 * own.stage);
      WaitBarrier(shared + Here::kSumFull + 8 * sum_at.stage, sum_at.phase);
      Narrow::IssueSum(sum, packed, place.columns + sum_at.stage * kSlotStep);
      // The stage before; at the first tile the barriers' phase before.
      const uint32_t before = own.stage ^ 1;
      AwaitGradients(shared, before, own.phase ^ before);
      IssueDq(dq, place, before);
      const auto stage_dq = [&] {
        if (!first) {
          both.Release(shared, Shape::kScoresEmpty + 8 * before);
          staged.Put(dq, common.softmax_scale);
        }
        first = false;
      };
      const auto issue_next = [&] {
        // After the last tile those of the same once more, which nobody reads, rather than a
        // branch.
        if (!last) {
          at.Advance();
          scores_at.Advance();
          await_next();
        }
        issue_scores();
      };
      if constexpr (!kStagesFirst) issue_next();
      WaitProducts<kStagesFirst ? 1 : 2>();
      both.Release(shared, Here::kSumEmpty + 8 * sum_at.stage);
      sum_at.Advance();
      WaitProducts<kStagesFirst ? 0 : 1>();
      PinRegisters(dq);
      stage_dq();
      if constexpr (kStagesFirst) issue_next();
    } while (!last);
    AwaitGradients(shared, at.stage, at.phase);
    IssueDq(dq, place, at.stage);
    WaitProducts<0>();
    PinRegisters(dq);
    PinRegisters(sum);
    PinRegisters(scores);
    staged.Put(dq, common.softmax_scale);
    const float scale = kValues ? Shape::kUnshift : common.softmax_scale;
    using Stored = StoredSums<Shape>;
    if constexpr (Stored::kPossible) {
      if (Stored::Asked(item)) {
        Stored::Store(common, item, kValues ? item.tile->dv : item.tile->dk,
                      kValues ? common.head_dim_v : common.head_dim, place.key, sum, scale);
        return;
      }
    }
    // Each waits for the other at a barrier of its own: all who wait for one do so in one place.
    ArriveThreads<kBoth>(kValues ? Shape::kValuesDone : Shape::kKeysDone);
    SyncThreads<kBoth>(kValues ? Shape::kKeysDone : Shape::kValuesDone);
    const uint32_t target = shared + Shape::kSums + kGroup * Shape::kSumBytes +
                            Narrow::StagedOffset(warp, lane / 4, lane);
#pragma unroll
    for (int part = 0; part < kDim / 32; ++part) {
      Narrow::template Stage<32>(sum, part * 16, scale, target + part * Shape::kBoxBytes);
    }
    FenceBulkReads();
    Narrow::Release(staged.full);
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_PAIRED_BACKWARD_CONSUMER_CUH_
