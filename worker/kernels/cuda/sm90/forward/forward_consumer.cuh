// A consumer warpgroup: processes 64 q rows of every item with all its key tiles.
//
// Steady state of one group, for key tile j: the product S(j) = q K(j)^T is issued, followed by
// output += P(j - 1) V(j - 1). The group computes softmax(j) while the tensor cores work on the
// second product. With turns, the groups issue their pairs of products one after another, so that a
// group's softmax also runs during the other group's products. (Issuing the next item's first
// scores before the epilogue makes ptxas serialise all products, C7514, at two thirds of the
// speed.)
//
// The pipeline is the same for all operand types. Products contains the parts that depend on them:
// ForwardProducts below, and Float8ForwardProducts (float8_forward_products.cuh).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_CONSUMER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_CONSUMER_CUH_

#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_epilogue.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_shape.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_softmax.cuh"
#include "worker/kernels/cuda/sm90/primitives/pipeline.cuh"

namespace ringattn::worker::cuda::sm90 {

// Products of 16-bit operands: their fragments, and the scales of their scores and sums.
template <typename Shape>
struct ForwardProducts {
  using T = typename Shape::T;
  using Params = ForwardKernelParams;
  static constexpr int kDim = Shape::kDim;
  static constexpr int kKeys = Shape::kKeys;
  using Output = float[kDim / 2];
  using Scores = float[kKeys / 2];
  using Probabilities = uint32_t[kKeys / 4];
  // False: P is packed after the wait for the previous P V. True: before it, in separate registers.
  static constexpr bool kPackEarly = false;
  static constexpr uint32_t kUnusedBits = 0x80008000;  // of packed P, which is not negative
  static constexpr bool kScaled = false;               // scales by head; if true, Scales::Begin
                                                       // needs the head

  static __device__ __forceinline__ const ForwardKernelParams& KernelParams(const Params& params) {
    return params;
  }
  static __device__ __forceinline__ uint32_t ValuesDescriptor(uint32_t address) {
    return ColumnDescriptor(address, Shape::kKvPanelBytes);
  }

  // Issues scores = q K^T from the operands' descriptors, without ending the batch.
  static __device__ __forceinline__ void MultiplyKeys(Scores& scores, uint32_t q, uint32_t k) {
    ProductFence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const int panel = step / 4;
      const int within = step % 4 * 32;
      MultiplyShared<T>(scores, q + DescriptorBytes(panel * Shape::kQPanelBytes + within),
                        k + DescriptorBytes(panel * Shape::kKvPanelBytes + within), step > 0);
    }
  }
  static __device__ __forceinline__ void IssueScores(Scores& scores, uint32_t q, uint32_t k) {
    MultiplyKeys(scores, q, k);
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

  // The scales of scores and sums, the same for all tiles of an item. `transform`: scores are
  // converted before the softmax.
  struct Scales {
    float multiplier;
    static constexpr float kHeadroom = kOffsetHeadroom;

    __device__ __forceinline__ Scales(const Params& params, bool transform)
        : multiplier(transform ? 1.0f : params.forward.common.scale_log2) {}
    __device__ __forceinline__ void Begin(const Params&, bool, int, int) {}
    __device__ __forceinline__ void Transform(Scores& scores, const CommonParams& common) const {
      TransformScores(scores, common);
    }
    __device__ __forceinline__ void Probabilities(Scores& scores, RowStates& rows) const {
      Exponentials(scores, multiplier, rows);
    }
    // Call it when the item's sums are complete.
    __device__ __forceinline__ void Finish(Output&, RowStates& rows) const {
      rows.OffsetsToBases(multiplier);
    }
  };

  static __device__ __forceinline__ void Pack(const Scores& scores, Probabilities& p) {
    PackProbabilities<T>(scores, p);
  }

  // An item's output: products accumulate in place.
  struct Sums {
    Output output;

    __device__ __forceinline__ void Reset() {
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) output[i] = 0.0f;
    }
    __device__ __forceinline__ Output& target() { return output; }
    // Call it when the last product has arrived. The output before it must be multiplied by
    // `before`, and the sum by `now` if `moved`.
    __device__ __forceinline__ void Add(const float (&)[2], const float (&now)[2], bool moved) {
      if (moved) Rescale(output, now);
    }
    __device__ __forceinline__ void AddLast(const float (&)[2]) {}
  };
};

template <typename Shape, typename Products = ForwardProducts<Shape>>
struct ForwardConsumer : Products {
  // Group g waits for its turn at named barrier 1 + g.
  static __device__ __forceinline__ void AwaitTurn(int group) {
    if constexpr (Shape::kTakeTurns) SyncThreads<256>(1 + group);
  }
  static __device__ __forceinline__ void PassTurn(int group) {
    if constexpr (Shape::kTakeTurns) {
      ArriveThreads<256>(1 + (group + 1 == Shape::kGroups ? 0 : group + 1));
    }
  }

  static __device__ __forceinline__ uint32_t AnyOf(const typename Products::Probabilities& p) {
    uint32_t any = 0;
#pragma unroll
    for (unsigned i = 0; i < sizeof(p) / 4; ++i) any |= p[i];
    return any;
  }
  // Waits for the last product, P V into `target`, and releases its stage of V.
  template <typename Release>
  static __device__ __forceinline__ void AwaitProduct(typename Products::Output& target,
                                                      uint32_t empty,
                                                      RingPosition<Shape::kStages>& v,
                                                      const Release& release) {
    WaitProducts<0>();
    PinRegisters(target);
    release(empty + 8 * v.stage);
    v.Advance();
  }

  // `group` is the index of the consumer warpgroup, the same in all threads of the warp.
  static __device__ __forceinline__ void Run(const typename Products::Params& given, char* memory,
                                             uint32_t shared, int group) {
    const ForwardKernelParams& params = Products::KernelParams(given);
    const CommonParams& common = params.forward.common;
    const int lane = threadIdx.x & 31;
    const int row = group * 64 + (threadIdx.x & 127) / 32 * 16 + lane / 4;
    const int pack = params.forward.head_pack;
    const int packed_rows = row / pack | (row + 8) / pack << 16;  // in one register
    const bool transform = common.softcap > 0.0f || common.scale_log2 <= 0.0f;
    typename Products::Scales scales(given, transform);
    const uint32_t q = RowDescriptor(shared + Shape::kQ + group * 64 * kPanelRowBytes);
    const uint32_t k_stages = RowDescriptor(shared + Shape::kK);
    const uint32_t v_stages = Products::ValuesDescriptor(shared + Shape::kV);
    constexpr uint32_t kStageStep = DescriptorBytes(Shape::kKvBytes);
    const WorkSlot* slots = reinterpret_cast<const WorkSlot*>(memory + Shape::kSlots);
    const KeyTile* key_tiles = reinterpret_cast<const KeyTile*>(memory + Shape::kKeyTiles);
    RingPosition<Shape::kStages> k, v;
    // A stage is free once all lanes of all warps have finished reading it.
    const auto release = [lane](uint32_t barrier) { ArriveWarp(barrier, lane); };
    if (group == Shape::kGroups - 1) PassTurn(group);

    typename Products::Sums sums;
    typename Products::Scores scores;
    typename Products::Probabilities p;
    RowStates rows;
#pragma unroll 1
    for (uint32_t round = 0;; ++round) {
      WaitBarrier(shared + Shape::kQFull, round & 1);
      int valid = 0, first_head = 0, batch = 0;
      if (lane == 0) {
        const WorkSlot& slot = slots[round & 1];
        valid = slot.valid;
        if (Products::kScaled) first_head = slot.first_head, batch = slot.batch;
      }
      if (!__shfl_sync(0xffffffff, valid, 0)) break;
      if constexpr (Products::kScaled) {
        first_head = __shfl_sync(0xffffffff, first_head, 0);
        batch = __shfl_sync(0xffffffff, batch, 0);
      }
      scales.Begin(given, transform, first_head, batch);
      float factor[2];
      bool last;
      // The description of the current stage of K, loaded while its product runs.
      KeyTile tile;
      const auto read_tile = [&] {
        tile = {};
        if (lane == 0) tile = key_tiles[k.stage];
        tile.flags = __shfl_sync(0xffffffff, tile.flags, 0);
      };
      // Waits for the stage's scores.
      const auto finish_scores = [&] {
        if (transform) scales.Transform(scores, common);
        if (tile.flags & KeyTile::kMasked) {
          const int q_rows[2] = {packed_rows & 0xffff, packed_rows >> 16};
          MaskScores(scores, tile, q_rows, lane % 4 * 2);
        }
        last = tile.flags & KeyTile::kLast;
      };
      // Frees the stage of K, and after the last one also q. `late` is 0.
      const auto release_keys = [&](uint32_t late) {
        release((shared + Shape::kKEmpty + 8 * k.stage) | late);
        if (last) release(shared + Shape::kQEmpty);
        k.Advance();
      };

      WaitBarrier(shared + Shape::kKFull + 8 * k.stage, k.phase);
      Products::IssueScores(scores, q, k_stages + k.stage * kStageStep);
      read_tile();
      rows.Reset();
      sums.Reset();
      WaitProducts<0>();
      PinRegisters(scores);
      finish_scores();
      release_keys(0);
      SettleByBits(scores, scales.multiplier, scales.kHeadroom, rows, factor);
      scales.Probabilities(scores, rows);
      Products::Pack(scores, p);

#pragma unroll 1
      while (!last) {
        WaitBarrier(shared + Shape::kKFull + 8 * k.stage, k.phase);
        AwaitTurn(group);
        Products::IssueScores(scores, q, k_stages + k.stage * kStageStep);
        WaitBarrier(shared + Shape::kVFull + 8 * v.stage, v.phase);
        Products::IssueValues(sums.target(), p, v_stages + v.stage * kStageStep);
        PassTurn(group);
        read_tile();
        WaitProducts<1>();
        PinRegisters(scores);
        finish_scores();
        if constexpr (!Products::kPackEarly) release_keys(0);
        const float before[2] = {factor[0], factor[1]};
        const bool moved = SettleByBits(scores, scales.multiplier, scales.kHeadroom, rows, factor);
        scales.Probabilities(scores, rows);
        if constexpr (Products::kPackEarly) {
          // ptxas would move all of the softmax after the wait. The keys' release therefore depends
          // on every p, through bits that are always 0, which ptxas cannot know.
          typename Products::Probabilities next;
          Products::Pack(scores, next);
          const uint32_t zero = AnyOf(next) & Products::kUnusedBits;
          release_keys(zero);
          AwaitProduct(sums.target(), shared + Shape::kVEmpty, v, release);
          sums.Add(before, factor, moved);
          // Copies would be optimised away, and the products serialised (C7513).
#pragma unroll
          for (unsigned i = 0; i < sizeof(p) / 4; ++i) p[i] = next[i] | zero;
        } else {
          PinRegisters(scores);  // otherwise the exponentials would move below the wait
          AwaitProduct(sums.target(), shared + Shape::kVEmpty, v, release);
          Products::Pack(scores, p);
          sums.Add(before, factor, moved);
        }
      }
      WaitBarrier(shared + Shape::kVFull + 8 * v.stage, v.phase);
      Products::IssueValues(sums.target(), p, v_stages + v.stage * kStageStep);
      if constexpr (Shape::kMergesParts) {
        scales.Finish(sums.output, rows);  // for 16-bit operands this does not use the output
        const typename Products::Ending ending(given, slots[round & 1].Broadcast(), row, rows);
        AwaitProduct(sums.target(), shared + Shape::kVEmpty, v, release);
        Products::Finish(given, ending, row, sums.output, rows, memory);
      } else {
        AwaitProduct(sums.target(), shared + Shape::kVEmpty, v, release);
        sums.AddLast(factor);
        scales.Finish(sums.output, rows);
        const WorkSlot slot = slots[round & 1].Broadcast();
        ForwardEpilogue<typename Shape::T, Shape::kDim>::Store(params.forward, slot, row,
                                                               sums.output, rows);
      }
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_CONSUMER_CUH_
