// ScalarDevice: a device for tests of everything above the kernels. Computes fp32 forwards with
// plain loops, with an optional delay.
#ifndef RINGATTN_WORKER_TESTING_SCALAR_DEVICE_H_
#define RINGATTN_WORKER_TESTING_SCALAR_DEVICE_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "worker/device/device.h"
#include "worker/device/host_queue.h"

namespace ringattn::worker {

// Thread safe, as Device requires. Other dtypes and backward calls return UNIMPLEMENTED.
class ScalarDevice : public Device {
 public:
  absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes) override;
  std::vector<ServedCalls> served_calls() const override {
    return {{"scalar", {DType::kFloat32}, false}};
  }
  absl::StatusOr<PreparedCalls> Prepare(std::vector<KernelCall> calls) override;
  bool waits_for_transfer() const override { return queue_.waiting(); }
  bool is_host_memory() const override { return !staged_; }
  absl::Status CopyFromHost(void* device, const void* host, int64_t bytes) override;
  absl::Status CopyToHost(void* host, const void* device, int64_t bytes) override;
  absl::StatusOr<int64_t> WorkspaceBytes(const std::vector<KernelCall>&) const override {
    return workspace_bytes_;
  }
  absl::StatusOr<std::unique_ptr<Upload>> BeginUpload(std::vector<UploadTarget> targets) override;
  std::unique_ptr<Download> BeginDownload(std::vector<DeviceRange> ranges,
                                          std::function<void()> on_ready) override;
  absl::StatusOr<std::unique_ptr<HostPin>> PinHost(void* data, int64_t bytes) override;
  std::string description() const override { return "scalar"; }

  // Added to every call, in steps between which the call checks for a stop.
  void SetDelay(absl::Duration per_call) { delay_ns_ = absl::ToInt64Nanoseconds(per_call); }
  // Imitates a device with separate memory: copies of tensor bytes are asynchronous and take
  // `per_copy` each, and preparing calls takes `workspace_bytes`. Call before the first request.
  void SetStaged(absl::Duration per_copy, int64_t workspace_bytes);
  // Imitates a device that uses pinned memory: calls `on_pin` at each pin. Call before the first
  // request.
  void SetOnPin(std::function<void()> on_pin) { on_pin_ = std::move(on_pin); }
  // While set, calls hang even if they are stopped.
  void SetStuck(bool stuck) { stuck_ = stuck; }
  // Returns whether a call hangs.
  bool hangs() const { return hangs_; }

 private:
  absl::Status Run(const KernelCall& call, RunControl* control);

  std::atomic<int64_t> delay_ns_{0};
  std::atomic<bool> stuck_{false};
  std::atomic<bool> hangs_{false};
  bool staged_ = false;
  std::function<void()> on_pin_;  // null: no pinned memory
  absl::Duration per_copy_;
  int64_t workspace_bytes_ = 0;
  HostQueue queue_{"scalar_device"};
  HostQueue uploads_{"uploads"}, downloads_{"downloads"};
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_TESTING_SCALAR_DEVICE_H_
