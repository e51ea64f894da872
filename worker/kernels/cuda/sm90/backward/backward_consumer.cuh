// A consumer warpgroup: processes 64 of the thread block's keys with every q tile that sees them.
//
// The scores are computed transposed, S^T = K Q^T and dP^T = V dout^T. P^T and dS^T, rounded, are
// then the A operands of dV += P^T dout and dK += dS^T Q in the same registers. Only dS goes to
// shared memory, for dQ = dS K over all 128 keys. Each group computes and stages a half of dQ, and
// the producer group adds it to global memory.
//
// The products of one tile in the order of issue, with the group's other work in brackets:
//  S, dP, [S -> P, dP -> dS, dS to shared memory], dV, [wait for the other group's dS], dQ, dK,
//  [stage dQ; next tile, whose S is issued after dK]
// The second group issues its scores after the first one has issued its scores. One unit computes
// the exponentials of a warp of each group, so they run one after the other, each during the other
// group's products. The rows' statistics are added in S and dP (backward_addends.cuh). Writes for
// the copy engine are fenced only after the next products have been issued, because the fence waits
// until the writes are visible. dK and dV also leave through the staged boxes at the end, or are
// stored (backward_stored_sums.cuh).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_CONSUMER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_CONSUMER_CUH_

#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/primitives/tma.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_addends.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_scores.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_shape.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_stored_sums.cuh"
#include "worker/kernels/cuda/sm90/primitives/pipeline.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct BackwardConsumer {
  using T = typename Shape::T;
  using Rules = BackwardScores<Shape>;
  using Scores = typename Rules::Scores;
  using Packed = typename Rules::Packed;
  static constexpr int kDim = Shape::kDim;
  static constexpr int kRows = Shape::kRows;
  using Sum = float[kDim / 2];  // dK or dV
  using DqTile = float[32];

  // Issues scores = a b^T: a is K or V, b q or dout. kAdds: includes the rows' addends of that
  // stage.
  template <bool kAdds>
  static __device__ __forceinline__ void IssueScores(Scores& scores, uint32_t a, uint32_t b,
                                                     uint32_t shared, int stage, Addend addend) {
    uint32_t weights[4] = {};
    if constexpr (kAdds) {
      weights[0] = weights[1] = Addends<Shape>::Weights();
      PinRegisters(weights);
    }
    ProductFence();
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const int panel = step / 4;
      const int within = step % 4 * 32;
      MultiplyShared<T>(scores, a + DescriptorBytes(panel * Shape::kKeyPanelBytes + within),
                        b + DescriptorBytes(panel * Shape::kRowPanelBytes + within), step > 0);
    }
    if constexpr (kAdds) Addends<Shape>::Issue(scores, weights, shared, stage, addend);
    CommitProducts();
  }

  // Issues sum += a b over the rows of the tile; b is dout or q.
  static __device__ __forceinline__ void IssueSum(Sum& sum, const Packed& a, uint32_t b) {
    ProductFence();
#pragma unroll
    for (int step = 0; step < kRows / 16; ++step) {
      MultiplyRegisters<T>(sum, a + step * 4, b + DescriptorBytes(step * 16 * kPanelRowBytes), 1);
    }
    CommitProducts();
  }

  // Issues dq = dS K for the group's half.
  template <int kCount>
  static __device__ __forceinline__ void IssueDq(float (&dq)[kCount], uint32_t ds, uint32_t k) {
    ProductFence();
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
      MultiplySharedColumns<T>(
          dq, ds + DescriptorBytes(step / 4 * Shape::kScorePanelBytes + step % 4 * 32),
          k + DescriptorBytes(step * 16 * kPanelRowBytes), step > 0);
    }
    CommitProducts();
  }

  // Returns the row, among eight rows of dS and dq, that holds q row i. The rows of half a warp's
  // accumulators are then two apart in q, and their stores to the staged tile have no bank
  // conflicts.
  static __device__ __forceinline__ int KeptRow(int i) { return i / 2 + i % 2 * 4; }
  static __device__ __forceinline__ int QueryRow(int kept) { return kept % 4 * 2 + kept / 4; }

  // Writes dS^T from registers to `target`, the thread's position in the group's panel. Products
  // read it after FenceBulkReads.
  static __device__ __forceinline__ void StoreGradients(const Packed& ds, uint32_t target) {
#pragma unroll
    for (int step = 0; step < kRows / 16; ++step) {
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                       target + step * 16 * kPanelRowBytes),
                   "r"(ds[step * 4]), "r"(ds[step * 4 + 1]), "r"(ds[step * 4 + 2]),
                   "r"(ds[step * 4 + 3])
                   : "memory");
    }
  }
  static __device__ __forceinline__ uint32_t GradientOffset(int warp, int lane) {
    const int row = lane / 16 * 8 + KeptRow(lane % 8);
    const int chunk = warp * 2 + lane / 8 % 2;
    return row * kPanelRowBytes + (chunk ^ (row & 7)) * 16;
  }

  // Writes kColumns columns of accumulators, scaled, from element `first` on, to the group's staged
  // boxes. `target` is the address of the thread's first element there.
  template <int kColumns = 64, int kCount>
  static __device__ __forceinline__ void Stage(const float (&sum)[kCount], int first, float scale,
                                               uint32_t target) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      if (first + n * 4 >= kCount) break;
      // Columns 8 n are two 16-byte chunks further in the box's row, permuted by the row mod 8.
      const uint32_t address = (target ^ (n % 4 * 32)) + n / 4 * kStagedRows * 128;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = first + n * 4 + half * 2;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address + half * 8 * 128),
                     "f"(scale * sum[i]), "f"(scale * sum[i + 1])
                     : "memory");
      }
    }
  }
  // `row` is the row of the lane's first accumulator among the warp's 16 rows.
  static __device__ __forceinline__ uint32_t StagedOffset(int warp, int row, int lane) {
    return (warp * 16 + row) * 128 + ((lane % 4 / 2) ^ (row & 7)) * 16 + lane % 2 * 8;
  }

  // All lanes of the warp have finished reading or writing the memory that `barrier` guards.
  static __device__ __forceinline__ void Release(uint32_t barrier) {
    ArriveWarp(barrier, threadIdx.x % 32);
  }

  // The staged boxes of the group.
  struct StagedBoxes {
    const uint32_t full, empty;  // barriers
    const uint32_t dq, sums;     // the thread's first element, of dq and of dv and dk
    uint32_t phase = 1;

    __device__ __forceinline__ StagedBoxes(uint32_t shared, int group, int warp, int lane)
        : full(shared + Shape::kStagedFull + 8 * group),
          empty(shared + Shape::kStagedEmpty + 8 * group),
          dq(shared + Shape::kStaged + group * Shape::kStagedBytes +
             StagedOffset(warp, QueryRow(lane / 4), lane)),
          sums(shared + Shape::kStaged + group * Shape::kStagedBytes +
               StagedOffset(warp, lane / 4, lane)) {}

    // Writes sums whose products are complete, after the previous sums have left the boxes.
    template <int kCount>
    __device__ __forceinline__ void Write(const float (&sum)[kCount], int first, float scale,
                                          uint32_t target) {
      WaitBarrier(empty, phase);
      phase ^= 1;
      Stage(sum, first, scale, target);
    }
    // Signals that the written sums may be added.
    __device__ __forceinline__ void Announce() const {
      FenceBulkReads();
      Release(full);
    }
    template <int kCount>
    __device__ __forceinline__ void Put(const float (&sum)[kCount], int first, float scale,
                                        uint32_t target) {
      Write(sum, first, scale, target);
      Announce();
    }
  };

  // Descriptors of the group's operands; of the first stage if there are several.
  struct Operands {
    uint32_t k_rows, v_rows;           // its 64 keys
    uint32_t q_rows, dout_rows;        // B of the scores
    uint32_t q_columns, dout_columns;  // B of dK and dV
    uint32_t ds_rows, k_columns;       // its half of dq: its rows of dS, or its columns of K

    __device__ __forceinline__ Operands(uint32_t shared, int group) {
      const uint32_t keys = group * 64 * kPanelRowBytes;
      k_rows = RowDescriptor(shared + Shape::kK + keys);
      v_rows = RowDescriptor(shared + Shape::kV + keys);
      q_rows = RowDescriptor(shared + Shape::kQ);
      dout_rows = RowDescriptor(shared + Shape::kDout);
      q_columns = ColumnDescriptor(shared + Shape::kQ, Shape::kRowPanelBytes);
      dout_columns = ColumnDescriptor(shared + Shape::kDout, Shape::kRowPanelBytes);
      constexpr bool kByRows = Shape::kDqByRows;
      ds_rows =
          RowDescriptor(shared + Shape::kScores + (kByRows ? group * 64 * kPanelRowBytes : 0));
      k_columns =
          ColumnDescriptor(shared + Shape::kK + (kByRows ? 0 : group * Shape::kKeyPanelBytes),
                           Shape::kKeyPanelBytes);
    }
  };

  // Waits until both groups have written dS. Threads wait for a barrier at one place in the code,
  // so groups with separate code have a barrier each. No group arrives twice at a barrier before
  // the other has waited for it: the first group continues after the second has passed its barrier,
  // and the second group's next scores wait for the first group's (kScoresTurn).
  static __device__ __forceinline__ void AwaitGradients(int group) {
    constexpr int kBoth = Shape::kGroups * 128;
    if constexpr (!Shape::kGroupsDiffer) {
      SyncThreads<kBoth>(Shape::kGradientsReady);
    } else if (group == 0) {
      ArriveThreads<kBoth>(Shape::kSecondGradientsReady);
      SyncThreads<kBoth>(Shape::kGradientsReady);
    } else {
      SyncThreads<kBoth>(Shape::kSecondGradientsReady);
      ArriveThreads<kBoth>(Shape::kGradientsReady);
    }
  }

  // `group` is the index of the consumer warpgroup, the same in all threads of the warp.
  static __device__ __forceinline__ void Run(const BackwardKernelParams& params, char* memory,
                                             uint32_t shared, const BackwardItem& item, int group) {
    if constexpr (!Shape::kGroupsDiffer) {
      RunGroup<64>(params, memory, shared, item, group);
    } else if (group == 0) {
      RunGroup<64>(params, memory, shared, item, 0);
    } else {
      RunGroup<Shape::kSecondDqColumns>(params, memory, shared, item, 1);
    }
  }

  // `kDqColumns`: the group's columns of dQ.
  template <int kDqColumns>
  static __device__ __forceinline__ void RunGroup(const BackwardKernelParams& params, char* memory,
                                                  uint32_t shared, const BackwardItem& item,
                                                  int group) {
    const CommonParams& common = params.common;
    const int lane = threadIdx.x & 31;
    const int warp = (threadIdx.x & 127) / 32;
    const int key = group * 64 + warp * 16 + lane / 4;
    const int row = lane % 4 * 2;
    const int keys = item.tile->rows;
    const Operands operands(shared, group);
    constexpr uint32_t kStageStep = DescriptorBytes(Shape::kRowBytes);
    const uint32_t gradient_target =
        shared + Shape::kScores + group * Shape::kScorePanelBytes + GradientOffset(warp, lane);
    const float* const statistics =
        reinterpret_cast<const float*>(memory + Shape::kRowStatistics) + row;
    const QueryTile* const tiles = reinterpret_cast<const QueryTile*>(memory + Shape::kTiles);
    Sum dk, dv;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dk[i] = dv[i] = 0.0f;
    Scores scores, gradients;
    Packed p, ds;
    float dq[kDqColumns / 2];
    RingPosition<Shape::kStages> at;
    StagedBoxes boxes(shared, group, warp, lane);
    bool first = true, last;
    uint32_t last_stage = 0;
    WaitBarrier(shared + Shape::kKFull, 0);
#pragma unroll 1
    do {
      WaitBarrier(shared + Shape::kQFull + 8 * at.stage, at.phase);
      WaitBarrier(shared + Shape::kTileFull + 8 * at.stage, at.phase);
      if (group == 1) SyncThreads<Shape::kGroups * 128>(Shape::kScoresTurn);
      IssueScores<Shape::kAddsOffsets>(scores, operands.k_rows,
                                       operands.q_rows + at.stage * kStageStep, shared, at.stage,
                                       Addend::kOffset);
      if (!first) boxes.Announce();
      WaitProducts<1>();  // the last tile's dK
      if (first) {
        WaitBarrier(shared + Shape::kVFull, 0);
        first = false;
      } else {
        Release(shared + Shape::kDoutEmpty + 8 * last_stage);
        Release(shared + Shape::kQEmpty + 8 * last_stage);
      }
      WaitBarrier(shared + Shape::kDoutFull + 8 * at.stage, at.phase);
      IssueScores<Shape::kAddsDeltas>(gradients, operands.v_rows,
                                      operands.dout_rows + at.stage * kStageStep, shared, at.stage,
                                      Addend::kDelta);
      if (group == 0) ArriveThreads<Shape::kGroups * 128>(Shape::kScoresTurn);
      const QueryTile& tile = tiles[at.stage];
      const int32_t flags = tile.flags;
      last = flags & QueryTile::kLast;
      const float* const tile_statistics = statistics + at.stage * Shape::kStatistics;
      WaitProducts<1>();
      PinRegisters(scores);
      Rules::Exponentials(scores, tile_statistics, flags, tile, key, row, keys, common);
      PinRegisters(scores);  // otherwise the exponentials would move below the wait
      WaitProducts<0>();
      PinRegisters(gradients);
      Rules::SubtractSteep(gradients, tile_statistics, flags);
      Rules::Differentiate(scores, gradients, p, ds, tile_statistics, tile, key, row, keys, common);
      StoreGradients(ds, gradient_target + at.stage * Shape::kScoreBytes);
      IssueSum(dv, p, operands.dout_columns + at.stage * kStageStep);
      FenceBulkReads();
      AwaitGradients(group);
      // All threads have read the statistics.
      if (kAllArrive || threadIdx.x == 128) Arrive(shared + Shape::kTileEmpty + 8 * at.stage);
      IssueDq(dq, operands.ds_rows + DescriptorBytes(at.stage * Shape::kScoreBytes),
              operands.k_columns);
      IssueSum(dk, ds, operands.q_columns + at.stage * kStageStep);
      WaitProducts<1>();
      PinRegisters(dq);
      boxes.Write(dq, 0, common.softmax_scale, boxes.dq);
      last_stage = at.stage;
      at.Advance();
    } while (!last);
    boxes.Announce();
    WaitProducts<0>();
    PinRegisters(dk);
    PinRegisters(dv);
    using Stored = StoredSums<Shape>;
    if constexpr (Stored::kPossible) {
      if (Stored::Asked(item)) {
        Stored::Store(common, item, item.tile->dv, common.head_dim_v, key, dv, Shape::kUnshift);
        Stored::Store(common, item, item.tile->dk, common.head_dim, key, dk, common.softmax_scale);
        return;
      }
    }
#pragma unroll
    for (int part = 0; part < Shape::kPanels; ++part) {
      boxes.Put(dv, part * 32, Shape::kUnshift, boxes.sums);
    }
#pragma unroll
    for (int part = 0; part < Shape::kPanels; ++part) {
      boxes.Put(dk, part * 32, common.softmax_scale, boxes.sums);
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_CONSUMER_CUH_
