// CudaDevice: one GPU. Compute calls run in order on one stream, after the events they wait for.
// Calls that preempt run on a stream of higher priority: their blocks start as soon as blocks of
// the other stream's kernel end. Blocks of Hopper forward kernels end with the call. Tensor bytes
// travel on two copy streams (cuda_staging.h).
//
// A service thread polls what is enqueued: it counts progress, passes an operation's stop on to its
// kernels, and advances downloads. It sleeps while the device is idle. No call of a run waits for
// it.
//
// Tests: cuda_pin_test.cc
#ifndef RINGATTN_WORKER_DEVICE_CUDA_CUDA_DEVICE_H_
#define RINGATTN_WORKER_DEVICE_CUDA_CUDA_DEVICE_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/base/monotonic_time.h"
#include "worker/device/cuda/cuda_calls.h"
#include "worker/device/cuda/cuda_event.h"
#include "worker/device/cuda/cuda_imports.h"
#include "worker/device/cuda/cuda_memory.h"
#include "worker/device/cuda/cuda_staging.h"
#include "worker/device/device.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker {

// Returns the number of devices that this process can use. Must be the first use of CUDA in a
// process, because it configures the driver. Returns UNAVAILABLE with CUDA's reason if there is no
// driver or device.
absl::StatusOr<int> CudaDeviceCount();

// Returns the bytes of a device that no process uses, or INVALID_ARGUMENT if there is no such
// device.
absl::StatusOr<int64_t> CudaFreeBytes(int device);

struct CudaDeviceOptions {
  int device = 0;
  int64_t pinned_pool_bytes = int64_t{256} << 20;
  // Allocates buffers in regions that the other processes of a ring can map (CudaMemory).
  bool in_regions = false;
  RegionSharing region_sharing = RegionSharing::kVmmOrIpc;
  // Memory limit for requests. Regions do not grow beyond it ahead of need, except up to a whole
  // GiB.
  int64_t memory_limit_bytes = 0;
  // The kernel family that serves every call, for debugging; empty: the first suitable one. Calls
  // that the family does not serve are rejected.
  std::string kernel_family;
  // Makes the device's K/V caches (MakeCudaKvCaches); null: it serves none.
  std::unique_ptr<DeviceKvCaches> (*make_kv_caches)(CudaEventPool* events, Device* device,
                                                    const cuda::DeviceInfo& info) = nullptr;
  // The context is unusable (CudaEventPool::SetOnBroken); the process should end.
  std::function<void(const std::string& what)> on_broken;
};

// Thread safe, as Device requires. Can wait for CudaEvents only.
class CudaDevice : public Device, private CudaCallQueue {
 public:
  // Errors:
  //   INVALID_ARGUMENT    no such device or kernel family
  //   RESOURCE_EXHAUSTED  no memory for the pinned pool
  //   UNIMPLEMENTED       compute capability below 8.0
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Create(CudaDeviceOptions options);
  ~CudaDevice() override;

  absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes) override;
  absl::StatusOr<int64_t> WorkspaceBytes(const std::vector<KernelCall>& calls) const override;
  std::vector<ServedCalls> served_calls() const override { return CudaServedCalls(kernels_); }
  std::vector<std::string> served_options() const override { return CudaServedOptions(kernels_); }
  // Kernels choose their own tiles; splitting the keys of a row can be disabled.
  TuningChoices tuning_offer() const override { return {{}, {}, {1}}; }
  bool TakesLateKeys(const ForwardCall& call) const override;
  DeviceKvCaches* kv_caches() override { return kv_caches_.get(); }
  absl::StatusOr<PreparedCalls> Prepare(std::vector<KernelCall> calls) override;
  bool waits_for_transfer() const override;
  absl::Status CopyFromHost(void* device, const void* host, int64_t bytes) override;
  absl::Status CopyToHost(void* host, const void* device, int64_t bytes) override;
  absl::StatusOr<EventRef> StartCopyFromHost(void* device, const void* host,
                                             int64_t bytes) override;
  absl::Status CopyAllToHost(absl::Span<const DeviceCopy> copies) override;
  absl::StatusOr<std::unique_ptr<Upload>> BeginUpload(std::vector<UploadTarget> targets) override;
  absl::StatusOr<std::unique_ptr<HostPin>> PinHost(void* data, int64_t bytes) override;
  absl::StatusOr<EventRef> CopyToPinned(void* pinned, const void* device, int64_t bytes) override;
  std::unique_ptr<Download> BeginDownload(std::vector<DeviceRange> ranges,
                                          std::function<void()> on_ready) override;
  bool imports_memory() const override { return true; }
  bool preempts() const override { return true; }
  absl::StatusOr<std::unique_ptr<ImportedMemory>> ImportMemory(
      const SharedAllocation& allocation) override;
  absl::StatusOr<EventRef> CopyImported(absl::Span<const DeviceCopy> pieces,
                                        ImportedCopy direction) override;
  DeviceUsage usage() const override;
  std::string description() const override { return description_; }

  // Empty unless in_regions is set.
  std::vector<DeviceRegion> regions() const { return memory_->regions(); }
  // See CudaMemory.
  const std::string& why_not_vmm() const { return memory_->why_not_vmm(); }

 private:
  struct InFlight {
    std::shared_ptr<CudaEvent> event;
    std::vector<EventRef> after;
    std::shared_ptr<CallWorkspace> workspace;
    bool preempts = false;
  };

  CudaDevice(CudaEventPool* events, CudaDeviceOptions options);
  absl::Status Init();
  EventRef StartCall(const PreparedCudaCall& call, StartAfter after, RunControl* control) override;
  // Enqueues the call. Afterwards after.all has every event that the call waits for, and
  // after.bring_keys has been called.
  absl::Status Enqueue(const PreparedCudaCall& call, StartAfter& after, const RunControl& control,
                       const std::shared_ptr<CudaEvent>& event);
  // Returns the stream for a call that does not preempt. It waits for the calls started before, or
  // with after.overlaps_previous for all but the last of them.
  absl::StatusOr<cudaStream_t> NextStream(const StartAfter& after);
  // Enqueues the transfers of the late keys of a call that was launched on `stream`, and the writes
  // that signal the kernel that they have arrived. The caller records the call's end after both.
  absl::Status BringKeys(const PreparedCudaCall& call, cudaStream_t stream, const CudaEvent& begun,
                         StartAfter& after);
  // Created for the first client that shares memory, because most workers have none.
  absl::StatusOr<CudaImports*> Imports() ABSL_LOCKS_EXCLUDED(imports_mutex_);
  // Checks after a failed call whether the context is unusable.
  void CheckContext(const absl::Status& failure);
  void ServiceLoop();
  // A reader of a download waits for a copy, which the service thread must notice soon.
  void OnReaderWaits();
  // Removes finished calls and stops those that should end. Returns false if none is left.
  bool ServiceCalls();

  CudaEventPool* const events_;
  const CudaDeviceOptions options_;
  std::string description_;
  KernelChoice kernels_;
  // CUDA_LAUNCH_BLOCKING is set: a launch returns when the kernel has ended, so no kernel may wait
  // for work that is enqueued later.
  bool blocking_launches_ = false;
  std::unique_ptr<CudaMemory> memory_;
  std::unique_ptr<CudaStaging> staging_;
  std::unique_ptr<DeviceKvCaches> kv_caches_;
  cudaStream_t compute_ = nullptr;
  cudaStream_t overlapping_ = nullptr;  // calls that overlap one on compute_
  // The last call on either, and its stream. For the thread that starts them.
  std::shared_ptr<const CudaEvent> last_call_;
  cudaStream_t last_stream_ = nullptr;
  cudaStream_t preempting_ = nullptr;  // calls that preempt those on compute_
  cudaStream_t stop_stream_ = nullptr;
  cudaStream_t keys_stream_ = nullptr;  // carries the late-key signals, which wait for transfers
  uint32_t* numbers_ = nullptr;         // pinned; from 1 to kMostArrivals

  absl::Mutex imports_mutex_;
  std::unique_ptr<CudaImports> imports_ ABSL_GUARDED_BY(imports_mutex_);

  mutable absl::Mutex mutex_;
  absl::CondVar wake_;
  std::deque<InFlight> in_flight_ ABSL_GUARDED_BY(mutex_);
  bool awake_ ABSL_GUARDED_BY(mutex_) = false;  // the service thread may have work
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  Wakeup end_pause_;    // of the service thread
  std::thread thread_;  // last: starts when the other members exist
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_CUDA_DEVICE_H_
