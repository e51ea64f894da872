// A consumer warpgroup of a forward with score terms. It differs from forward_consumer.cuh in the
// computation on scores (terms_forward_scores.cuh) and on probabilities.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_FORWARD_CONSUMER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_FORWARD_CONSUMER_CUH_

#include "worker/kernels/cuda/sm90/forward/forward_consumer.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_bias.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_forward_alibi.cuh"
#include "worker/kernels/cuda/sm90/terms/terms_forward_scores.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct TermForwardConsumer {
  using Plain = ForwardConsumer<Shape>;
  using Rules = TermForwardScores<Shape>;
  using T = typename Shape::T;
  static constexpr int kDim = Shape::kDim;

  // `group` is the index of the consumer warpgroup, the same in all threads of the warp.
  static __device__ __forceinline__ void Run(const TermForwardKernelParams& params, char* memory,
                                             uint32_t shared, int group) {
    const CommonParams& common = params.forward.common;
    const TermParams& terms = params.terms;
    const int lane = threadIdx.x & 31;
    const int row = group * 64 + (threadIdx.x & 127) / 32 * 16 + lane / 4;
    const int column = lane % 4 * 2;
    const int pack = params.forward.head_pack;
    const int packed_rows = row / pack | (row + 8) / pack << 16;  // in one register

    const uint32_t q = RowDescriptor(shared + Shape::kQ + group * 64 * kPanelRowBytes);
    const uint32_t k_stages = RowDescriptor(shared + Shape::kK);
    const uint32_t v_stages = ColumnDescriptor(shared + Shape::kV, Shape::kKvPanelBytes);
    constexpr uint32_t kStageStep = DescriptorBytes(Shape::kKvBytes);
    const WorkSlot* slots = reinterpret_cast<const WorkSlot*>(memory + Shape::kSlots);
    const TermKeyTile* tiles = reinterpret_cast<const TermKeyTile*>(memory + Shape::kTermTiles);
    RingPosition<Shape::kStages> k, v;
    typename BiasOrNot<Shape, ForwardBias>::Type bias(shared, group);
    // A stage is free once all lanes of all warps have finished reading it.
    const auto release = [lane](uint32_t barrier) { ArriveWarp(barrier, lane); };
    if (group == Shape::kGroups - 1) Plain::PassTurn(group);

    typename Plain::Output output;
    typename Plain::Scores scores;
    typename Plain::Probabilities p;
    RowStates rows;
    const TermRows own = {reinterpret_cast<TermRow*>(memory + Shape::kRowTerms) + row};
    typename AlibiOrNot<Shape>::Type alibi(shared);
#pragma unroll 1
    for (uint32_t round = 0;; ++round) {
      WaitBarrier(shared + Shape::kQFull, round & 1);
      const WorkSlot& slot = slots[round & 1];
      if (slot.valid == 0) break;
      float factor[2];
      bool last;
      bool transforms;
      float multiplier, headroom;
      int flags;
      uint32_t words[2];
      uint32_t keep[2] = {};  // dropout's bits
      typename Rules::KeptTile kept;
      // Work that does not depend on the scores runs during their products.
      const auto look_ahead = [&] {
        const TermKeyTile& tile = tiles[k.stage];
        flags = tile.flags;
        if (Shape::kPairsAlone && (flags & TermKeyTile::kIds)) own.LoadIds(params, slot, row);
        if (flags & TermKeyTile::kMaskWords) {
          const uint32_t* const pair = reinterpret_cast<const uint32_t*>(
              memory + Shape::kWords + k.stage * Shape::kWordBytes);
          words[0] = pair[row * 4 + lane % 4];
          words[1] = pair[(row + 8) * 4 + lane % 4];
        }
        if constexpr (Shape::kDropsAlways) {
          kept = Rules::KeptTileOf(params, own, tiles[k.stage], column);
        } else if constexpr (Shape::kDrops) {
          if (!Shape::Drops(terms)) return;
          Rules::KeepPairs(keep, params, own, Rules::KeyOf(params, tiles[k.stage], column));
          PinRegisters(keep);  // otherwise all of it would move below the wait
        }
      };
      // Waits for the stage's scores. The stage is free afterwards, and after the last one also q.
      const auto finish_scores = [&] {
        if constexpr (Shape::kAlibi) {
          alibi.Apply(scores, tiles[k.stage], packed_rows, column, params.stride);
        }
        Rules::Apply(
            scores, params, tiles[k.stage], flags, own, column, words,
            reinterpret_cast<const int32_t*>(memory + Shape::kIds + k.stage * Shape::kIdBytes),
            bias, transforms);
        last = flags & KeyTile::kLast;
        release(shared + Shape::kKEmpty + 8 * k.stage);
        if (last) release(shared + Shape::kQEmpty);
        k.Advance();
      };
      const auto settle = [&] {
        if constexpr (Shape::kAlibi) {
          return SettleShifted(scores, multiplier, rows, alibi.shift, factor);
        } else if constexpr (Shape::kPairsAlone) {
          return SettleByBits<true>(scores, multiplier, kOffsetHeadroom, rows, factor);
        } else if constexpr (!Shape::kBiased && Shape::kDim <= 64) {
          return SettleByBits(scores, multiplier, kOffsetHeadroom, rows, factor);
        } else {
          return Settle(scores, multiplier, headroom, rows, factor);
        }
      };
      const auto drop = [&] {
        if constexpr (Shape::kDrops) {
          if (Shape::Drops(terms)) Rules::Drop(scores, keep);
        }
      };
      // With kDropsAlways all of it runs after the last product, because it needs that product's
      // registers.
      const auto early = [&] {
        if constexpr (Shape::kDropsAlways) return;
        Exponentials(scores, multiplier, rows);
        drop();
      };
      const auto probabilities = [&] {
        if constexpr (Shape::kDropsAlways) {
          Rules::KeptProbabilities(scores, multiplier, rows, p, params, own, kept);
        } else {
          PackProbabilities<T>(scores, p);
        }
      };

      const auto place = [&] {
        if constexpr (Shape::kAlibi) {
          alibi.Place(reinterpret_cast<const AlibiKeyTile*>(memory + Shape::kAlibiTiles)[k.stage],
                      packed_rows);
        }
      };
      const auto issue_scores = [&] {
        Plain::MultiplyKeys(scores, q, k_stages + k.stage * kStageStep);
        if constexpr (Shape::kAlibi) alibi.Multiply(scores);
        CommitProducts();
      };

      WaitBarrier(shared + Shape::kKFull + 8 * k.stage, k.phase);
      if constexpr (Shape::kAlibi) {
        float slopes[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          slopes[half] =
              SlopeOf(params, slot, tiles[k.stage], HeadOf(params, slot, row + half * 8));
        }
        alibi.Begin(params, slopes);
      }
      place();
      issue_scores();
      own.template Load<Shape::kDrops, !Shape::kPairsAlone>(params, slot, row, tiles[k.stage]);
      transforms = Rules::Transforms(params);
      multiplier = transforms ? kLog2E : common.scale_log2;
      headroom = kOffsetHeadroom / multiplier;
      look_ahead();
      rows.Reset();
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) output[i] = 0.0f;
      WaitProducts<0>();
      PinRegisters(scores);
      finish_scores();
      settle();
      if constexpr (Shape::kAlibi) {
        ShiftedExponentials<Shape::kKeys / 2> exponentials;
        exponentials.Begin(scores, multiplier, alibi.shift, rows);
        exponentials.Finish(scores, rows);
      } else {
        early();
      }
      probabilities();

#pragma unroll 1
      while (!last) {
        WaitBarrier(shared + Shape::kKFull + 8 * k.stage, k.phase);
        place();
        Plain::AwaitTurn(group);
        issue_scores();
        WaitBarrier(shared + Shape::kVFull + 8 * v.stage, v.phase);
        Plain::IssueValues(output, p, v_stages + v.stage * kStageStep);
        Plain::PassTurn(group);
        look_ahead();
        WaitProducts<1>();
        PinRegisters(scores);
        finish_scores();
        const auto finish_values = [&] {
          WaitProducts<0>();
          PinRegisters(output);
          release(shared + Shape::kVEmpty + 8 * v.stage);
          v.Advance();
        };
        if constexpr (Shape::kAlibi) {
          const TileEffect tile = settle();
          ShiftedExponentials<Shape::kKeys / 2> exponentials;
          if (!tile.nothing) exponentials.Begin(scores, multiplier, alibi.shift, rows);
          finish_values();
          if (tile.nothing) {
#pragma unroll
            for (int i = 0; i < Shape::kKeys / 4; ++i) asm volatile("mov.b32 %0, 0;" : "=r"(p[i]));
          } else {
            exponentials.Finish(scores, rows);
            probabilities();
          }
          if (tile.moved) Rescale(output, factor);
        } else {
          const bool moved = settle();
          early();
          PinRegisters(scores);  // otherwise the exponentials would move below the wait
          finish_values();
          probabilities();
          if (moved) Rescale(output, factor);
        }
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

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_FORWARD_CONSUMER_CUH_
