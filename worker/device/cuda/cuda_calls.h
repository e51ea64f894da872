// The prepared calls of one operation for a CUDA stream: selected kernels, tile tables on the
// device and scratch memory.
//
// Tests: cuda_calls_test.cc, cuda_late_keys_test.cc
#ifndef RINGATTN_WORKER_DEVICE_CUDA_CUDA_CALLS_H_
#define RINGATTN_WORKER_DEVICE_CUDA_CUDA_CALLS_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "worker/device/cuda/cuda_event.h"
#include "worker/device/cuda/cuda_memory.h"
#include "worker/device/device.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker {

// Device memory that the calls of an operation share: a stop word, their tables, and scratch that
// the calls use one after another. Thread safe.
class CallWorkspace {
 public:
  CallWorkspace(CudaEventPool* events, std::unique_ptr<DeviceBuffer> memory);
  // Waits for a pending write of the stop word.
  ~CallWorkspace();

  char* data() const { return static_cast<char*>(memory_->data()); }
  const uint32_t* stop_word() const { return reinterpret_cast<const uint32_t*>(data()); }

  // Sets the stop word; later calls have no effect. Queued kernels end as soon as their blocks read
  // it. `stream` must be used for nothing else; `one` is pinned and holds 1. A copy engine writes
  // the word, so it arrives even if kernels occupy every SM.
  absl::Status Stop(cudaStream_t stream, const uint32_t* one);

 private:
  CudaEventPool* const events_;
  const std::unique_ptr<DeviceBuffer> memory_;
  absl::Mutex mutex_;
  std::shared_ptr<CudaEvent> stopped_ ABSL_GUARDED_BY(mutex_);
};

class PreparedCudaCall;

// The in-order queue of a device, on which calls are started.
class CudaCallQueue {
 public:
  virtual ~CudaCallQueue() = default;
  // See Device::Start.
  virtual EventRef StartCall(const PreparedCudaCall& call, StartAfter after,
                             RunControl* control) = 0;
};

class PreparedCudaCall : public PreparedCall {
 public:
  // std::monostate: nothing to do.
  using Kernel = std::variant<std::unique_ptr<cuda::PreparedKernel>, DeltaCall, SinkGradientCall,
                              ZeroCall, AddCall, ConvertCall, MergeCall, CopyCall, std::monostate>;

  // The kernel's tables start at `tables_offset` in the workspace, its scratch at `scratch_offset`.
  // `queue` must outlive the call.
  PreparedCudaCall(CudaCallQueue* queue, Kernel kernel, std::shared_ptr<CallWorkspace> workspace,
                   int64_t tables_offset, int64_t scratch_offset);

  KernelName kernel() const override;
  bool adds_atomically() const override;
  EventRef Start(StartAfter after, RunControl* control) const override {
    return queue_->StartCall(*this, std::move(after), control);
  }

  // Enqueues the kernels. Returns INTERNAL if a launch fails. With `awaits_keys` they wait for late
  // keys until keys_word() has their number (KvBlock::late). REQUIRES: keys_word() exists in that
  // case.
  absl::Status Launch(cudaStream_t stream, bool awaits_keys) const;

  // Returns a word in device memory that is 0 between launches. A launch with `awaits_keys` waits
  // for it before it reads late keys. Null if the kernel cannot wait.
  uint32_t* keys_word() const;

  const std::shared_ptr<CallWorkspace>& workspace() const { return workspace_; }

 private:
  CudaCallQueue* const queue_;
  const Kernel kernel_;
  const std::shared_ptr<CallWorkspace> workspace_;
  const int64_t tables_offset_;
  const int64_t scratch_offset_;
};

// Determines which kernels a device's calls get.
struct KernelChoice {
  cuda::DeviceInfo device;
  cuda::KernelTuning tuning;
};

// Implementations of Device::WorkspaceBytes, TakesLateKeys, Prepare, served_calls and
// served_options.
absl::StatusOr<int64_t> CudaWorkspaceBytes(const std::vector<KernelCall>& calls,
                                           const KernelChoice& choice);
bool CudaTakesLateKeys(const ForwardCall& call, const KernelChoice& choice);
absl::StatusOr<PreparedCalls> PrepareCudaCalls(const std::vector<KernelCall>& calls,
                                               const KernelChoice& choice, CudaEventPool* events,
                                               CudaMemory* memory, CudaCallQueue* queue);
std::vector<ServedCalls> CudaServedCalls(const KernelChoice& choice);
std::vector<std::string> CudaServedOptions(const KernelChoice& choice);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_CUDA_CALLS_H_
