// DeviceWrapper: forwards every call to another device. Decorators override what they change.
#ifndef RINGATTN_WORKER_DEVICE_DEVICE_WRAPPER_H_
#define RINGATTN_WORKER_DEVICE_DEVICE_WRAPPER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "worker/device/device.h"

namespace ringattn::worker {

// As thread safe as the wrapped device.
class DeviceWrapper : public Device {
 public:
  // `inner` must outlive the use of the wrapper.
  explicit DeviceWrapper(Device* inner) : inner_(inner) {}

  absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes) override {
    return inner_->Allocate(bytes);
  }
  absl::StatusOr<int64_t> WorkspaceBytes(const std::vector<KernelCall>& calls) const override {
    return inner_->WorkspaceBytes(calls);
  }
  std::vector<ServedCalls> served_calls() const override { return inner_->served_calls(); }
  std::vector<std::string> served_options() const override { return inner_->served_options(); }
  TuningChoices tuning_offer() const override { return inner_->tuning_offer(); }
  absl::StatusOr<PreparedCalls> Prepare(std::vector<KernelCall> calls) override {
    return inner_->Prepare(std::move(calls));
  }
  bool TakesLateKeys(const ForwardCall& call) const override { return inner_->TakesLateKeys(call); }
  EventRef Start(const PreparedCall& call, StartAfter after, RunControl* control) override {
    return inner_->Start(call, std::move(after), control);
  }
  void Preempt(bool active) override { inner_->Preempt(active); }
  bool pauses() const override { return inner_->pauses(); }
  bool preempts() const override { return inner_->preempts(); }
  DeviceKvCaches* kv_caches() override { return inner_->kv_caches(); }
  absl::StatusOr<std::unique_ptr<StepKernels>> MakeStepKernels() override {
    return inner_->MakeStepKernels();
  }
  bool waits_for_transfer() const override { return inner_->waits_for_transfer(); }
  bool is_host_memory() const override { return inner_->is_host_memory(); }
  absl::Status CopyFromHost(void* device, const void* host, int64_t bytes) override {
    return inner_->CopyFromHost(device, host, bytes);
  }
  absl::Status CopyToHost(void* host, const void* device, int64_t bytes) override {
    return inner_->CopyToHost(host, device, bytes);
  }
  absl::StatusOr<EventRef> StartCopyFromHost(void* device, const void* host,
                                             int64_t bytes) override {
    return inner_->StartCopyFromHost(device, host, bytes);
  }
  absl::Status CopyAllToHost(absl::Span<const DeviceCopy> copies) override {
    return inner_->CopyAllToHost(copies);
  }
  absl::StatusOr<std::unique_ptr<Upload>> BeginUpload(std::vector<UploadTarget> targets) override {
    return inner_->BeginUpload(std::move(targets));
  }
  std::unique_ptr<Download> BeginDownload(std::vector<DeviceRange> ranges,
                                          std::function<void()> on_ready) override {
    return inner_->BeginDownload(std::move(ranges), std::move(on_ready));
  }
  absl::StatusOr<std::unique_ptr<HostPin>> PinHost(void* data, int64_t bytes) override {
    return inner_->PinHost(data, bytes);
  }
  absl::StatusOr<EventRef> CopyToPinned(void* pinned, const void* device, int64_t bytes) override {
    return inner_->CopyToPinned(pinned, device, bytes);
  }
  bool imports_memory() const override { return inner_->imports_memory(); }
  absl::StatusOr<std::unique_ptr<ImportedMemory>> ImportMemory(
      const SharedAllocation& allocation) override {
    return inner_->ImportMemory(allocation);
  }
  absl::StatusOr<EventRef> CopyImported(absl::Span<const DeviceCopy> pieces,
                                        ImportedCopy direction) override {
    return inner_->CopyImported(pieces, direction);
  }
  DeviceUsage usage() const override { return inner_->usage(); }
  std::string description() const override { return inner_->description(); }

 protected:
  Device& inner() const { return *inner_; }

 private:
  Device* const inner_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_DEVICE_WRAPPER_H_
