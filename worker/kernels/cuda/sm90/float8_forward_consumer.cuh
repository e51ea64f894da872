// A consumer warpgroup of the forward in e4m3: as forward_consumer.cuh, but
//  - scores are products of rounded q and k: the powers of two that they were divided by multiply
//    the softmax's scale, and v's the finished rows;
//  - p is relative to the row's largest score so far times 2^8, so that it fills e4m3's range: the
//    offset moves with every larger score, and what moves it costs nothing, as
//  - tensor cores add e4m3's products with 13 fraction bits. Sums of more than one tile of keys are
//    therefore fp32 in ordinary code: each tile's product begins at 0, and enters the output by one
//    multiply-add that also rescales it. (Scores, sums of at most 128 columns, are not split.)
//
// Order. A tile's product P(j - 1) V(j - 1) is relative to the offsets that softmax(j - 1) left,
// and the output to those before it: `factor` keeps what lies between until the product is there.
// Registers that a product writes (scores, tile) are touched only between the wait for its batch,
// pinned, and the fence before the next; p, which the second product reads, is packed anew behind
// WaitProducts<0> alone. Stages are released by all warps behind the wait for the last product
// that reads them; the barriers' own release and acquire order the copy engine's next write.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FORWARD_CONSUMER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FORWARD_CONSUMER_CUH_

#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/float8_forward_params.h"
#include "worker/kernels/cuda/sm90/float8_wgmma.cuh"
#include "worker/kernels/cuda/sm90/forward_consumer.cuh"

namespace ringattn::worker::cuda::sm90 {

inline constexpr float kFloat8Offset = 8.0f;  // log2

// Exponentials() of forward_softmax.cuh, times 2^8.
template <int kCount>
__device__ __forceinline__ void Float8Exponentials(float (&scores)[kCount], float multiplier,
                                                   RowStates& rows) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float offset = kFloat8Offset - rows.offset[half];
    float x = 0.0f, y = 0.0f;
#pragma unroll
    for (int n = 0; n < kCount / 4; ++n) {
      float& a = scores[n * 4 + half * 2];
      float& b = scores[n * 4 + half * 2 + 1];
      a = Exp2(fmaf(a, multiplier, offset));
      b = Exp2(fmaf(b, multiplier, offset));
      x += a;
      y += b;
    }
    rows.sum[half] += x + y;
  }
}

template <typename Shape>
struct Float8ForwardConsumer {
  using T = typename Shape::T;
  using Base = ForwardConsumer<Shape>;
  static_assert(Shape::kDim == 128 && Shape::kKeys == 128 && Shape::kPanels == 1);
  using Accumulators = float[64];
  using Probabilities = uint32_t[16];

  static __device__ __forceinline__ void IssueScores(Accumulators& scores, uint32_t q, uint32_t k) {
    ProductFence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      MultiplyFloat8Shared(scores, q + DescriptorBytes(step * 32), k + DescriptorBytes(step * 32),
                           step > 0);
    }
    CommitProducts();
  }

  static __device__ __forceinline__ void IssueValues(Accumulators& tile, const Probabilities& p,
                                                     uint32_t v) {
    ProductFence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      MultiplyFloat8Registers(tile, p + step * 4, v + DescriptorBytes(step * 32), step > 0);
    }
    CommitProducts();
  }

  static __device__ __forceinline__ void AddTile(Accumulators& output, const Accumulators& tile,
                                                 const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) output[i] = fmaf(output[i], factor[i / 2 % 2], tile[i]);
  }

  // The exponents of an item: of q times k, and of v.
  struct Exponents {
    int product, values;
  };
  static __device__ __forceinline__ Exponents ExponentsOf(const Float8ForwardParams& params,
                                                          int first_head, int batch) {
    const CommonParams& common = params.forward.forward.common;
    const int per_kind = common.batch * common.num_kv_heads;
    const uint32_t* const largest =
        params.largest + batch * common.num_kv_heads + first_head / common.group_size;
    return {Float8Exponent(largest[0]) + Float8Exponent(largest[per_kind]),
            Float8Exponent(largest[2 * per_kind])};
  }

  static __device__ __forceinline__ void Run(const Float8ForwardParams& params, char* memory,
                                             uint32_t shared, int group) {
    const ForwardParams& forward = params.forward.forward;
    const CommonParams& common = forward.common;
    const int lane = threadIdx.x & 31;
    const int row = group * 64 + (threadIdx.x & 127) / 32 * 16 + lane / 4;
    const int pack = forward.head_pack;
    const int packed_rows = row / pack | (row + 8) / pack << 16;  // in one register
    const bool transform = common.softcap > 0.0f || common.scale_log2 <= 0.0f;
    const Float8Fragments fragments(lane);
    const uint32_t q = RowDescriptor(shared + Shape::kQ + group * 64 * kPanelRowBytes);
    const uint32_t k_stages = RowDescriptor(shared + Shape::kK);
    const uint32_t v_stages = RowDescriptor(shared + Shape::kV);
    constexpr uint32_t kStageStep = DescriptorBytes(Shape::kKvBytes);
    const WorkSlot* slots = reinterpret_cast<const WorkSlot*>(memory + Shape::kSlots);
    const KeyTile* key_tiles = reinterpret_cast<const KeyTile*>(memory + Shape::kKeyTiles);
    RingPosition<Shape::kStages> k, v;
    const auto release = [lane](uint32_t barrier) {
      __syncwarp();
      if (lane == 0) Arrive(barrier);
    };
    if (group == Shape::kGroups - 1) Base::PassTurn(group);

    Accumulators output, tile_output, scores;
    Probabilities p;
    RowStates rows;
#pragma unroll 1
    for (uint32_t round = 0;; ++round) {
      WaitBarrier(shared + Shape::kQFull, round & 1);
      int valid = 0, first_head = 0, batch = 0;
      if (lane == 0) {
        valid = slots[round & 1].valid;
        first_head = slots[round & 1].first_head;
        batch = slots[round & 1].batch;
      }
      if (!__shfl_sync(0xffffffff, valid, 0)) break;
      const Exponents exponents = ExponentsOf(params, __shfl_sync(0xffffffff, first_head, 0),
                                              __shfl_sync(0xffffffff, batch, 0));
      const float multiplier = transform ? 1.0f : ldexpf(common.scale_log2, exponents.product);
      float factor[2];
      bool last;
      KeyTile tile;
      const auto read_tile = [&] {
        tile = {};
        if (lane == 0) tile = key_tiles[k.stage];
        tile.flags = __shfl_sync(0xffffffff, tile.flags, 0);
      };
      const auto finish_scores = [&] {
        if (transform) {
#pragma unroll
          for (int i = 0; i < 64; ++i) scores[i] = ldexpf(scores[i], exponents.product);
          TransformScores(scores, common);
        }
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
      for (int i = 0; i < 64; ++i) output[i] = 0.0f;
      WaitProducts<0>();
      PinRegisters(scores);
      finish_scores();
      Settle(scores, multiplier, /*headroom=*/0.0f, rows, factor);
      Float8Exponentials(scores, multiplier, rows);
      fragments.Pack(scores, p);

#pragma unroll 1
      while (!last) {
        WaitBarrier(shared + Shape::kKFull + 8 * k.stage, k.phase);
        Base::AwaitTurn(group);
        IssueScores(scores, q, k_stages + k.stage * kStageStep);
        WaitBarrier(shared + Shape::kVFull + 8 * v.stage, v.phase);
        IssueValues(tile_output, p, v_stages + v.stage * kStageStep);
        Base::PassTurn(group);
        read_tile();
        WaitProducts<1>();
        PinRegisters(scores);
        finish_scores();
        const float before[2] = {factor[0], factor[1]};
        Settle(scores, multiplier, /*headroom=*/0.0f, rows, factor);
        Float8Exponentials(scores, multiplier, rows);
        PinRegisters(scores);  // or the exponentials would sink below the wait
        WaitProducts<0>();
        PinRegisters(tile_output);
        release(shared + Shape::kVEmpty + 8 * v.stage);
        v.Advance();
        AddTile(output, tile_output, before);
        fragments.Pack(scores, p);
      }
      WaitBarrier(shared + Shape::kVFull + 8 * v.stage, v.phase);
      IssueValues(tile_output, p, v_stages + v.stage * kStageStep);
      WaitProducts<0>();
      PinRegisters(tile_output);
      release(shared + Shape::kVEmpty + 8 * v.stage);
      v.Advance();
      AddTile(output, tile_output, factor);
      const float values = PowerOfTwo(exponents.values);
#pragma unroll
      for (int i = 0; i < 64; ++i) output[i] *= values;
      rows.OffsetsToBases(multiplier);
      rows.offset[0] -= kFloat8Offset;
      rows.offset[1] -= kFloat8Offset;
      const WorkSlot slot = slots[round & 1].Broadcast();
      ForwardEpilogue<T, 128>::Store(forward, slot, row, output, rows);
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FORWARD_CONSUMER_CUH_
