// A Device whose kernels are naive_kernels.h: lets the executor run before, and
// apart from, any real back end.
#ifndef RINGATTN_TESTS_SWEEP_NAIVE_DEVICE_H_
#define RINGATTN_TESTS_SWEEP_NAIVE_DEVICE_H_

#include <memory>
#include <string>
#include <vector>

#include "worker/device/device.h"
#include "worker/device/host_queue.h"

namespace ringattn::tests {

using namespace ringattn::worker;  // what is under test

// Thread safe, as Device says. Fresh memory is all NaN.
class NaiveDevice : public Device {
 public:
  absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes) override;
  // As kernels do that wait for them, though this one begins when they are there.
  bool TakesLateKeys(const ForwardCall&) const override { return true; }
  absl::StatusOr<PreparedCalls> Prepare(std::vector<KernelCall> calls) override;
  bool waits_for_transfer() const override { return queue_.waiting(); }
  absl::Status CopyFromHost(void* device, const void* host, int64_t bytes) override;
  absl::Status CopyToHost(void* host, const void* device, int64_t bytes) override;
  std::string description() const override { return "naive"; }

 private:
  HostQueue queue_{"naive_device"};
};

}  // namespace ringattn::tests

#endif  // RINGATTN_TESTS_SWEEP_NAIVE_DEVICE_H_
