// Device: memory and an in-order queue of compute calls. One per worker process.
#ifndef RINGATTN_WORKER_DEVICE_DEVICE_H_
#define RINGATTN_WORKER_DEVICE_DEVICE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/device/event.h"
#include "worker/kernels/attention_kernel.h"

namespace ringattn {

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
  // Grows with every tile and every completed transfer.
  std::atomic<int64_t> progress{0};
};

// Thread safe. Work is started in order by one thread and runs in that order.
class Device {
 public:
  virtual ~Device() = default;

  // Uninitialised memory. RESOURCE_EXHAUSTED if there is none.
  virtual absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes) = 0;

  // Enqueues `call` behind everything started before and behind `after`. If one of
  // `after` failed, the call does not run and fails with the same status. Never
  // blocks, never allocates device memory. `control` outlives the event.
  virtual EventRef Start(KernelCall call, std::vector<EventRef> after, RunControl* control) = 0;

  // True while the head of the queue waits for one of its `after` events, i.e.
  // for a transfer.
  virtual bool waits_for_transfer() const = 0;

  // Copies between host memory and this device's memory, host-synchronous.
  virtual absl::Status CopyFromHost(void* device, const void* host, int64_t bytes) = 0;
  virtual absl::Status CopyToHost(void* host, const void* device, int64_t bytes) = 0;

  virtual std::string description() const = 0;  // "cpu (2 threads)"
};

}  // namespace ringattn

#endif  // RINGATTN_WORKER_DEVICE_DEVICE_H_
