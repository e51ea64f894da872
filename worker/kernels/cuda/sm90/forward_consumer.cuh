// A consumer warpgroup: 64 q rows of every item against all its key tiles.
//
// Steady state of one group, for key tile j: the product S(j) = q K(j)^T is issued, then
// output += P(j - 1) V(j - 1) behind it; while the tensor cores are busy with the second,
// softmax(j) runs on the first. With turns, the groups issue their pair of products one
// after another, so that a group's softmax also runs under the other's products. (Issuing the
// next item's first scores before the epilogue was tried: ptxas then serialises all products,
// C7514, at two thirds of the speed.)
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_CONSUMER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_CONSUMER_CUH_

#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/forward_epilogue.cuh"
#include "worker/kernels/cuda/sm90/forward_shape.cuh"
#include "worker/kernels/cuda/sm90/forward_softmax.cuh"
#include "worker/kernels/cuda/sm90/pipeline.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct ForwardConsumer {
  using T = typename Shape::T;
  static constexpr int kDim = Shape::kDim;
  static constexpr int kKeys = Shape::kKeys;
  using Output = float[kDim / 2];
  using Scores = float[kKeys / 2];
  using Probabilities = uint32_t[kKeys / 4];

  // Issues scores = q K^T, from the operands' descriptors.
  static __device__ __forceinline__ void IssueScores(Scores& scores, uint32_t q, uint32_t k) {
    ProductFence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const int panel = step / 4;
      const int within = step % 4 * 32;
      MultiplyShared<T>(scores, q + DescriptorBytes(panel * Shape::kQPanelBytes + within),
                        k + DescriptorBytes(panel * Shape::kKvPanelBytes + within), step > 0);
    }
    CommitProducts();
  }

  // Issues output += P V.
  static __device__ __forceinline__ void IssueValues(Output& output, const Probabilities& p,
                                                     uint32_t v) {
    ProductFence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      MultiplyRegisters<T>(output, p + step * 4, v + DescriptorBytes(step * 16 * kPanelRowBytes),
                           1);
    }
    CommitProducts();
  }

  // Named barrier 1 + g is group g's turn.
  static __device__ __forceinline__ void AwaitTurn(int group) {
    if constexpr (Shape::kTakeTurns) SyncThreads<256>(1 + group);
  }
  static __device__ __forceinline__ void PassTurn(int group) {
    if constexpr (Shape::kTakeTurns) {
      ArriveThreads<256>(1 + (group + 1 == Shape::kGroups ? 0 : group + 1));
    }
  }

  // `group` counts consumer warpgroups and is the same in all threads of the warp.
  static __device__ __forceinline__ void Run(const ForwardKernelParams& params, char* memory,
                                             uint32_t shared, int group) {
    const CommonParams& common = params.forward.common;
    const int lane = threadIdx.x & 31;
    const int row = group * 64 + (threadIdx.x & 127) / 32 * 16 + lane / 4;
    const int pack = params.forward.head_pack;
    const int packed_rows = row / pack | (row + 8) / pack << 16;  // in one register
    const bool transform = common.softcap > 0.0f || common.scale_log2 <= 0.0f;
    const float multiplier = transform ? 1.0f : common.scale_log2;
    const float headroom = kOffsetHeadroom / multiplier;
    const uint32_t q = RowDescriptor(shared + Shape::kQ + group * 64 * kPanelRowBytes);
    const uint32_t k_stages = RowDescriptor(shared + Shape::kK);
    const uint32_t v_stages = ColumnDescriptor(shared + Shape::kV, Shape::kKvPanelBytes);
    constexpr uint32_t kStageStep = DescriptorBytes(Shape::kKvBytes);
    const WorkSlot* slots = reinterpret_cast<const WorkSlot*>(memory + Shape::kSlots);
    const KeyTile* key_tiles = reinterpret_cast<const KeyTile*>(memory + Shape::kKeyTiles);
    RingPosition<Shape::kStages> k, v;
    // A stage is free once all lanes of all warps have left it.
    const auto release = [lane](uint32_t barrier) {
      __syncwarp();
      if (lane == 0) Arrive(barrier);
    };
    if (group == Shape::kGroups - 1) PassTurn(group);

    Output output;
    Scores scores;
    Probabilities p;
    RowStates rows;
#pragma unroll 1
    for (uint32_t round = 0;; ++round) {
      WaitBarrier(shared + Shape::kQFull, round & 1);
      int valid = 0;
      if (lane == 0) valid = slots[round & 1].valid;
      if (!__shfl_sync(0xffffffff, valid, 0)) break;
      float factor[2];
      bool last;
      // What the current stage of K holds; asked for while its product runs.
      KeyTile tile;
      const auto read_tile = [&] {
        tile = {};
        if (lane == 0) tile = key_tiles[k.stage];
        tile.flags = __shfl_sync(0xffffffff, tile.flags, 0);
      };
      // Its scores have arrived: it is free afterwards, and after the last one q is.
      const auto finish_scores = [&] {
        if (transform) TransformScores(scores, common);
        if (tile.flags & KeyTile::kMasked) {
          const int q_rows[2] = {packed_rows & 0xffff, packed_rows >> 16};
          MaskScores(scores, tile, q_rows, lane % 4 * 2);
        }
        last = tile.flags & KeyTile::kLast;
        release(shared + Shape::kKEmpty + 8 * k.stage);
        if (last) release(shared + Shape::kQEmpty);
        k.Advance();
      };

      WaitBarrier(shared + Shape::kKFull + 8 * k.stage, k.phase);
      IssueScores(scores, q, k_stages + k.stage * kStageStep);
      read_tile();
      rows.Reset();
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) output[i] = 0.0f;
      WaitProducts<0>();
      PinRegisters(scores);
      finish_scores();
      Settle(scores, multiplier, headroom, rows, factor);
      Exponentials(scores, multiplier, rows);
      PackProbabilities<T>(scores, p);

#pragma unroll 1
      while (!last) {
        WaitBarrier(shared + Shape::kKFull + 8 * k.stage, k.phase);
        AwaitTurn(group);
        IssueScores(scores, q, k_stages + k.stage * kStageStep);
        WaitBarrier(shared + Shape::kVFull + 8 * v.stage, v.phase);
        IssueValues(output, p, v_stages + v.stage * kStageStep);
        PassTurn(group);
        read_tile();
        WaitProducts<1>();
        PinRegisters(scores);
        finish_scores();
        const bool moved = Settle(scores, multiplier, headroom, rows, factor);
        Exponentials(scores, multiplier, rows);
        PinRegisters(scores);  // or the exponentials would sink below the wait
        WaitProducts<0>();
        PinRegisters(output);
        release(shared + Shape::kVEmpty + 8 * v.stage);
        v.Advance();
        PackProbabilities<T>(scores, p);
        if (moved) Rescale(output, factor);
      }
      WaitBarrier(shared + Shape::kVFull + 8 * v.stage, v.phase);
      IssueValues(output, p, v_stages + v.stage * kStageStep);
      WaitProducts<0>();
      PinRegisters(output);
      release(shared + Shape::kVEmpty + 8 * v.stage);
      v.Advance();
      rows.OffsetsToBases(multiplier);
      const WorkSlot slot = slots[round & 1].Broadcast();
      ForwardEpilogue<T, kDim>::Store(params.forward, slot, row, output, rows);
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_CONSUMER_CUH_
