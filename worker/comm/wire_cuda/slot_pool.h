// SlotPool: pinned host memory in slots of one chunk.
#ifndef RINGATTN_WORKER_COMM_WIRE_CUDA_SLOT_POOL_H_
#define RINGATTN_WORKER_COMM_WIRE_CUDA_SLOT_POOL_H_

#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace ringattn::worker {

// Thread safe.
class SlotPool {
 public:
  SlotPool() = default;
  ~SlotPool();
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  // Allocates the slots. Returns INTERNAL if memory cannot be pinned. The device is current.
  absl::Status Open(int slots);

  char* Take();  // null: none is free
  void Return(char* slot);

 private:
  char* memory_ = nullptr;
  absl::Mutex mutex_;
  std::vector<char*> free_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_CUDA_SLOT_POOL_H_
