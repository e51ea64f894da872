#include "worker/comm/wire_cuda/slot_pool.h"

#include <cuda_runtime_api.h>

#include "worker/comm/wire/wire_frame.h"
#include "worker/device/cuda/cuda_status.h"

namespace ringattn::worker {

SlotPool::~SlotPool() {
  if (memory_ != nullptr) (void)cudaFreeHost(memory_);
}

absl::Status SlotPool::Open(int slots) {
  void* memory = nullptr;
  absl::Status status = CudaStatus(
      cudaHostAlloc(&memory, slots * kChunkBytes, cudaHostAllocPortable), "cudaHostAlloc");
  if (!status.ok()) return status;
  memory_ = static_cast<char*>(memory);
  absl::MutexLock lock(&mutex_);
  // The first slots are used most.
  for (int slot = slots - 1; slot >= 0; --slot) free_.push_back(memory_ + slot * kChunkBytes);
  return absl::OkStatus();
}

char* SlotPool::Take() {
  absl::MutexLock lock(&mutex_);
  if (free_.empty()) return nullptr;
  char* const slot = free_.back();
  free_.pop_back();
  return slot;
}

void SlotPool::Return(char* slot) {
  absl::MutexLock lock(&mutex_);
  free_.push_back(slot);
}

}  // namespace ringattn::worker
