// The two consumer warpgroups of a block of a column backward: process the block's columns of 64
// keys with every q tile that sees them.
//
// The groups divide the products as in a wide backward (wide_backward_consumer.cuh): the values
// group has S and dV, the keys group dP and dK, and each has two panels of the block's dQ. S and dP
// are parts until the other block's parts have been added.
//
// The order from tile j to the next:
//  values  [part of S(j) sent] receive, exp, pass P, dV(j), S(j + 1), [send it], wait for dS, dQ
//  keys    [part of dP(j) sent] receive, wait for P, dS, announce, dK(j), dQ, dP(j + 1), [send it]
// The memory of the received part of S holds P once the values group has read the part, and that of
// dP holds dS. The other block therefore sends its next part of S when the keys group here has read
// P, and its next part of dP when both groups here have computed dQ.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_COLUMNS_COLUMN_BACKWARD_CONSUMER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_COLUMNS_COLUMN_BACKWARD_CONSUMER_CUH_

#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/backward/columns/column_backward_shape.cuh"
#include "worker/kernels/cuda/sm90/backward/columns/part_exchange.cuh"
#include "worker/kernels/cuda/sm90/backward/wide_backward_consumer.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct ColumnBackwardConsumer {
  using T = typename Shape::T;
  using Narrow = BackwardConsumer<Shape>;
  using Wide = WideBackwardConsumer<Shape>;
  using Rules = BackwardScores<Shape>;
  using Scores = typename Rules::Scores;
  using Packed = typename Rules::Packed;
  using Sum = typename Narrow::Sum;  // dV or dK
  using DqPanel = typename Narrow::DqTile;
  using Stored = StoredSums<Shape>;
  static constexpr int kBoth = Shape::kGroups * 128;

  // A thread's position and the group's operands. Descriptors of q and dout are of the first slot.
  // `operands`: the base address in descriptor form.
  struct Place {
    uint32_t own_rows;         // A of the scores: K or V
    uint32_t other_rows;       // their B
    uint32_t columns;          // B of the sum
    uint32_t ds_rows;          // A of dq
    uint32_t k_columns;        // its B, of the group's first panel
    uint32_t gradient_target;  // the thread's position in dS
    int key, row;              // of its first element

    __device__ __forceinline__ Place(uint32_t shared, uint32_t operands, int group, int warp,
                                     int lane)
        : own_rows(RowDescriptor(operands + (group == 0 ? Shape::kK : Shape::kV))),
          other_rows(RowDescriptor(operands + Shape::kRowSlots)),
          columns(ColumnDescriptor(operands + Shape::kRowSlots, Shape::kRowPanelBytes)),
          ds_rows(RowDescriptor(operands + Shape::kScores)),
          k_columns(ColumnDescriptor(
              operands + Shape::kK + group * Shape::kGroupPanels * Shape::kKeyPanelBytes,
              Shape::kKeyPanelBytes)),
          gradient_target(shared + Shape::kScores + Narrow::GradientOffset(warp, lane)),
          key(warp * 16 + lane / 4),
          row(lane % 4 * 2) {}
  };

  // kGroup 0 is the values group, 1 the keys group.
  template <int kGroup>
  static __device__ __forceinline__ void Run(const BackwardKernelParams& params, char* memory,
                                             uint32_t shared, const BackwardItem& item, int rank) {
    constexpr bool kValues = kGroup == 0;
    constexpr uint32_t kSlotStep = DescriptorBytes(Shape::kRowBytes);
    const CommonParams& common = params.common;
    const int lane = threadIdx.x & 31;
    const int warp = (threadIdx.x & 127) / 32;
    const uint32_t operands = OperandAddress(shared);
    const Place place(shared, operands, kGroup, warp, lane);
    const PartExchange<Shape> exchange{shared, static_cast<uint32_t>(1 - rank), kGroup};
    const float* const statistics =
        reinterpret_cast<const float*>(memory + Shape::kRowStatistics) + place.row;
    const QueryTile* const tiles = reinterpret_cast<const QueryTile*>(memory + Shape::kTiles);
    Sum sum;
#pragma unroll
    for (int i = 0; i < Shape::kDim / 2; ++i) sum[i] = 0.0f;
    Scores scores;
    Packed packed;
    RingPosition<Shape::kStages> at;
    uint32_t part_phase = 0;  // of the tile's parts
    // The slots of the B operands of the scores and of the sum: q and dout for the values group,
    // dout and q for the keys group.
    RingPosition<Shape::kSlots> scores_at{kValues ? 0u : 1u};
    RingPosition<Shape::kSlots> sum_at{kValues ? 1u : 0u};
    typename Wide::Boxes boxes(shared, kGroup, warp, lane);
    bool last;
    WaitBarrier(shared + (kValues ? Shape::kKFull : Shape::kVFull), 0);
    if (!kValues) WaitBarrier(shared + Shape::kKFull, 0);  // for dQ
    const auto issue_scores = [&] {
      uint32_t own_rows = place.own_rows;
      KeepHere(own_rows);  // otherwise the descriptors of all steps would be kept in registers
      Narrow::template IssueScores<false>(scores, own_rows,
                                          place.other_rows + scores_at.stage * kSlotStep, operands,
                                          0, Addend::kOffset);
    };
    // After the last tile the same scores are issued again and neither sent nor read: a branch
    // would make the assembler wait for every product.
    const auto issue_next = [&] {
      if (!last) {
        scores_at.AdvanceTwo();
        WaitBarrier(shared + Shape::kSlotFull + 8 * scores_at.stage, scores_at.phase);
      }
      issue_scores();
    };
    const auto send_next = [&] {
      WaitProducts<0>();
      PinRegisters(scores);
      if (!last) {
        Narrow::Release(shared + Shape::kSlotEmpty + 8 * scores_at.stage);
        exchange.Send(scores, part_phase ^ 1);
      }
    };
    const auto issue_dq = [&](DqPanel& dq, int panel) {
      uint32_t k_columns = place.k_columns;
      KeepHere(k_columns);
      Narrow::IssueDq(dq, place.ds_rows,
                      k_columns + DescriptorBytes(panel * Shape::kKeyPanelBytes));
    };
    WaitBarrier(shared + Shape::kSlotFull + 8 * scores_at.stage, 0);
    issue_scores();
    WaitProducts<0>();
    PinRegisters(scores);
    Narrow::Release(shared + Shape::kSlotEmpty + 8 * scores_at.stage);
    exchange.Send(scores, 0);
#pragma unroll 1
    do {
      WaitBarrier(shared + Shape::kTileFull + 8 * at.stage, at.phase);
      const QueryTile tile = tiles[at.stage];
      last = tile.flags & QueryTile::kLast;
      const float* const tile_statistics = statistics + at.stage * Shape::kStatistics;
      exchange.Receive(scores, part_phase);
      Packed weights;
      if constexpr (kValues) {
        Rules::Probabilities(scores, packed, weights, tile_statistics, tile, place.key, place.row,
                             item.tile->rows, common);
        Wide::Hand(weights, exchange.Place(0));
        ArriveThreads<kBoth>(Shape::kProbabilitiesReady);
      } else {
        SyncThreads<kBoth>(Shape::kProbabilitiesReady);
        Wide::TakeOver(weights, exchange.Place(0));
        Rules::Weigh(scores, weights, packed, tile_statistics);
        Narrow::StoreGradients(packed, place.gradient_target);
        FenceBulkReads();
        ArriveThreads<kBoth>(Shape::kGradientsReady);
        exchange.Release(0);
      }
      Narrow::Release(shared + Shape::kTileEmpty + 8 * at.stage);
      at.Advance();
      WaitBarrier(shared + Shape::kSlotFull + 8 * sum_at.stage, sum_at.phase);
      Narrow::IssueSum(sum, packed, place.columns + sum_at.stage * kSlotStep);
      DqPanel dq;
      if constexpr (kValues) {
        issue_next();
        WaitProducts<1>();
        Narrow::Release(shared + Shape::kSlotEmpty + 8 * sum_at.stage);
        send_next();
        SyncThreads<kBoth>(Shape::kGradientsReady);
        issue_dq(dq, 0);
        WaitProducts<0>();
        PinRegisters(dq);
        boxes.PutDq(dq, common.softmax_scale);
        issue_dq(dq, 1);
        WaitProducts<0>();
        exchange.Release(1);
        PinRegisters(dq);
        boxes.PutDq(dq, common.softmax_scale);
      } else {
        SyncThreads<128>(Shape::kOwnGradientsReady);
        DqPanel second_dq;
        issue_dq(dq, 0);
        issue_dq(second_dq, 1);
        WaitProducts<2>();
        Narrow::Release(shared + Shape::kSlotEmpty + 8 * sum_at.stage);
        WaitProducts<1>();
        PinRegisters(dq);
        boxes.PutDq(dq, common.softmax_scale);
        issue_next();
        WaitProducts<1>();
        exchange.Release(1);
        PinRegisters(second_dq);
        boxes.PutDq(second_dq, common.softmax_scale);
        send_next();
      }
      sum_at.AdvanceTwo();
      part_phase ^= 1;
    } while (!last);
    WaitProducts<0>();
    PinRegisters(sum);
    const float scale = kValues ? Shape::kUnshift : common.softmax_scale;
    if constexpr (Stored::kPossible) {
      if (Stored::Asked(item)) {
        Stored::Store(common, item, kValues ? item.tile->dv : item.tile->dk,
                      kValues ? common.head_dim_v : common.head_dim, place.key, sum, scale,
                      rank * Shape::kDim);
        return;
      }
    }
    boxes.PutSum(sum, scale);
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_COLUMNS_COLUMN_BACKWARD_CONSUMER_CUH_
