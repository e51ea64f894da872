// The two consumer warpgroups of a block of a paired forward. Both have the same 64 q rows.
//
// Steady state at key tile j:
//  scores group  S(j) = q K(j)^T, first half of output += P(j - 1) V(j - 1), softmax(j) during the
//                latter, pass P(j) on
//  values group  second half of output += P(j - 1) V(j - 1)
// The values group multiplies while the scores group computes its softmax, and the scores group's
// next scores follow while the values group waits for P.
//
// Thread t of the values group needs exactly the fragments of P that thread t of the scores group
// has, so P passes through shared memory in a separate order. Named barriers order its accesses.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_WIDE_PAIRED_FORWARD_CONSUMER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_WIDE_PAIRED_FORWARD_CONSUMER_CUH_

#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_epilogue.cuh"
#include "worker/kernels/cuda/sm90/forward/forward_softmax.cuh"
#include "worker/kernels/cuda/sm90/forward/wide/paired_forward_shape.cuh"
#include "worker/kernels/cuda/sm90/primitives/cluster.cuh"
#include "worker/kernels/cuda/sm90/primitives/pipeline.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct PairedForwardConsumer {
  using T = typename Shape::T;
  static constexpr int kStageCount = Shape::kStageColumns / 2;  // accumulators per stage of V
  using Output = float[Shape::kGroupStages][kStageCount];
  using Scores = float[Shape::kKeys / 2];
  using Probabilities = uint32_t[Shape::kKeys / 4];
  static constexpr int kBoth = 256;

  // Named barriers of both groups: the memory of P holds a tile's P, or is free.
  static constexpr int kPassed = 1;
  static constexpr int kFree = 2;

  // The weights of the thread's two rows, new and previous, and their places.
  struct Rows {
    bool exists[2];
    int64_t row[2];  // in out, out_acc or partial_out
    float weight[2];
    float previous_weight[2];
  };

  // As ArriveThreads, for both groups. In builds with RINGATTN_RACECHECK the group also waits: the
  // groups take turns at kFree and kPassed, so each then waits for what it will wait for anyway.
  static __device__ __forceinline__ void HandOver(int barrier) {
    if constexpr (kAllArrive) {
      SyncThreads<kBoth>(barrier);
    } else {
      ArriveThreads<kBoth>(barrier);
    }
  }

  static __device__ __forceinline__ void StoreShared16(uint32_t address, uint32_t a, uint32_t b,
                                                       uint32_t c, uint32_t d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
  }
  static __device__ __forceinline__ void LoadShared16(uint32_t address, uint32_t& a, uint32_t& b,
                                                      uint32_t& c, uint32_t& d) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(address)
                 : "memory");
  }

  // Issues scores = q K^T, one batch per stage of K. `phase`: of the tile. `operands`: the base
  // address in descriptor form.
  static __device__ __forceinline__ void IssueScores(Scores& scores, uint32_t shared,
                                                     uint32_t operands, uint32_t phase) {
#pragma unroll
    for (int stage = 0; stage < Shape::kKeyStages; ++stage) {
      WaitBarrier(shared + Shape::kKFull + 8 * stage, phase);
      KeepHere(operands);  // otherwise ptxas keeps the descriptors of all panels in registers
      const uint32_t q = RowDescriptor(operands + Shape::kQ);
      const uint32_t k = RowDescriptor(operands + Shape::kK);
      ProductFence();
#pragma unroll
      for (int i = 0; i < Shape::kKeyPanels * 4; ++i) {
        const int panel = stage * Shape::kKeyPanels + i / 4;
        const uint32_t offset = DescriptorBytes(panel * Shape::kPanelBytes + i % 4 * 32);
        MultiplyShared<T>(scores, q + offset, k + offset, stage + i > 0);
      }
      CommitProducts();
    }
  }
  // Releases the stages of K from kStage on as their products end. kLater: batches that were issued
  // after those of the scores.
  template <int kLater, int kStage = 0>
  static __device__ __forceinline__ void AwaitScores(const BothBlocks& both, uint32_t shared) {
    if constexpr (kStage < Shape::kKeyStages) {
      WaitProducts<kLater + Shape::kKeyStages - 1 - kStage>();
      both.Release(shared, Shape::kKEmpty + 8 * kStage);
      AwaitScores<kLater, kStage + 1>(both, shared);
    }
  }

  // Issues output += P V for the columns of group kGroup, one batch per stage of V. `phase`: of the
  // values.
  template <int kGroup>
  static __device__ __forceinline__ void IssueValues(Output& output, const Probabilities& p,
                                                     uint32_t shared, uint32_t operands,
                                                     uint32_t phase) {
#pragma unroll
    for (int i = 0; i < Shape::kGroupStages; ++i) {
      const int stage = kGroup * Shape::kGroupStages + i;
      WaitBarrier(shared + Shape::kVFull + 8 * stage, phase);
      KeepHere(operands);
      const uint32_t v =
          ColumnDescriptor(operands + Shape::kV + stage * Shape::kVStageBytes, Shape::kPanelBytes);
      ProductFence();
#pragma unroll
      for (int step = 0; step < Shape::kKeys / 16; ++step) {
        MultiplyRegisters<T>(output[i], p + step * 4,
                             v + DescriptorBytes(step * 16 * kPanelRowBytes), 1);
      }
      CommitProducts();
    }
  }
  // Releases the group's stages of V as their products, the last ones, end.
  template <int kGroup, int kIndex = 0>
  static __device__ __forceinline__ void AwaitValues(Output& output, const BothBlocks& both,
                                                     uint32_t shared) {
    if constexpr (kIndex < Shape::kGroupStages) {
      WaitProducts<Shape::kGroupStages - 1 - kIndex>();
      both.Release(shared, Shape::kVEmpty + 8 * (kGroup * Shape::kGroupStages + kIndex));
      AwaitValues<kGroup, kIndex + 1>(output, both, shared);
    } else {
#pragma unroll
      for (int i = 0; i < Shape::kGroupStages; ++i) PinRegisters(output[i]);
    }
  }

  static __device__ __forceinline__ void ResetOutput(Output& output) {
#pragma unroll
    for (int i = 0; i < Shape::kGroupStages; ++i) {
#pragma unroll
      for (int j = 0; j < kStageCount; ++j) output[i][j] = 0.0f;
    }
  }
  static __device__ __forceinline__ void RescaleOutput(Output& output, const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < Shape::kGroupStages; ++i) Rescale(output[i], factor);
  }

  // Passes a tile's P, and the factors of the output before it, to the values group.
  static __device__ __forceinline__ void Pass(const Scores& scores, const float (&factor)[2],
                                              bool last, uint32_t shared) {
    const uint32_t thread = threadIdx.x & 127;
    SyncThreads<kBoth>(kFree);
#pragma unroll
    for (int i = 0; i < Shape::kKeys / 16; ++i) {
      StoreShared16(shared + Shape::kProbabilities + (i * 128 + thread) * 16,
                    cuda::Pack<T>(scores[i * 8], scores[i * 8 + 1]),
                    cuda::Pack<T>(scores[i * 8 + 2], scores[i * 8 + 3]),
                    cuda::Pack<T>(scores[i * 8 + 4], scores[i * 8 + 5]),
                    cuda::Pack<T>(scores[i * 8 + 6], scores[i * 8 + 7]));
    }
    const uint32_t factors = shared + Shape::kFactors + thread * 8;
    StoreShared(factors, __float_as_uint(factor[0]));
    StoreShared(factors + 4, __float_as_uint(factor[1]));
    if (thread % 32 == 0) StoreShared(shared + Shape::kLast + thread / 32 * 4, last);
    HandOver(kPassed);
  }

  // Loads the thread's fragments of the P that was passed. (The scores group loads them back:
  // packed early, before the previous product has ended, ptxas would serialise the products,
  // C7513.)
  static __device__ __forceinline__ void LoadProbabilities(Probabilities& p, uint32_t shared) {
#pragma unroll
    for (int i = 0; i < Shape::kKeys / 16; ++i) {
      LoadShared16(shared + Shape::kProbabilities + (i * 128 + (threadIdx.x & 127)) * 16, p[i * 4],
                   p[i * 4 + 1], p[i * 4 + 2], p[i * 4 + 3]);
    }
  }

  // Computes the places of the thread's rows.
  static __device__ __forceinline__ Rows LocateRows(const ItemTarget& target,
                                                    const PairedForwardItem& item, int row,
                                                    int64_t (&lse_row)[2]) {
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int block_row = row + half * 8;
      const int packed_row = item.first_row + block_row;
      rows.exists[half] = block_row < item.block_rows && target.Exists(packed_row);
      target.Locate(packed_row, lse_row[half], rows.row[half]);
    }
    return rows;
  }

  // Executed by the scores group, as ForwardEpilogue: stores lse, and computes the weights.
  static __device__ __forceinline__ Rows WeighRows(const ForwardParams& params,
                                                   const ItemTarget& target,
                                                   const PairedForwardItem& item, int row,
                                                   const RowStates& states) {
    int64_t lse_row[2];
    Rows rows = LocateRows(target, item, row, lse_row);
    float* const lse = target.partial ? params.partial_lse : params.lse;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = QuadSum(states.sum[half]);
      float row_lse = RowLse(states.offset[half], sum);
      float weight = sum == 0.0f ? 0.0f : 1.0f / sum;
      float previous_weight = 0.0f;
      if (target.merge && rows.exists[half]) {
        const DeviceMerge merge = MergeDeviceLse(lse[lse_row[half]], row_lse);
        previous_weight = merge.first;
        weight *= merge.second;
        row_lse = merge.lse;
      }
      if (params.sinks != nullptr && !target.partial && rows.exists[half]) {
        JoinSink(params.sinks[target.HeadOf(item.first_row + row + half * 8)], row_lse, weight,
                 previous_weight);
      }
      __syncwarp();  // all lanes of a row have read the previous lse
      if (rows.exists[half] && (threadIdx.x & 3) == 0) lse[lse_row[half]] = row_lse;
      rows.weight[half] = weight;
      rows.previous_weight[half] = previous_weight;
    }
    return rows;
  }

  // Stores the group's columns of the thread's rows, as ForwardEpilogue.
  static __device__ __forceinline__ void Store(const ForwardParams& params,
                                               const ItemTarget& target, const Rows& rows,
                                               int first_column, const Output& output) {
    const int q = threadIdx.x & 3;
    const int columns = params.common.head_dim_v;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool exists = rows.exists[half];
      const float weight = rows.weight[half];
      float* const acc =
          (target.partial ? params.partial_out : params.out_acc) + rows.row[half] * columns;
      T* const out = static_cast<T*>(params.out) + rows.row[half] * columns;
#pragma unroll
      for (int group = 0; group < Shape::kGroupColumns / 32; ++group) {
        uint32_t words[4];
        float2 previous[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int column = first_column + (group * 4 + j) * 8 + q * 2;
          previous[j] = make_float2(0.0f, 0.0f);
          if (target.merge && exists && column < columns) {
            previous[j] = *reinterpret_cast<const float2*>(acc + column);
          }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int n = group * 4 + j;
          const int column = first_column + n * 8 + q * 2;
          const float* const pair =
              output[n / (kStageCount / 4)] + n % (kStageCount / 4) * 4 + half * 2;
          const float x0 = fmaf(rows.previous_weight[half], previous[j].x, pair[0] * weight);
          const float x1 = fmaf(rows.previous_weight[half], previous[j].y, pair[1] * weight);
          if (!target.final && exists && column < columns) {
            *reinterpret_cast<float2*>(acc + column) = make_float2(x0, x1);
          }
          words[j] = cuda::Pack<T>(x0, x1);
        }
        if (target.final) {  // the same for all lanes of the warp
          TransposeQuad(words, q);
          const int column = first_column + (group * 4 + q) * 8;
          if (exists && column < columns) {
            *reinterpret_cast<uint4*>(out + column) =
                make_uint4(words[0], words[1], words[2], words[3]);
          }
        }
        // Loading all groups at once would spill registers.
        asm volatile("" ::: "memory");
      }
    }
  }

  // The row of the block that is the thread's first one.
  static __device__ __forceinline__ int FirstRow() {
    return (threadIdx.x & 127) / 32 * 16 + (threadIdx.x & 31) / 4;
  }

  static __device__ __forceinline__ void RunScores(const ForwardKernelParams& params, char* memory,
                                                   uint32_t shared, int rank) {
    const CommonParams& common = params.forward.common;
    const int lane = threadIdx.x & 31;
    const int row = FirstRow();
    const int pack = params.forward.head_pack;
    const int first_row = rank * (Shape::kBlockRows / pack * pack);
    // In one register.
    const int packed_rows = (first_row + row) / pack | (first_row + row + 8) / pack << 16;
    const bool transform = common.softcap > 0.0f || common.scale_log2 <= 0.0f;
    const float multiplier = transform ? 1.0f : common.scale_log2;
    const uint32_t operands = OperandAddress(shared);
    const KeyTile* const key_tiles = reinterpret_cast<const KeyTile*>(memory + Shape::kKeyTiles);
    const BothBlocks both(shared, lane);
    uint32_t phase = 0;  // of the tile whose scores are issued
    Output output;
    Scores scores;
    Probabilities p;
    RowStates rows;
    float factor[2];
    bool last = false;
    const auto finish_scores = [&] {
      KeyTile tile = {};
      if (lane == 0) tile = key_tiles[phase];
      tile.flags = __shfl_sync(0xffffffff, tile.flags, 0);
      last = (tile.flags & KeyTile::kLast) != 0;
      if (transform) TransformScores(scores, common);
      if (tile.flags & KeyTile::kMasked) {
        const int q_rows[2] = {packed_rows & 0xffff, packed_rows >> 16};
        MaskScores(scores, tile, q_rows, lane % 4 * 2);
      }
    };

    rows.Reset();
    WaitBarrier(shared + Shape::kQFull, 0);
    IssueScores(scores, shared, operands, phase);
    ResetOutput(output);
    AwaitScores<0>(both, shared);
    PinRegisters(scores);
    finish_scores();
    SettleByBits(scores, multiplier, kOffsetHeadroom, rows, factor);
    Exponentials(scores, multiplier, rows);
    Pass(scores, factor, last, shared);
    LoadProbabilities(p, shared);

#pragma unroll 1
    while (!last) {
      phase ^= 1;
      IssueScores(scores, shared, operands, phase);
      IssueValues<0>(output, p, shared, operands, phase ^ 1);
      AwaitScores<Shape::kGroupStages>(both, shared);
      PinRegisters(scores);
      finish_scores();
      const bool moved = SettleByBits(scores, multiplier, kOffsetHeadroom, rows, factor);
      Exponentials(scores, multiplier, rows);
      Pass(scores, factor, last, shared);
      AwaitValues<0>(output, both, shared);
      LoadProbabilities(p, shared);
      if (moved) RescaleOutput(output, factor);
    }
    IssueValues<0>(output, p, shared, operands, phase);
    AwaitValues<0>(output, both, shared);
    rows.OffsetsToBases(multiplier);
    const PairedForwardItem item(params, rank, Shape::kBlockRows);
    const ItemTarget target(params.forward, item.slot);
    const Rows weighed = WeighRows(params.forward, target, item, row, rows);
    SyncThreads<kBoth>(kFree);
    StoreShared16(shared + Shape::kProbabilities + (threadIdx.x & 127) * 16,
                  __float_as_uint(weighed.weight[0]), __float_as_uint(weighed.weight[1]),
                  __float_as_uint(weighed.previous_weight[0]),
                  __float_as_uint(weighed.previous_weight[1]));
    HandOver(kPassed);
    Store(params.forward, target, weighed, 0, output);
  }

  static __device__ __forceinline__ void RunValues(const ForwardKernelParams& params,
                                                   uint32_t shared, int rank) {
    const uint32_t thread = threadIdx.x & 127;
    const uint32_t operands = OperandAddress(shared);
    const BothBlocks both(shared, threadIdx.x & 31);
    uint32_t phase = 0;
    Output output;
    Probabilities p;
    ResetOutput(output);
    HandOver(kFree);
    bool last = false;
#pragma unroll 1
    while (!last) {
      SyncThreads<kBoth>(kPassed);
      LoadProbabilities(p, shared);
      const uint32_t factors = shared + Shape::kFactors + thread * 8;
      const float factor[2] = {__uint_as_float(LoadShared(factors)),
                               __uint_as_float(LoadShared(factors + 4))};
      last = __shfl_sync(0xffffffff, LoadShared(shared + Shape::kLast + thread / 32 * 4), 0) != 0;
      HandOver(kFree);
      if (__any_sync(0xffffffff, factor[0] != 1.0f || factor[1] != 1.0f)) {
        RescaleOutput(output, factor);
      }
      IssueValues<1>(output, p, shared, operands, phase);
      AwaitValues<1>(output, both, shared);
      phase ^= 1;
    }
    const PairedForwardItem item(params, rank, Shape::kBlockRows);
    const ItemTarget target(params.forward, item.slot);
    int64_t lse_row[2];
    Rows rows = LocateRows(target, item, FirstRow(), lse_row);
    SyncThreads<kBoth>(kPassed);
    uint32_t weights[4];
    LoadShared16(shared + Shape::kProbabilities + thread * 16, weights[0], weights[1], weights[2],
                 weights[3]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.weight[half] = __uint_as_float(weights[half]);
      rows.previous_weight[half] = __uint_as_float(weights[2 + half]);
    }
    Store(params.forward, target, rows, Shape::kGroupColumns, output);
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_WIDE_PAIRED_FORWARD_CONSUMER_CUH_
