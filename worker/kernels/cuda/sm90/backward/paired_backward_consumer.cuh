// The two consumer warpgroups of a paired backward: process the block's 64 keys with every q tile
// that sees keys of the pair.
//
// The values group computes S^T = K Q^T, converts it to P^T, passes it to the keys group and sums
// dV += P^T dout. The keys group computes dP^T = V dout^T, computes dS^T from both, and sums dK +=
// dS^T Q. P is passed in the memory of dS: each thread finds its elements there, and a warp
// overwrites only elements that it has read. dS is also sent to the other block
// (paired_backward_producer.cuh). Each group computes its columns of dQ from both blocks' dS and
// keys, one tile late, when the other block's dS has arrived.
//
// The products in the order of issue, with the group's other work, at tile j:
//  values  [S(j) issued] exp, pass P, dV(j), dQ(j - 1), S(j + 1), [stage dQ]
//  keys    [dP(j) issued] wait for P, dS, announce, dK(j), dQ(j - 1), dP(j + 1), [stage dQ]
// At the first tile there is no dQ yet. The same product is issued on undefined data and its result
// is ignored, because a branch would make the assembler wait for every product.
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

  // Loads what StoreGradients wrote from the same threads' positions, into the same registers.
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

  // The staged columns of dq of a group.
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

  // A thread's position and the group's operands. Descriptors of q, dout and dS are of the first
  // stage.
  template <int kGroup>
  struct Place {
    static constexpr bool kValues = kGroup == 0;
    // The B operands of the scores and of the sum: q and dout for the values group, dout and q for
    // the keys group.
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
    uint32_t ds_rows;             // A of dq: the block's dS, then the other block's
    uint32_t k_columns, other_k;  // B of dq: the same for K
    uint32_t gradient_target;     // the thread's position in dS
    int key, row;                 // of its first element among the pair's keys

    // `operands`: the base address in descriptor units.
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

  // Issues dq = dS K for the group's columns. dS of that stage must be complete, including the
  // other block's.
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
    // With one slot dout arrives late, so other work comes before the wait for it. Two products in
    // flight, dQ and the next scores, would also need more registers than there are.
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
      // Computed again in every iteration: descriptors of every step would otherwise be kept
      // through the loop and exceed the registers.
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
        // One barrier per stage, because the values group can be a tile ahead.
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
      // The preceding stage; at the first tile, the preceding phase of the barriers.
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
        // After the last tile the same scores are issued again and not read, which avoids a branch.
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
    // Each group waits for the other at a separate barrier, so that all threads wait for a barrier
    // at the same place in the code.
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
