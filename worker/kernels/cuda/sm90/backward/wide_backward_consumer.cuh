// The two consumer warpgroups of a wide backward: process 64 keys with every q tile that sees them.
//
// The values group computes S^T = K Q^T and converts it to P^T. It passes P^T to the keys group in
// shared memory, thread by thread (threads of both groups have the same elements of the transposed
// tile), and sums dV += P^T dout. The keys group computes dP^T = V dout^T, computes dS^T from both,
// writes it to shared memory and sums dK += dS^T Q. Each group then computes its panels of dQ = dS
// K one after another, and passes them to the producer group in boxes of 32 columns.
//
// The order from tile j to the next:
//  values  [S issued] exp, pass P, dV issued, wait for dS, dQ panels, [next S after the last]
//  keys    [dP issued] wait for P, dS, dK issued, announce, dQ panels, [next dP after the last]
// The values group passes P of the next tile after dS of this one is complete, and therefore after
// P of this one was read. The keys group writes dS after the next P is complete, and therefore
// after both groups have waited for their products with the previous dS.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_WIDE_BACKWARD_CONSUMER_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_WIDE_BACKWARD_CONSUMER_CUH_

#include "worker/kernels/cuda/primitives/thread.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_consumer.cuh"
#include "worker/kernels/cuda/sm90/backward/wide_backward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

template <typename Shape>
struct WideBackwardConsumer {
  using T = typename Shape::T;
  using Narrow = BackwardConsumer<Shape>;
  using Rules = BackwardScores<Shape>;
  using Scores = typename Rules::Scores;
  using Packed = typename Rules::Packed;
  using Sum = typename Narrow::Sum;  // dV or dK
  using DqPanel = typename Narrow::DqTile;
  static constexpr int kDim = Shape::kDim;
  static constexpr int kBoth = Shape::kGroups * 128;

  // Stores a thread's packed elements as four vectors in shared memory.
  static __device__ __forceinline__ void Hand(const Packed& packed, uint32_t target) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target + i * 2048),
                   "r"(packed[i * 4]), "r"(packed[i * 4 + 1]), "r"(packed[i * 4 + 2]),
                   "r"(packed[i * 4 + 3])
                   : "memory");
    }
  }
  static __device__ __forceinline__ void TakeOver(Packed& packed, uint32_t source) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(packed[i * 4]), "=r"(packed[i * 4 + 1]), "=r"(packed[i * 4 + 2]),
                     "=r"(packed[i * 4 + 3])
                   : "r"(source + i * 2048)
                   : "memory");
    }
  }

  // The group's boxes, each 32 columns of 64 rows, used in a ring.
  struct Boxes {
    const uint32_t full, empty;  // barriers of the first
    const uint32_t dq, sums;     // the thread's first element there, of dq and of dv and dk
    RingPosition<Shape::kBoxes> at;

    __device__ __forceinline__ Boxes(uint32_t shared, int group, int warp, int lane)
        : full(shared + Shape::kStagedFull + 8 * Shape::kBoxes * group),
          empty(shared + Shape::kStagedEmpty + 8 * Shape::kBoxes * group),
          dq(shared + Shape::kStaged + group * Shape::kStagedBytes +
             Narrow::StagedOffset(warp, Narrow::QueryRow(lane / 4), lane)),
          sums(shared + Shape::kStaged + group * Shape::kStagedBytes +
               Narrow::StagedOffset(warp, lane / 4, lane)) {}

    // Writes 32 columns of accumulators, scaled, from element `first` on.
    template <int kCount>
    __device__ __forceinline__ void Put(const float (&sum)[kCount], int first, float scale,
                                        uint32_t target) {
      WaitBarrier(empty + 8 * at.stage, at.phase ^ 1);
      const uint32_t box = target + at.stage * Shape::kBoxBytes;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        // Columns 8 n are two 16-byte chunks further in the box's row, permuted by the row mod 8.
        const uint32_t address = box ^ (n * 32);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = first + n * 4 + half * 2;
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address + half * 8 * 128),
                       "f"(scale * sum[i]), "f"(scale * sum[i + 1])
                       : "memory");
        }
      }
      FenceBulkReads();
      Narrow::Release(full + 8 * at.stage);
      at.Advance();
    }
    __device__ __forceinline__ void PutDq(const DqPanel& panel, float scale) {
      Put(panel, 0, scale, dq);
      Put(panel, 16, scale, dq);
    }
    __device__ __forceinline__ void PutSum(const Sum& sum, float scale) {
#pragma unroll
      for (int first = 0; first < kDim / 2; first += 16) Put(sum, first, scale, sums);
    }
  };

  // A thread's position and the group's operands. Descriptors of q and dout are of the first slot.
  struct Place {
    uint32_t own_rows;         // A of the scores: K or V
    uint32_t other_rows;       // their B
    uint32_t columns;          // B of the sum
    uint32_t ds_rows;          // A of dq
    uint32_t k_columns;        // its B, of the group's first panel
    uint32_t handed;           // the thread's first vector
    uint32_t gradient_target;  // its position in dS
    int key, row;              // of its first element

    __device__ __forceinline__ Place(uint32_t shared, int group, int warp, int lane)
        : own_rows(RowDescriptor(shared + (group == 0 ? Shape::kK : Shape::kV))),
          other_rows(RowDescriptor(shared + Shape::kRowSlots)),
          columns(ColumnDescriptor(shared + Shape::kRowSlots, Shape::kRowPanelBytes)),
          ds_rows(RowDescriptor(shared + Shape::kScores)),
          k_columns(ColumnDescriptor(
              shared + Shape::kK + (group == 0 ? 0 : Shape::kValuesPanels) * Shape::kKeyPanelBytes,
              Shape::kKeyPanelBytes)),
          handed(shared + Shape::kHanded + (warp * 32 + lane) * 16),
          gradient_target(shared + Shape::kScores + Narrow::GradientOffset(warp, lane)),
          key(warp * 16 + lane / 4),
          row(lane % 4 * 2) {}
  };

  // kGroup 0 is the values group, 1 the keys group.
  template <int kGroup>
  static __device__ __forceinline__ void Run(const BackwardKernelParams& params, char* memory,
                                             uint32_t shared, const BackwardItem& item) {
    constexpr bool kValues = kGroup == 0;
    constexpr int kPanelCount = kValues ? Shape::kValuesPanels : Shape::kKeysPanels;
    constexpr uint32_t kSlotStep = DescriptorBytes(Shape::kRowBytes);
    const CommonParams& common = params.common;
    const int lane = threadIdx.x & 31;
    const int warp = (threadIdx.x & 127) / 32;
    const Place place(shared, kGroup, warp, lane);
    const float* const statistics =
        reinterpret_cast<const float*>(memory + Shape::kRowStatistics) + place.row;
    const QueryTile* const tiles = reinterpret_cast<const QueryTile*>(memory + Shape::kTiles);
    Sum sum;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) sum[i] = 0.0f;
    Scores scores;
    Packed packed;
    DqPanel dq;
    RingPosition<Shape::kStages> at;
    // The slots of the B operands of the scores and of the sum: q and dout for the values group,
    // dout and q for the keys group.
    RingPosition<Shape::kSlots> scores_at{kValues ? 0u : 1u};
    RingPosition<Shape::kSlots> sum_at{kValues ? 1u : 0u};
    Boxes boxes(shared, kGroup, warp, lane);
    bool last;
    WaitBarrier(shared + (kValues ? Shape::kKFull : Shape::kVFull), 0);
    if (!kValues) WaitBarrier(shared + Shape::kKFull, 0);  // for dQ
    const auto issue_scores = [&] {
      Narrow::template IssueScores<kValues ? Shape::kAddsOffsets : Shape::kAddsDeltas>(
          scores, place.own_rows, place.other_rows + scores_at.stage * kSlotStep, shared, at.stage,
          kValues ? Addend::kOffset : Addend::kDelta);
    };
    WaitBarrier(shared + Shape::kSlotFull + 8 * scores_at.stage, 0);
    WaitBarrier(shared + Shape::kTileFull + 8 * at.stage, at.phase);
    issue_scores();
#pragma unroll 1
    do {
      const QueryTile tile = tiles[at.stage];
      last = tile.flags & QueryTile::kLast;
      const float* const tile_statistics = statistics + at.stage * Shape::kStatistics;
      WaitProducts<0>();
      PinRegisters(scores);
      Narrow::Release(shared + Shape::kSlotEmpty + 8 * scores_at.stage);
      if constexpr (kValues) {
        Packed weights;
        Rules::Probabilities(scores, packed, weights, tile_statistics, tile, place.key, place.row,
                             item.tile->rows, common);
        Hand(weights, place.handed);
        ArriveThreads<kBoth>(Shape::kProbabilitiesReady);
      } else {
        Rules::SubtractSteep(scores, tile_statistics, tile.flags);
        SyncThreads<kBoth>(Shape::kProbabilitiesReady);
        Packed weights;
        TakeOver(weights, place.handed);
        Rules::Weigh(scores, weights, packed, tile_statistics);
        Narrow::StoreGradients(packed, place.gradient_target);
        FenceBulkReads();
        ArriveThreads<kBoth>(Shape::kGradientsReady);
      }
      WaitBarrier(shared + Shape::kSlotFull + 8 * sum_at.stage, sum_at.phase);
      Narrow::IssueSum(sum, packed, place.columns + sum_at.stage * kSlotStep);
      if constexpr (kValues) {
        SyncThreads<kBoth>(Shape::kGradientsReady);
      } else {
        SyncThreads<128>(Shape::kOwnGradientsReady);
      }
      // All threads have read the statistics.
      if (kAllArrive || (kValues && threadIdx.x == 128)) {
        Arrive(shared + Shape::kTileEmpty + 8 * at.stage);
      }
#pragma unroll
      for (int panel = 0; panel < kPanelCount; ++panel) {
        Narrow::IssueDq(dq, place.ds_rows,
                        place.k_columns + DescriptorBytes(panel * Shape::kKeyPanelBytes));
        if (panel + 1 < kPanelCount) {
          WaitProducts<0>();
        } else {
          // Issues the next tile's scores after the last panel. After the last tile the same scores
          // are issued again and not read: a branch would make the assembler wait for every
          // product.
          if (!last) {
            at.Advance();
            scores_at.AdvanceTwo();
            WaitBarrier(shared + Shape::kSlotFull + 8 * scores_at.stage, scores_at.phase);
            WaitBarrier(shared + Shape::kTileFull + 8 * at.stage, at.phase);
          }
          issue_scores();
          WaitProducts<1>();
        }
        PinRegisters(dq);
        if (panel == 0) Narrow::Release(shared + Shape::kSlotEmpty + 8 * sum_at.stage);
        boxes.PutDq(dq, common.softmax_scale);
      }
      sum_at.AdvanceTwo();
    } while (!last);
    WaitProducts<0>();
    PinRegisters(sum);
    boxes.PutSum(sum, kValues ? Shape::kUnshift : common.softmax_scale);
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_WIDE_BACKWARD_CONSUMER_CUH_
