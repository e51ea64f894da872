// A consumer warpgroup of a backward with score terms. It differs from backward_consumer.cuh in the
// computation on scores (terms_backward_scores.cuh).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BACKWARD_CONSUMER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BACKWARD_CONSUMER_CUH_

#include "worker/kernels/cuda/sm90/backward/backward_consumer.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_backward_keep.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_backward_scores.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_bias.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct TermBackwardConsumer {
  using Plain = BackwardConsumer<Shape>;
  using Rules = TermBackwardScores<Shape>;
  static constexpr int kDim = Shape::kDim;

  // `group` is the index of the consumer warpgroup, the same in all threads of the warp.
  static __device__ __forceinline__ void Run(const TermBackwardKernelParams& params, char* memory,
                                             uint32_t shared, const BackwardItem& item, int group) {
    const CommonParams& common = params.common;
    const int lane = threadIdx.x & 31;
    const int warp = (threadIdx.x & 127) / 32;
    const int row = lane % 4 * 2;
    const TermKeys keys = {item};
    const typename Plain::Operands operands(shared, group);
    constexpr uint32_t kStageStep = DescriptorBytes(Shape::kRowBytes);
    const uint32_t gradient_target = shared + Shape::kScores + group * Shape::kScorePanelBytes +
                                     Plain::GradientOffset(warp, lane);
    const float* const statistics =
        reinterpret_cast<const float*>(memory + Shape::kRowStatistics) + row;
    const TermQueryTile* const tiles =
        reinterpret_cast<const TermQueryTile*>(memory + Shape::kTermTiles);
    typename Plain::Sum dk, dv;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dk[i] = dv[i] = 0.0f;
    typename Plain::Scores scores, gradients;
    typename Plain::Packed p, ds;
    typename Plain::DqTile dq;
    RingPosition<Shape::kStages> at;
    typename Plain::StagedBoxes boxes(shared, group, warp, lane);
    typename BiasOrNot<Shape, BackwardBias>::Type bias(shared, group);
    typename KeepWordsOrNot<Shape>::Type keep_words(memory, group);
    using Keep = typename KeepWordsOrNot<Shape>::Type::Thread;
    // The products read the tile's statistics, so it must be described before they are issued.
    constexpr bool kAdds = Shape::kAddsOffsets || Shape::kAddsDeltas;
    bool first = true, last;
    uint32_t last_stage = 0;
    WaitBarrier(shared + Shape::kKFull, 0);
#pragma unroll 1
    do {
      WaitBarrier(shared + Shape::kQFull + 8 * at.stage, at.phase);
      if constexpr (kAdds) WaitBarrier(shared + Shape::kTileFull + 8 * at.stage, at.phase);
      if (group == 1) SyncThreads<Shape::kGroups * 128>(Shape::kScoresTurn);
      Plain::template IssueScores<Shape::kAddsOffsets>(scores, operands.k_rows,
                                                       operands.q_rows + at.stage * kStageStep,
                                                       shared, at.stage, Addend::kOffset);
      if (!first) boxes.Announce();
      WaitProducts<1>();  // the last tile's dK
      if (first) {
        WaitBarrier(shared + Shape::kVFull, 0);
        first = false;
      } else {
        Plain::Release(shared + Shape::kDoutEmpty + 8 * last_stage);
        Plain::Release(shared + Shape::kQEmpty + 8 * last_stage);
      }
      WaitBarrier(shared + Shape::kDoutFull + 8 * at.stage, at.phase);
      Plain::template IssueScores<Shape::kAddsDeltas>(gradients, operands.v_rows,
                                                      operands.dout_rows + at.stage * kStageStep,
                                                      shared, at.stage, Addend::kDelta);
      if (group == 0) ArriveThreads<Shape::kGroups * 128>(Shape::kScoresTurn);
      if constexpr (!kAdds) WaitBarrier(shared + Shape::kTileFull + 8 * at.stage, at.phase);
      const TermQueryTile& tile = tiles[at.stage];
      last = tile.flags & QueryTile::kLast;
      const float* const tile_statistics = statistics + at.stage * Shape::kStatistics;
      const int32_t* const tile_ids =
          reinterpret_cast<const int32_t*>(memory + Shape::kIds + at.stage * Shape::kIdBytes);
      TermBits mask;
      Rules::LoadMask(mask, tile, keys);
      Keep keep;
      if constexpr (Shape::kDrops && !Shape::kKeepWords) {
        if (Shape::Drops(params.terms)) Rules::KeepPairs(keep.bits, params, tile, keys);
      }
      WaitProducts<1>();
      PinRegisters(scores);
      bool written = false;
      if constexpr (Shape::kKeepWords) {
        written = keep_words.ByCalls(params, tile) && Rules::AreNarrow(params, tile);
        if (written) {
          keep_words.WriteBeside(
              params, tile, at.stage, common.scale_log2,
              [&](int n, float factor) { Rules::Exponential(scores, tile_statistics, n, factor); });
          Rules::Hide(scores, mask, params, tile, keys, tile_ids);
        }
      }
      if (!written) {
        Rules::Exponentials(scores, mask, tile_statistics, params, tile, keys, tile_ids, bias);
        if constexpr (Shape::kKeepWords) keep_words.Write(params, tile, at.stage);
      }
      if constexpr (Shape::kKeepWords) keep_words.Await();
      PinRegisters(scores);  // otherwise the exponentials would move below the wait
      WaitProducts<0>();
      PinRegisters(gradients);
      Plain::Rules::SubtractSteep(gradients, tile_statistics, tile.flags);
      Rules::ClearHidden(scores, gradients, tile);
      if constexpr (Shape::kKeepWords) keep_words.Read(at.stage, keep);
      Rules::Differentiate(scores, gradients, p, ds, keep, tile_statistics, tile, params.terms);
      Plain::StoreGradients(ds, gradient_target + at.stage * Shape::kScoreBytes);
      Plain::IssueSum(dv, p, operands.dout_columns + at.stage * kStageStep);
      FenceBulkReads();
      SyncThreads<Shape::kGroups * 128>(Shape::kGradientsReady);
      // All threads have read the statistics.
      if (kAllArrive || threadIdx.x == 128) Arrive(shared + Shape::kTileEmpty + 8 * at.stage);
      Plain::IssueDq(dq, operands.ds_rows + DescriptorBytes(at.stage * Shape::kScoreBytes),
                     operands.k_columns);
      Plain::IssueSum(dk, ds, operands.q_columns + at.stage * kStageStep);
      last_stage = at.stage;
      at.Advance();
      WaitProducts<1>();
      PinRegisters(dq);
      boxes.Write(dq, 0, common.softmax_scale, boxes.dq);
    } while (!last);
    boxes.Announce();
    WaitProducts<0>();
    PinRegisters(dk);
    PinRegisters(dv);
    float of_dv = Shape::kUnshift;
    if constexpr (Shape::kDrops) {
      if (Shape::Drops(params.terms)) of_dv *= params.terms.keep_scale;
    }
    using Stored = StoredSums<Shape>;
    if constexpr (Stored::kPossible) {
      if (Stored::Asked(item)) {
        Stored::Store(common, item, item.tile->dv, common.head_dim_v, keys.Key(0), dv, of_dv);
        Stored::Store(common, item, item.tile->dk, common.head_dim, keys.Key(0), dk,
                      common.softmax_scale);
        return;
      }
    }
#pragma unroll
    for (int part = 0; part < Shape::kPanels; ++part) {
      boxes.Put(dv, part * 32, of_dv, boxes.sums);
    }
#pragma unroll
    for (int part = 0; part < Shape::kPanels; ++part) {
      boxes.Put(dk, part * 32, common.softmax_scale, boxes.sums);
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_BACKWARD_CONSUMER_CUH_
