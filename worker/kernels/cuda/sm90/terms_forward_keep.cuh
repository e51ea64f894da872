// Dropout's bits of a forward's key tiles, made ahead by the producer warps that have nothing else
// to do: in a consumer's registers there is room for one call of Philox at a time, of which each
// step waits for the last, and its time is what the kernel lacks.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_FORWARD_KEEP_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_FORWARD_KEEP_CUH_

#include "worker/kernels/cuda/sm90/pipeline.cuh"
#include "worker/kernels/cuda/sm90/terms_forward_producer.cuh"
#include "worker/kernels/cuda/sm90/terms_forward_scores.cuh"

namespace ringattn::worker::cuda::sm90 {

// What a consumer thread reads: TermForwardScores::KeepPairs of its rows and columns. A ring of its
// own, as many stages as that of K.
template <typename Shape>
struct ForwardKeep {
  using Position = RingPosition<Shape::kKeepStages>;

  static __device__ __forceinline__ uint2* Of(char* memory, int stage, int thread) {
    return reinterpret_cast<uint2*>(memory + Shape::kKeep + stage * Shape::kKeepBytes) + thread;
  }

  // Executed by whole consumer warps; `thread` counts consumer threads.
  static __device__ __forceinline__ void Take(uint32_t (&keep)[2], char* memory, uint32_t shared,
                                              Position& at, int thread) {
    WaitBarrier(shared + Shape::kKeepFull + 8 * at.stage, at.phase);
    const uint2 words = *Of(memory, at.stage, thread);
    keep[0] = words.x;
    keep[1] = words.y;
    __syncwarp();
    if (thread % 32 == 0) Arrive(shared + Shape::kKeepEmpty + 8 * at.stage);
    at.Advance();
  }

  // The rows of a consumer thread.
  struct Rows {
    TermRow rows[2];
    __device__ __forceinline__ const TermRow& Of(int half) const { return rows[half]; }
  };

  // Of all items, for every kKeepWarps-th consumer warp, from another one with every tile. Learns
  // of items as consumers do, and is among those that leave q of one.
  static __device__ __forceinline__ void Run(const TermForwardProducer<Shape>& producer, int warp) {
    using Producer = TermForwardProducer<Shape>;
    using Rules = TermForwardScores<Shape>;
    const TermForwardKernelParams& params = producer.params;
    const uint32_t shared = producer.shared;
    const int lane = producer.lane;
    const int pack = params.forward.head_pack;
    const WorkSlot* slots = reinterpret_cast<const WorkSlot*>(producer.memory + Shape::kSlots);
    Position at;
    int first = warp;
#pragma unroll 1
    for (uint32_t round = 0;; ++round) {
      WaitBarrier(shared + Shape::kQFull, round & 1);
      const WorkSlot& slot = slots[round & 1];
      if (slot.valid == 0) break;
      const int first_head = slot.first_head, batch = slot.batch;
      producer.Walk(
          producer.ItemOf(slot.tile, first_head, batch),
          [&](const typename Producer::Found& tile, bool) {
            const TermRange& place = params.terms.ranges[tile.range];
            const uint64_t key = Rules::KeyOf(
                params, place.k_position + int64_t{params.stride} * tile.row, lane % 4 * 2);
            const int32_t batch_row = params.terms.packed ? place.document : batch;
            WaitBarrier(shared + Shape::kKeepEmpty + 8 * at.stage, at.phase ^ 1);
#pragma unroll 1
            for (int consumer = first; consumer < Shape::kConsumerWarps;
                 consumer += Shape::kKeepWarps) {
              Rows own;
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const int packed = consumer * 16 + lane / 4 + half * 8;
                own.rows[half].q_row = pack == 1 ? packed : packed / pack;
                own.rows[half].CountForDropout(params, place.q_position, batch_row,
                                               first_head + (pack == 1 ? 0 : packed % pack));
              }
              uint32_t keep[2];
              Rules::KeepPairs(keep, params, own, key);
              *Of(producer.memory, at.stage, consumer * 32 + lane) = make_uint2(keep[0], keep[1]);
            }
            __syncwarp();
            if (lane == 0) Arrive(shared + Shape::kKeepFull + 8 * at.stage);
            at.Advance();
            if (--first < 0) first = Shape::kKeepWarps - 1;
          });
      __syncwarp();  // all lanes have read the slot
      if (lane == 0) Arrive(shared + Shape::kQEmpty);
    }
  }
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_FORWARD_KEEP_CUH_
