// Tiles of K and V from the blocks of a table, by bulk tensor copies: the lanes of one warp start a
// box each.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_BLOCK_LOADS_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_BLOCK_LOADS_CUH_

#include <cstdint>

#include "worker/kernels/cuda/paged/key_passes.h"
#include "worker/kernels/cuda/paged/sm90/kernel_params.h"
#include "worker/kernels/cuda/paged/sm90/paged_shape.cuh"
#include "worker/kernels/cuda/primitives/tma.cuh"
#include "worker/kernels/cuda/sm90/primitives/pipeline.cuh"

namespace ringattn::worker::cuda::paged {

using cuda::sm90::Arrive;
using cuda::sm90::ArriveExpecting;
using cuda::sm90::CopyBox;
using cuda::sm90::KeyTile;
using cuda::sm90::kPanelColumns;
using cuda::sm90::kPanelRowBytes;
using cuda::sm90::RingPosition;
using cuda::sm90::WaitBarrier;

// Arrives at an mbarrier for a warp: one thread, or with RINGATTN_RACECHECK all threads.
__device__ __forceinline__ void ArriveWarpExpecting(uint32_t barrier, uint32_t bytes, int lane) {
  if (lane == 0) {
    ArriveExpecting(barrier, bytes);
  } else if (cuda::sm90::kAllArrive) {
    Arrive(barrier);
  }
}

// A window of 64 elements of a row's block table, which moves towards the table's beginning. Lane l
// holds elements base + l and base - 32 + l; the second are on their way while tiles of the first
// are loaded. All lanes of a warp call everything together.
class TableWindow {
 public:
  // Elements [first, end) are read, others never; the window begins at its last one.
  __device__ __forceinline__ void Begin(const int32_t* table, int32_t first, int32_t end) {
    table_ = table;
    first_ = first;
    end_ = end;
    base_ = (end - 1) & ~31;
    upper_ = Load(base_);
    lower_ = Load(base_ - 32);
  }
  // No element above `highest` is asked for any more.
  __device__ __forceinline__ void MoveTo(int32_t highest) {
    if (highest >= base_) return;
    base_ -= 32;
    upper_ = lower_;
    lower_ = Load(base_ - 32);
  }
  // Each lane's own element, within the window; unspecified outside [first, end).
  __device__ __forceinline__ int32_t At(int32_t element) const {
    const int32_t upper = __shfl_sync(0xffffffff, upper_, element & 31);
    const int32_t lower = __shfl_sync(0xffffffff, lower_, element & 31);
    return element >= base_ ? upper : lower;
  }

 private:
  __device__ __forceinline__ int32_t Load(int32_t base) const {
    const int32_t element = base + static_cast<int32_t>(threadIdx.x & 31);
    // Not __ldg: the table may have been fetched while this kernel was already set up.
    return element >= first_ && element < end_ ? table_[element] : 0;
  }

  const int32_t* table_;
  int32_t first_, end_, base_;
  int32_t upper_, lower_;
};

// Loads the passes of one item, from the last to the first. All lanes of the producer warp execute
// everything together.
template <typename Shape>
struct BlockLoader {
  // Boxes have at least 16 tokens.
  static_assert(Shape::kKeys / 16 * Shape::kPanels <= 32, "more boxes than lanes");

  const BlockMaps& maps;
  const StepParams& step;
  char* memory;
  uint32_t shared;
  uint64_t policy;
  int32_t plane;
  int lane;
  // The lane's box of every tile; the lanes from boxes * kPanels on have none.
  int32_t box_row;      // the box's first row in the tile
  uint32_t box_offset;  // in a stage
  int32_t box_column;
  bool has_box;

  RingPosition<Shape::kStages> k, v;
  RingPosition<Shape::kJobs> job;
  TableWindow window;
  KeySpan keys;  // that exist for the item's queries
  int32_t kv_head;

  __device__ __forceinline__ BlockLoader(const BlockMaps& block_maps, const StepParams& params,
                                         char* shared_memory, uint32_t shared_address,
                                         uint64_t cache_policy, int32_t plane_index)
      : maps(block_maps),
        step(params),
        memory(shared_memory),
        shared(shared_address),
        policy(cache_policy),
        plane(plane_index),
        lane(threadIdx.x & 31) {
    const int boxes = Shape::kKeys >> maps.box_shift;
    const int box = lane / Shape::kPanels;
    const int panel = lane % Shape::kPanels;
    has_box = box < boxes;
    box_row = has_box ? box << maps.box_shift : 0;
    box_offset = panel * Shape::kKvPanelBytes + box_row * kPanelRowBytes;
    box_column = panel * kPanelColumns;
  }

  // The item's keys and the row's block table. `tile_end` is the tile after the item's last one.
  __device__ __forceinline__ void Begin(const int32_t* table, const KeySpan& visible,
                                        int32_t tile_end, int32_t head) {
    keys = visible;
    kv_head = head;
    const int64_t tiles_end = int64_t{tile_end} * Shape::kKeys;
    const int32_t end = tiles_end < keys.end ? static_cast<int32_t>(tiles_end) : keys.end;
    if (keys.begin < end) {
      window.Begin(table, keys.begin >> step.block_shift, ((end - 1) >> step.block_shift) + 1);
    } else {
      window.Begin(table, 0, 0);
    }
  }

  // The lane's token of the plane for a pass over keys [first, end); a token that does not exist if
  // the pass has no key of the box that the item sees.
  __device__ __forceinline__ int32_t TokenOf(int32_t first, int32_t end) {
    const int32_t last = min(first + Shape::kKeys, end) - 1;
    window.MoveTo(max(last, 0) >> step.block_shift);
    const int32_t key = first + box_row;
    const int32_t block = window.At(key >> step.block_shift);
    const bool seen = key < end && key + (1 << maps.box_shift) > keys.begin;
    return seen ? (block << step.block_shift) + (key & ((1 << step.block_shift) - 1))
                : step.plane_tokens;
  }

  __device__ __forceinline__ void StartBoxes(uint32_t buffer, uint32_t barrier, const void* map,
                                             int32_t token) {
    if (has_box) {
      CopyBox(buffer + box_offset, map, barrier, box_column, kv_head, token, plane, policy);
    }
  }

  __device__ __forceinline__ void ClaimKeys() {
    WaitBarrier(shared + Shape::kKEmpty + 8 * k.stage, k.phase ^ 1);
  }
  // After ClaimKeys.
  __device__ __forceinline__ void LoadKeys(int32_t token, const KeyPass& pass) {
    if (lane == 0) {
      KeyTile tile;
      tile.flags = (pass.last ? KeyTile::kLast : 0) | (pass.masked ? KeyTile::kMasked : 0);
      tile.lower = pass.lower;
      tile.upper = pass.upper;
      tile.columns = pass.columns;
      reinterpret_cast<KeyTile*>(memory + Shape::kKeyTiles)[k.stage] = tile;
    }
    const uint32_t barrier = shared + Shape::kKFull + 8 * k.stage;
    if (lane == 0) ArriveExpecting(barrier, Shape::kKvBytes);
    __syncwarp();
    StartBoxes(shared + Shape::kK + k.stage * Shape::kKvBytes, barrier, &maps.k, token);
    k.Advance();
  }

  // `token`, `first`: as for the keys of the tile.
  __device__ __forceinline__ void LoadValues(int32_t token, int32_t first) {
    WaitBarrier(shared + Shape::kVEmpty + 8 * v.stage, v.phase ^ 1);
    const uint32_t buffer = shared + Shape::kV + v.stage * Shape::kKvBytes;
    const int32_t box = (1 << maps.box_shift) - 1;
    // Boxes that begin or end outside the keys: rows of the tile.
    const int32_t low = keys.begin - first;
    const int32_t high = keys.end - first;
    const bool clears_low = low > 0 && low < Shape::kKeys && (low & box) != 0;
    const bool clears_high = high > 0 && high < Shape::kKeys && (high & box) != 0;
    if (clears_low || clears_high) {
      const uint32_t barrier = shared + Shape::kJobFull + 8 * job.stage;
      if (lane == 0) {
        reinterpret_cast<ClearJob*>(memory + Shape::kClearJobs)[job.stage] = {
            static_cast<int32_t>(v.stage), clears_low ? low & ~box : 0, clears_low ? low : 0,
            clears_high ? high : 0, clears_high ? (high | box) + 1 : 0};
        ArriveExpecting(barrier, Shape::kKvBytes);
      }
      __syncwarp();
      StartBoxes(buffer, barrier, &maps.v, token);
      job.Advance();
    } else {
      const uint32_t barrier = shared + Shape::kVFull + 8 * v.stage;
      ArriveWarpExpecting(barrier, Shape::kKvBytes, lane);
      __syncwarp();
      StartBoxes(buffer, barrier, &maps.v, token);
    }
    v.Advance();
  }

  // Ends the clearing warp, after the last item.
  __device__ __forceinline__ void EndClearing() {
    if (lane == 0) {
      reinterpret_cast<ClearJob*>(memory + Shape::kClearJobs)[job.stage].stage = -1;
      Arrive(shared + Shape::kJobFull + 8 * job.stage);
    }
  }
};

// The clearing warp.
template <typename Shape>
__device__ __forceinline__ void RunClearing(char* memory, uint32_t shared) {
  const int lane = threadIdx.x & 31;
  RingPosition<Shape::kJobs> position;
#pragma unroll 1
  while (true) {
    WaitBarrier(shared + Shape::kJobFull + 8 * position.stage, position.phase);
    const ClearJob job =
        reinterpret_cast<const ClearJob*>(memory + Shape::kClearJobs)[position.stage];
    if (job.stage < 0) break;
    char* const values = memory + Shape::kV + job.stage * Shape::kKvBytes;
    const auto clear = [&](int begin, int end) {
#pragma unroll 1
      for (int i = begin * 8 + lane; i < end * 8; i += 32) {
#pragma unroll
        for (int panel = 0; panel < Shape::kPanels; ++panel) {
          reinterpret_cast<uint4*>(values + panel * Shape::kKvPanelBytes)[i] = uint4{};
        }
      }
    };
    clear(job.low_begin, job.low_end);
    clear(job.high_begin, job.high_end);
    FenceBulkReads();
    cuda::sm90::ArriveWarp(shared + Shape::kVFull + 8 * job.stage, lane);
    position.Advance();
  }
}

// The barriers of `Shape`. One thread, before the block's barrier.
template <typename Shape>
__device__ __forceinline__ void InitPagedBarriers(uint32_t shared) {
  using cuda::sm90::ArrivalsOf;
  using cuda::sm90::InitBarrier;
  InitBarrier(shared + Shape::kQFull, 1);
  InitBarrier(shared + Shape::kQEmpty, ArrivalsOf(32) * Shape::kConsumerWarps);
  for (int stage = 0; stage < Shape::kStages; ++stage) {
    InitBarrier(shared + Shape::kKFull + 8 * stage, 1);
    InitBarrier(shared + Shape::kKEmpty + 8 * stage, ArrivalsOf(32) * Shape::kConsumerWarps);
    InitBarrier(shared + Shape::kVFull + 8 * stage, ArrivalsOf(32));
    InitBarrier(shared + Shape::kVEmpty + 8 * stage, ArrivalsOf(32) * Shape::kConsumerWarps);
  }
  for (int job = 0; job < Shape::kJobs; ++job) InitBarrier(shared + Shape::kJobFull + 8 * job, 1);
  cuda::sm90::FenceBarrierInit();
}

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_BLOCK_LOADS_CUH_
