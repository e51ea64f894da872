// Memory and the stream that all K/V caches of a CUDA device share.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_CUDA_KV_SCRATCH_H_
#define RINGATTN_WORKER_DEVICE_CUDA_CUDA_KV_SCRATCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "common/base/limits.h"
#include "worker/device/cuda/cuda_event.h"
#include "worker/device/device.h"

namespace ringattn::worker {

// Not thread safe: Init runs before the caches use it, everything else on the engine's thread.
class CudaKvScratch {
 public:
  // Device memory, in bytes. Limits::max_step_bytes bounds q, k and v of a call; a batch class
  // rounds them up.
  static constexpr int64_t kInputBytes = 128 * kMiB;
  // fp32 results of as many bf16 queries, and lse.
  static constexpr int64_t kOutputBytes = 160 * kMiB;
  static constexpr int64_t kWorkspaceBytes = 96 * kMiB;
  // Of the workspace, for the counters of all launches (BatchClass::counter_bytes).
  static constexpr int64_t kCounterBytes = 4 * kMiB;
  static constexpr int64_t kTotalBytes = kInputBytes + kOutputBytes + kWorkspaceBytes;
  // Rows and tables of up to so many bytes are copied to the device from pinned memory.
  static constexpr int64_t kPinnedTableBytes = kMiB;

  explicit CudaKvScratch(CudaEventPool* events) : events_(events) {}
  ~CudaKvScratch();
  CudaKvScratch(const CudaKvScratch&) = delete;
  CudaKvScratch& operator=(const CudaKvScratch&) = delete;

  // Call once, before anything else. Errors: those of CUDA; RESOURCE_EXHAUSTED without memory.
  absl::Status Init(Device* device);

  CudaEventPool* events() const { return events_; }
  cudaStream_t stream() const { return stream_; }
  char* input() const { return static_cast<char*>(input_->data()); }
  char* output() const { return static_cast<char*>(output_->data()); }
  char* workspace() const { return static_cast<char*>(workspace_->data()); }

  // Waits for all work of the stream. Reports an unusable context.
  absl::Status Wait();
  // The number of the next launch, which its kernels store at done_word().
  uint32_t NextNumber() { return ++number_; }
  uint32_t* done_word() const { return done_word_; }
  // Waits until the launch with the latest number has stored it. Its results and its input are free
  // then, although the stream may not be idle yet.
  absl::Status WaitForSignal();
  // Passes `status` on. Ends the process's use of a context that an error has broken.
  absl::Status Check(absl::Status status);

  // Pinned memory of kSmallCallBytes, kSmallCallBytes and kPinnedTableBytes.
  char* pinned_input = nullptr;
  char* pinned_output = nullptr;
  char* pinned_tables = nullptr;
  // The first bytes of pinned_tables from which copies may be in progress.
  int64_t pinned_table_bytes = 0;
  // The workspace's counters are zero once the stream's work has ended.
  bool counters_are_zero = false;

 private:
  CudaEventPool* const events_;
  cudaStream_t stream_ = nullptr;
  uint32_t* done_word_ = nullptr;  // pinned memory, alone in its cache line
  uint32_t number_ = 0;
  std::unique_ptr<DeviceBuffer> input_, output_, workspace_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_CUDA_KV_SCRATCH_H_
