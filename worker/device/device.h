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
#include "worker/device/event.h"
#include "worker/device/host_pin.h"
#include "worker/device/imported_memory.h"
#include "worker/device/served_calls.h"
#include "worker/device/staging.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/kernel_name.h"

namespace ringattn::worker {

// Memory of a device, given back on destruction. REQUIRES on destruction: no
// enqueued work uses it any more.
class DeviceBuffer {
 public:
  virtual ~DeviceBuffer() = default;
  virtual void* data() = 0;  // device address; 64-byte aligned; null when empty
  virtual int64_t bytes() const = 0;
};

// Shared by everything that belongs to one running operation.
struct RunControl {
  // Set once: calls not yet done end at once, as if they had succeeded, their
  // results undefined. Transfers still take place, so that peers are not stranded.
  std::atomic<bool> stop{false};
  // Grows with every tile (CPU) or call (CUDA) and every completed transfer.
  std::atomic<int64_t> progress{0};
  // For reports of how far it is: what calls say that they have computed so far
  // (worker/kernels/work.h; the CPU's say it tile by tile, CUDA's not at all), and how
  // many calls have been seen to end, in the order of the program.
  std::atomic<int64_t> work{0};
  std::atomic<int64_t> calls_done{0};
};

// A call made ready to be started, any number of times, with whatever its device put behind it.
// Immutable; outlives the events of its starts; the device outlives it. Thread safe.
class PreparedCall {
 public:
  PreparedCall() = default;
  virtual ~PreparedCall() = default;
  PreparedCall(const PreparedCall&) = delete;
  PreparedCall& operator=(const PreparedCall&) = delete;

  // Who serves it.
  virtual KernelName kernel() const { return {}; }

  // Device::Start, on the device that prepared it.
  virtual EventRef Start(StartAfter after, RunControl* control) const = 0;
};

using PreparedCalls = std::vector<std::unique_ptr<const PreparedCall>>;

// What may stand in AttentionProblem::tuning.
struct TuningChoices {
  std::vector<int32_t> tile_q;
  std::vector<int32_t> tile_kv;
  std::vector<int32_t> key_splits;
};

// What a device holds right now, for metrics.
struct DeviceUsage {
  int64_t memory_used_bytes = 0;   // of the whole device, whoever uses it
  int64_t allocated_bytes = 0;     // by this process, for operations
  int64_t staging_used_bytes = 0;  // of the staging pool
};

// Thread safe. Work is started in order by one thread and runs in that order.
class Device {
 public:
  virtual ~Device() = default;

  // Uninitialised memory. RESOURCE_EXHAUSTED if there is none.
  virtual absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes) = 0;

  // Device memory that Prepare(calls) will take; operands' addresses may be null here.
  // INVALID_ARGUMENT for calls that the device has no kernel for.
  virtual absl::StatusOr<int64_t> WorkspaceBytes(const std::vector<KernelCall>& calls) const {
    return 0;
  }

  // Which kernels serve which calls: each has a rate of its own. Every kind of call that the device
  // computes is in exactly one by the rule of RateOf (kernel_rate.h).
  virtual std::vector<ServedCalls> served_calls() const { return {}; }

  // Names of the fields of v1::AttentionOptions that devices may lack kernels for
  // (DeviceOptions) and that this one serves.
  virtual std::vector<std::string> served_options() const { return {}; }

  // The values of Tuning that it takes; none of a field that its kernels do not have.
  virtual TuningChoices tuning_offer() const { return {}; }

  // Whether the kernel of this call can be started before its late keys (KvBlock::late) are there,
  // and waits for them itself. Addresses may be null here.
  virtual bool TakesLateKeys(const ForwardCall& call) const { return false; }

  // Makes the calls of one operation ready, with whatever memory they need beside their
  // operands: nothing is allocated when they start. RESOURCE_EXHAUSTED if there is none.
  // Started calls of one set of prepared calls share that memory, in queue order.
  virtual absl::StatusOr<PreparedCalls> Prepare(std::vector<KernelCall> calls) = 0;

  // Enqueues `call`, which this device prepared, behind everything started before and behind
  // `after`. If one of
  // `after` failed, the call does not run and fails with the same status; a device that
  // learns of the failure only later runs the call on undefined data, so whoever waits
  // asks the earlier events first. Never blocks, never allocates device memory. `call`
  // and `control` outlive the event.
  virtual EventRef Start(const PreparedCall& call, StartAfter after, RunControl* control) {
    return call.Start(std::move(after), control);
  }

  // True while the head of the queue waits for one of its `after` events, i.e.
  // for a transfer; or has late keys that are not there, whatever it computes meanwhile.
  virtual bool waits_for_transfer() const = 0;

  // Copies between host memory and this device's memory, host-synchronous. For tests
  // and small things; tensors take the next two.
  virtual absl::Status CopyFromHost(void* device, const void* host, int64_t bytes) = 0;
  virtual absl::Status CopyToHost(void* host, const void* device, int64_t bytes) = 0;

  // Tensor bytes from and to the wire (staging.h). The targets of an upload and the
  // ranges of a download belong to the caller, until the upload's events are done and
  // the download is destroyed. `on_ready` is called, on another thread and without
  // locks, after Next() returned nothing and more has arrived; never after the
  // download's destruction, which waits for a call in progress.
  virtual absl::StatusOr<std::unique_ptr<Upload>> BeginUpload(std::vector<UploadTarget> targets) {
    return MakeHostUpload(std::move(targets));
  }
  virtual std::unique_ptr<Download> BeginDownload(std::vector<DeviceRange> ranges,
                                                  std::function<void()> on_ready) {
    return MakeHostDownload(std::move(ranges));
  }

  // Makes [data, data + bytes) of this process's memory, which stays mapped for as long as the pin
  // is there, memory that copies of this device reach by themselves. Takes milliseconds, during
  // which other calls of the driver may wait. UNIMPLEMENTED: the device has no use for it;
  // RESOURCE_EXHAUSTED: the system gives no more. `data` at a page's begin.
  virtual absl::StatusOr<std::unique_ptr<HostPin>> PinHost(void* data, int64_t bytes) {
    return absl::UnimplementedError("host memory is this device's own");
  }
  // Enqueues a copy of device memory into pinned memory, within one pin, behind no compute: what
  // it reads must be there. Both stay until the event.
  virtual absl::StatusOr<EventRef> CopyToPinned(void* pinned, const void* device, int64_t bytes) {
    return absl::UnimplementedError("host memory is this device's own");
  }

  // Whether it can import memory at all.
  virtual bool imports_memory() const { return false; }
  // Maps an allocation that another process has on one of this machine's GPUs, for copies of this
  // device. Takes milliseconds, up to seconds for the memory of a whole GPU. UNIMPLEMENTED: the
  // device imports none; INVALID_ARGUMENT: the handle is of no use, or of less memory than said;
  // FAILED_PRECONDITION: it lies where this device does not reach; RESOURCE_EXHAUSTED: the driver
  // does not map it.
  virtual absl::StatusOr<std::unique_ptr<ImportedMemory>> ImportMemory(
      const SharedAllocation& allocation) {
    return absl::UnimplementedError("this device imports no memory: it is no GPU");
  }
  // Enqueues copies between this device's memory and imported memory, behind no compute: what
  // they read must be there. Both stay until the event.
  virtual absl::StatusOr<EventRef> CopyImported(absl::Span<const DeviceCopy> pieces,
                                                ImportedCopy direction) {
    return absl::UnimplementedError("this device imports no memory: it is no GPU");
  }

  virtual DeviceUsage usage() const { return {}; }

  virtual std::string description() const = 0;  // "cpu (2 threads)"
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_DEVICE_H_
