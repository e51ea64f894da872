// A consumer warpgroup of a forward with score terms: forward_consumer.cuh, but for what happens to
// scores (terms_forward_scores.cuh) and to probabilities.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_FORWARD_CONSUMER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_FORWARD_CONSUMER_CUH_

#include "worker/kernels/cuda/sm90/forward_consumer.cuh"
#include "worker/kernels/cuda/sm90/terms_bias.cuh"
#include "worker/kernels/cuda/sm90/terms_forward_alibi.cuh"
#include "worker/kernels/cuda/sm90/terms_forward_scores.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct TermForwardConsumer {
  using Plain = ForwardConsumer<Shape>;
  using Rules = TermForwardScores<Shape>;
  using T = typename Shape::T;
  static constexpr int kDim = Shape::kDim;

  // `group` counts consumer warpgroups and is the same in all threads of the warp.
  static __device__ __forceinline__ void Run(const TermForwardKernelParams& params, char* memory,
                                             uint32_t shared, int group) {
    const CommonParams& common = params.forward.common;
    const TermParams& terms = params.terms;
    const int lane = threadIdx.x & 31;
    const int row = group * 64 + (threadIdx.x & 127) / 32 * 16 + lane / 4;
    const int column = lane % 4 * 2;
    const bool alibi_alone = terms.slopes != nullptr && Rules::AlibiAlone(params);

    const uint32_t q = RowDescriptor(shared + Shape::kQ + group * 64 * kPanelRowBytes);
    const uint32_t k_stages = RowDescriptor(shared + Shape::kK);
    const uint32_t v_stages = ColumnDescriptor(shared + Shape::kV, Shape::kKvPanelBytes);
    constexpr uint32_t kStageStep = DescriptorBytes(Shape::kKvBytes);
    const WorkSlot* slots = reinterpret_cast<const WorkSlot*>(memory + Shape::kSlots);
    const TermKeyTile* tiles = reinterpret_cast<const TermKeyTile*>(memory + Shape::kTermTiles);
    RingPosition<Shape::kStages> k, v;
    typename BiasOrNot<Shape, ForwardBias>::Type bias(shared, group);
    // A stage is free once all lanes of all warps have left it.
    const auto release = [lane](uint32_t barrier) {
      __syncwarp();
      if (lane == 0) Arrive(barrier);
    };
    if (group == Shape::kGroups - 1) Plain::PassTurn(group);

    typename Plain::Output output;
    typename Plain::Scores scores;
    typename Plain::Probabilities p;
    RowStates rows;
    const TermRows own = {reinterpret_cast<TermRow*>(memory + Shape::kRowTerms) + row};
#pragma unroll 1
    for (uint32_t round = 0;; ++round) {
      WaitBarrier(shared + Shape::kQFull, round & 1);
      const WorkSlot& slot = slots[round & 1];
      if (slot.valid == 0) break;
      float factor[2];
      bool last;
      AlibiPositions<Shape> alibi;
      bool transforms;
      float multiplier, headroom;
      int flags;
      uint32_t words[2];
      uint32_t keep[2] = {};  // dropout's bits
      // What need not wait for the scores is done in their products' time.
      const auto look_ahead = [&] {
        const TermKeyTile& tile = tiles[k.stage];
        flags = tile.flags;
        if (alibi.serves) {
          const int q_rows[2] = {own.Of(0).q_row, own.Of(1).q_row};
          alibi.Place(tile, flags, q_rows, column);
        }
        if (flags & TermKeyTile::kMaskWords) {
          const uint32_t* const pair = reinterpret_cast<const uint32_t*>(
              memory + Shape::kWords + k.stage * Shape::kWordBytes);
          words[0] = pair[row * 4 + lane % 4];
          words[1] = pair[(row + 8) * 4 + lane % 4];
        }
        if constexpr (Shape::kDrops) {
          if (!Shape::Drops(terms)) return;
          Rules::KeepPairs(keep, params, own, Rules::KeyOf(params, tiles[k.stage], column));
          PinRegisters(keep);  // or all of it would sink below the wait
        }
      };
      // Its scores have arrived: it is free afterwards, and after the last one q is.
      const auto finish_scores = [&] {
        if (alibi.serves) alibi.Apply(scores, flags);
        Rules::Apply(
            scores, params, tiles[k.stage], flags, own, column, words,
            reinterpret_cast<const int32_t*>(memory + Shape::kIds + k.stage * Shape::kIdBytes),
            bias, transforms);
        last = flags & KeyTile::kLast;
        release(shared + Shape::kKEmpty + 8 * k.stage);
        if (last) release(shared + Shape::kQEmpty);
        k.Advance();
      };
      const auto drop = [&] {
        if constexpr (Shape::kDrops) {
          if (Shape::Drops(terms)) Rules::Drop(scores, keep);
        }
      };

      WaitBarrier(shared + Shape::kKFull + 8 * k.stage, k.phase);
      Plain::IssueScores(scores, q, k_stages + k.stage * kStageStep);
      own.template Load<Shape::kDrops>(params, slot, row, tiles[k.stage]);
      // By way of no thread's row, so that what follows from it branches for whole warps.
      const float slope =
          terms.slopes == nullptr ? 0.0f : SlopeOf(params, slot, tiles[k.stage], slot.first_head);
      alibi.Begin(params, alibi_alone, slope);
      transforms = !alibi.serves && Rules::Transforms(params);
      multiplier = alibi.serves ? slope * kLog2E : transforms ? kLog2E : common.scale_log2;
      headroom = kOffsetHeadroom / multiplier;
      look_ahead();
      rows.Reset();
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) output[i] = 0.0f;
      WaitProducts<0>();
      PinRegisters(scores);
      finish_scores();
      SettleShifted(scores, multiplier, headroom, rows, alibi.shift, factor);
      ExponentialsShifted(scores, multiplier, alibi.shift, rows);
      drop();
      PackProbabilities<T>(scores, p);

#pragma unroll 1
      while (!last) {
        WaitBarrier(shared + Shape::kKFull + 8 * k.stage, k.phase);
        Plain::AwaitTurn(group);
        Plain::IssueScores(scores, q, k_stages + k.stage * kStageStep);
        WaitBarrier(shared + Shape::kVFull + 8 * v.stage, v.phase);
        Plain::IssueValues(output, p, v_stages + v.stage * kStageStep);
        Plain::PassTurn(group);
        look_ahead();
        WaitProducts<1>();
        PinRegisters(scores);
        finish_scores();
        const bool moved = SettleShifted(scores, multiplier, headroom, rows, alibi.shift, factor);
        ExponentialsShifted(scores, multiplier, alibi.shift, rows);
        drop();
        PinRegisters(scores);  // or the exponentials would sink below the wait
        WaitProducts<0>();
        PinRegisters(output);
        release(shared + Shape::kVEmpty + 8 * v.stage);
        v.Advance();
        PackProbabilities<T>(scores, p);
        if (moved) Rescale(output, factor);
      }
      WaitBarrier(shared + Shape::kVFull + 8 * v.stage, v.phase);
      Plain::IssueValues(output, p, v_stages + v.stage * kStageStep);
      WaitProducts<0>();
      PinRegisters(output);
      release(shared + Shape::kVEmpty + 8 * v.stage);
      v.Advance();
      rows.OffsetsToBases(multiplier);
      if constexpr (Shape::kDrops) {
        if (Shape::Drops(terms)) {
          const float kept[2] = {terms.keep_scale, terms.keep_scale};
          Rescale(output, kept);
        }
      }
      ForwardEpilogue<T, kDim>::Store(params.forward, slots[round & 1], row, output, rows);
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_FORWARD_CONSUMER_CUH_
