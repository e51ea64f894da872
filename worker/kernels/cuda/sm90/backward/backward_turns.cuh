// The order in which the lanes of an ordered backward add to a tile of dq, or to dk and dv
// (ordered_backward.h).
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_TURNS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_TURNS_CUH_

#include "worker/kernels/cuda/primitives/tma.cuh"
#include "worker/kernels/cuda/sm90/backward/backward_shape.cuh"

namespace ringattn::worker::cuda::sm90 {

// The work of an ordered thread block: the item of the ticket that it took when it started.
struct OrderedItem : BackwardItem {
  int32_t number;  // of its tile
  bool turned;     // its section takes the tiles from the table's end

  __device__ __forceinline__ OrderedItem(const BackwardKernelParams& params,
                                         const TurnParams& turns, uint32_t ticket)
      : BackwardItem(params, ticket, turns.turned_sections),
        number(static_cast<int32_t>(tile - params.tiles)),
        turned(ticket < static_cast<uint32_t>(turns.turned_sections) *
                            static_cast<uint32_t>(params.section_packs) *
                            static_cast<uint32_t>(params.tile_count)) {}
  // Longest tiles first and from the last q tile to the first, or both in the opposite order
  // (ordered_backward.h).
  __device__ __forceinline__ bool descends() const { return !turned; }
};

// Returns whether the thread block computes its item. All of its threads execute this and get the
// same answer, because otherwise the groups would wait for each other forever. `ticket` is for
// ordered blocks. It is exchanged through the memory of k, which is not loaded before all threads
// have read the ticket.
template <typename Shape>
__device__ __forceinline__ bool Starts(const typename Shape::Params& params, char* memory,
                                       uint32_t& ticket) {
  if constexpr (Shape::kOrdered) {
    uint32_t* const place = reinterpret_cast<uint32_t*>(memory + Shape::kK);
    // A block that sees the stop word takes no ticket: a block with a ticket adds everything for
    // which others wait.
    if (threadIdx.x == 0) {
      *place =
          Stopped(params.common.stop_word) ? Shape::kNoTicket : atomicAdd(params.turns.tickets, 1u);
    }
    __syncthreads();
    ticket = *place;
    __syncthreads();
    return ticket != Shape::kNoTicket;
  } else {
    return !__syncthreads_or(Stopped(params.common.stop_word));
  }
}
template <typename Shape>
__device__ __forceinline__ typename Shape::Item ItemOf(const typename Shape::Params& params,
                                                       uint32_t ticket) {
  if constexpr (Shape::kOrdered) {
    return OrderedItem(params, params.turns, ticket);
  } else {
    return BackwardItem(params);
  }
}

// Executed by the lane that adds: between Await and Pass no other lane adds to the same memory.
struct Turn {
  int32_t* counter;  // device; null: no other lane adds
  int32_t wanted;    // the counter's value when the lane may add
  int32_t passed;    // the value that the lane stores afterwards

  // Returns the turn of the q tile that is `tile` tiles later.
  __device__ __forceinline__ Turn Of(int tile) const {
    return {counter + 2 * tile, wanted, passed};
  }
  __device__ __forceinline__ void Await() const {
    if (counter == nullptr) return;
    int32_t value;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    } while (value != wanted);
    // The copy engine performs the accesses that follow.
    asm volatile("fence.proxy.async.global;" ::: "memory");
  }
  // Call it once the lane's additions are complete, not only read, so that the next lane's
  // additions follow them.
  __device__ __forceinline__ void Pass() const {
    if (counter == nullptr) return;
    WaitBulk();
    asm volatile("fence.proxy.async.global;" ::: "memory");
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(counter), "r"(passed) : "memory");
  }
};

// Returns the turn of consumer group `group`'s part of dq in the range's tile `tile`.
__device__ __forceinline__ Turn TurnOf(const BackwardKernelParams& params, const TurnParams& turns,
                                       const OrderedItem& item, const QRange& range, int tile,
                                       int head, int group) {
  const QTurn& of_range = turns.ranges[&range - params.ranges];
  const int64_t place = (int64_t{item.batch} * params.common.num_heads + head) * turns.query_tiles +
                        of_range.first_tile + tile;
  return {turns.queries + 2 * place + group, item.turned ? of_range.after_turned : of_range.after,
          item.number + 1};
}

// Returns the turn of the group's part of dk and dv: the packs of a group's heads add one after
// another.
__device__ __forceinline__ Turn TurnOf(const BackwardKernelParams& params, const TurnParams& turns,
                                       const OrderedItem& item, int group) {
  const CommonParams& common = params.common;
  if (params.heads_per_block == common.group_size) return {nullptr, 0, 0};
  const int kv_head = item.first_head / common.group_size;
  const int pack = item.first_head % common.group_size / params.heads_per_block;
  const int64_t place =
      (int64_t{item.batch} * common.num_kv_heads + kv_head) * params.tile_count + item.number;
  return {turns.keys + 2 * place + group, pack, pack + 1};
}

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_TURNS_CUH_
