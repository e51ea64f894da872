// The calls of one operation, made ready for a CUDA stream: kernels chosen, tile tables
// on the device, scratch set aside.
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

// What the calls of an operation share on the device: a word that ends them, their
// tables, and scratch that one call after the other uses. Thread safe.
class CallWorkspace {
 public:
  CallWorkspace(CudaEventPool* events, std::unique_ptr<DeviceBuffer> memory);
  // Waits for a stop on its way.
  ~CallWorkspace();

  char* data() const { return static_cast<char*>(memory_->data()); }
  const uint32_t* stop_word() const { return reinterpret_cast<const uint32_t*>(data()); }

  // Sets the stop word, once: queued kernels end as soon as their blocks read it.
  // `stream` is used for nothing else; `one` is pinned and holds 1. A copy engine writes
  // the word, so that it arrives also while every SM is taken.
  absl::Status Stop(cudaStream_t stream, const uint32_t* one);

 private:
  CudaEventPool* const events_;
  const std::unique_ptr<DeviceBuffer> memory_;
  absl::Mutex mutex_;
  std::shared_ptr<CudaEvent> stopped_ ABSL_GUARDED_BY(mutex_);
};

class PreparedCudaCall;

// The in-order queue that calls are started on: the device's.
class CudaCallQueue {
 public:
  virtual ~CudaCallQueue() = default;
  // As Device::Start.
  virtual EventRef StartCall(const PreparedCudaCall& call, StartAfter after,
                             RunControl* control) = 0;
};

class PreparedCudaCall : public PreparedCall {
 public:
  // std::monostate: nothing is to be done.
  using Kernel = std::variant<std::unique_ptr<cuda::PreparedKernel>, DeltaCall, SinkGradientCall,
                              ZeroCall, AddCall, ConvertCall, MergeCall, CopyCall, std::monostate>;

  // Tables of the kernel lie in the workspace from `tables_offset`, scratch from
  // `scratch_offset`. `queue` outlives the call.
  PreparedCudaCall(CudaCallQueue* queue, Kernel kernel, std::shared_ptr<CallWorkspace> workspace,
                   int64_t tables_offset, int64_t scratch_offset);

  KernelName kernel() const override;
  EventRef Start(StartAfter after, RunControl* control) const override {
    return queue_->StartCall(*this, std::move(after), control);
  }

  // Enqueues the kernels. INTERNAL if a launch fails. `awaits_keys`: they are to wait for late keys
  // until keys_word() is not 0; REQUIRES that there is such a word.
  absl::Status Launch(cudaStream_t stream, bool awaits_keys) const;

  // Device memory: a word that is 0 between launches, and that a launch which was told to waits for
  // before it reads late keys. Null: the kernel does not wait.
  uint32_t* keys_word() const;

  const std::shared_ptr<CallWorkspace>& workspace() const { return workspace_; }

 private:
  CudaCallQueue* const queue_;
  const Kernel kernel_;
  const std::shared_ptr<CallWorkspace> workspace_;
  const int64_t tables_offset_;
  const int64_t scratch_offset_;
};

// What decides which kernels a device's calls get.
struct KernelChoice {
  cuda::DeviceInfo device;
  cuda::KernelTuning tuning;
};

// Device::WorkspaceBytes, TakesLateKeys, Prepare, served_calls and served_options.
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
