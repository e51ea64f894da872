// Device: memory and an in-order queue of compute calls. One per worker process.
#ifndef RINGATTN_WORKER_DEVICE_DEVICE_H_
#define RINGATTN_WORKER_DEVICE_DEVICE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/attention/dtype.h"
#include "worker/device/device_kv_cache.h"
#include "worker/device/event.h"
#include "worker/device/host_pin.h"
#include "worker/device/imported_memory.h"
#include "worker/device/served_calls.h"
#include "worker/device/staging.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/kernel_name.h"

namespace ringattn::worker {

// Device memory, freed on destruction. REQUIRES on destruction: no enqueued work uses it.
class DeviceBuffer {
 public:
  virtual ~DeviceBuffer() = default;
  virtual void* data() = 0;  // device address, aligned to 64 bytes; null if empty
  virtual int64_t bytes() const = 0;
};

// Shared by all work of one running operation.
struct RunControl {
  // Set before the first call starts: the calls go before those of other operations
  // (Device::Preempt).
  bool preempts = false;
  // Set before the first call starts: the thread that starts a call may run it and waits meanwhile.
  // Only for short calls. CPU devices then save two changes of threads per call.
  bool runs_on_caller = false;
  // Set before the first call starts: threads that wait for its calls poll without sleeping, for at
  // most kLongestPolling. Only for short calls on devices with separate memory.
  bool polls = false;
  // Set once. Unfinished calls then end at once as if they had succeeded, with undefined results.
  // Transfers still take place, so that peers are not stranded.
  std::atomic<bool> stop{false};
  // Grows with every tile (CPU) or call (CUDA) and every completed transfer.
  std::atomic<int64_t> progress{0};
  // For progress reports: the work that calls have reported (worker/kernels/work.h; CPU calls
  // report each tile, CUDA calls nothing), and how many calls have been observed to end, in program
  // order.
  std::atomic<int64_t> work{0};
  std::atomic<int64_t> calls_done{0};

  // Prepares for another run. REQUIRES: all work of the last one has ended.
  void Reset() {
    preempts = runs_on_caller = polls = false;
    stop = false;
    progress = work = calls_done = 0;
  }
};

// A call that has been prepared and can be started any number of times. Immutable; thread safe.
// Must outlive the events of its starts; the device must outlive it.
class PreparedCall {
 public:
  PreparedCall() = default;
  virtual ~PreparedCall() = default;
  PreparedCall(const PreparedCall&) = delete;
  PreparedCall& operator=(const PreparedCall&) = delete;

  // The kernel that computes the call.
  virtual KernelName kernel() const { return {}; }
  // Whether the call's additions to its sums are atomic and it needs no workspace that it shares
  // with other calls. It may then overlap another such call (StartAfter::overlaps_previous).
  virtual bool adds_atomically() const { return false; }

  // Device::Start on the device that prepared the call.
  virtual EventRef Start(StartAfter after, RunControl* control) const = 0;
};

using PreparedCalls = std::vector<std::unique_ptr<const PreparedCall>>;

// Accepted values of AttentionProblem::tuning.
struct TuningChoices {
  std::vector<int32_t> tile_q;
  std::vector<int32_t> tile_kv;
  std::vector<int32_t> key_splits;
};

// Computes the steps of K/V caches in host memory next to the device's queue, so that a step does
// not wait for a running operation. Used by one thread.
class StepKernels {
 public:
  virtual ~StepKernels() = default;

  // Runs `call`, a ForwardCall, to its end. CANCELLED soon after `stop` is set; the results are
  // undefined then.
  virtual absl::Status Run(const KernelCall& call, const std::atomic<bool>& stop) = 0;
};

// Current memory usage of a device, for metrics.
struct DeviceUsage {
  int64_t memory_used_bytes = 0;   // of the whole device, by all processes
  int64_t allocated_bytes = 0;     // by this process, for operations
  int64_t staging_used_bytes = 0;  // of the staging pool
};

// Thread safe. One thread starts work, which runs in that order. Another thread may start work with
// RunControl::preempts; that work has a separate order.
class Device {
 public:
  virtual ~Device() = default;

  // Returns uninitialised memory, or RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes) = 0;

  // Returns the device memory that Prepare(calls) will take. Operand addresses may be null. Returns
  // INVALID_ARGUMENT if the device has no kernel for a call.
  virtual absl::StatusOr<int64_t> WorkspaceBytes(const std::vector<KernelCall>& calls) const {
    return 0;
  }

  // Returns which kernels serve which calls; each entry has a separate rate. Every kind of call
  // that the device computes is in exactly one entry by the rule of RateOf (kernel_rate.h).
  virtual std::vector<ServedCalls> served_calls() const { return {}; }

  // Returns the names of the v1::AttentionOptions fields that not every device supports
  // (DeviceOptions) and that this one does.
  virtual std::vector<std::string> served_options() const { return {}; }

  // Returns the values of Tuning that the device accepts; empty for fields that its kernels do not
  // have.
  virtual TuningChoices tuning_offer() const { return {}; }

  // Returns whether the kernel of this call can start before its late keys (KvBlock::late) have
  // arrived and wait for them itself. Addresses may be null.
  virtual bool TakesLateKeys(const ForwardCall& call) const { return false; }

  // Prepares the calls of one operation and allocates the memory that they need in addition to
  // their operands, so that starting them allocates nothing. The calls share that memory in queue
  // order. Returns RESOURCE_EXHAUSTED if there is none.
  virtual absl::StatusOr<PreparedCalls> Prepare(std::vector<KernelCall> calls) = 0;

  // Enqueues `call`, which this device prepared, after everything started before and after `after`.
  // (With after.overlaps_previous it ends after the call before it, but need not begin after its
  // end.) If one of `after` failed, the call does not run and fails with the same status. A device
  // that learns of the failure later runs the call on undefined data, so callers must check earlier
  // events first. Never blocks or allocates device memory. `call` and `control` must outlive the
  // event.
  virtual EventRef Start(const PreparedCall& call, StartAfter after, RunControl* control) {
    return call.Start(std::move(after), control);
  }

  // Begins or ends a preemption, during which calls with RunControl::preempts start. A device whose
  // threads compute pauses all other calls meanwhile, each at its next slice of work, which lasts
  // at most a few milliseconds, but for no longer than kLongestPause. A device with its own
  // scheduler gives the preempting calls priority at all times and does nothing here. Results do
  // not depend on it. Never blocks.
  virtual void Preempt(bool active) {}
  // Whether a preemption pauses all other calls.
  virtual bool pauses() const { return false; }
  // Whether calls with RunControl::preempts are served.
  virtual bool preempts() const { return false; }

  // K/V caches in the device's own memory. Null if there are none.
  virtual DeviceKvCaches* kv_caches() { return nullptr; }
  // For K/V caches in host memory, if kv_caches() is null. UNIMPLEMENTED: the device serves none.
  virtual absl::StatusOr<std::unique_ptr<StepKernels>> MakeStepKernels() {
    return absl::UnimplementedError(description() + " serves no K/V caches");
  }

  // Returns true while the head of the queue waits for one of its `after` events, that is, for a
  // transfer, or while a running call's late keys have not arrived.
  virtual bool waits_for_transfer() const = 0;

  // Whether the device's memory is host memory, so that the CPU copies tensors.
  virtual bool is_host_memory() const { return false; }

  // Copies between host and device memory, host-synchronous. They take microseconds and need no
  // staging memory. For tests and small data; tensors use the next two.
  virtual absl::Status CopyFromHost(void* device, const void* host, int64_t bytes) = 0;
  virtual absl::Status CopyToHost(void* host, const void* device, int64_t bytes) = 0;
  // Enqueues a copy of a few hundred KiB to device memory. `host` must stay valid until the event.
  // Returns null if the copy is done.
  virtual absl::StatusOr<EventRef> StartCopyFromHost(void* device, const void* host,
                                                     int64_t bytes) {
    absl::Status status = CopyFromHost(device, host, bytes);
    if (!status.ok()) return status;
    return EventRef();
  }
  // CopyToHost for several ranges. A device with its own memory waits once for all of them.
  virtual absl::Status CopyAllToHost(absl::Span<const DeviceCopy> copies) {
    for (const DeviceCopy& copy : copies) {
      absl::Status status = CopyToHost(copy.to, copy.from, copy.bytes);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Transfers tensor bytes from and to the wire (staging.h). The caller keeps an upload's targets
  // until its events are done, and a download's ranges until the download is destroyed. `on_ready`
  // is called on another thread, without locks, when data has arrived after Next() returned
  // nothing. It is not called after the download's destruction, which waits for a call in progress.
  virtual absl::StatusOr<std::unique_ptr<Upload>> BeginUpload(std::vector<UploadTarget> targets) {
    return MakeHostUpload(std::move(targets));
  }
  virtual std::unique_ptr<Download> BeginDownload(std::vector<DeviceRange> ranges,
                                                  std::function<void()> on_ready) {
    return MakeHostDownload(std::move(ranges));
  }

  // Pins [data, data + bytes) of this process's memory, so that the device's copies access it
  // directly. The memory must stay mapped while the pin exists; `data` must be page-aligned. Takes
  // milliseconds, during which other driver calls may block. Returns UNIMPLEMENTED if pinning does
  // not help this device, RESOURCE_EXHAUSTED if the system allows no more.
  virtual absl::StatusOr<std::unique_ptr<HostPin>> PinHost(void* data, int64_t bytes) {
    return absl::UnimplementedError("this device computes in host memory");
  }
  // Enqueues a copy of device memory into pinned memory, within one pin. Does not wait for compute,
  // so the source must be complete. Both must stay valid until the event.
  virtual absl::StatusOr<EventRef> CopyToPinned(void* pinned, const void* device, int64_t bytes) {
    return absl::UnimplementedError("this device computes in host memory");
  }

  // Returns whether the device can import memory.
  virtual bool imports_memory() const { return false; }
  // Maps an allocation of another process on one of this machine's GPUs, for copies of this device.
  // Takes milliseconds, or seconds for the memory of a whole GPU. Errors:
  //   UNIMPLEMENTED        the device imports no memory
  //   INVALID_ARGUMENT     the handle is invalid, or its memory is smaller than stated
  //   FAILED_PRECONDITION  this device cannot access the memory's GPU
  //   RESOURCE_EXHAUSTED   the driver cannot map it
  virtual absl::StatusOr<std::unique_ptr<ImportedMemory>> ImportMemory(
      const SharedAllocation& allocation) {
    return absl::UnimplementedError("this device is not a GPU and imports no memory");
  }
  // Enqueues copies between this device's memory and imported memory. Does not wait for compute, so
  // the source must be complete. Both must stay valid until the event.
  virtual absl::StatusOr<EventRef> CopyImported(absl::Span<const DeviceCopy> pieces,
                                                ImportedCopy direction) {
    return absl::UnimplementedError("this device is not a GPU and imports no memory");
  }

  virtual DeviceUsage usage() const { return {}; }

  virtual std::string description() const = 0;  // "cpu (2 threads)"
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_DEVICE_H_
