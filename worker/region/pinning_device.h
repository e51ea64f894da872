// PinningDevice: for tests, a device that uses pinned memory, without a GPU. A queue makes its
// copies asynchronously. A copy fails if it does not lie within one pin.
#ifndef RINGATTN_WORKER_REGION_PINNING_DEVICE_H_
#define RINGATTN_WORKER_REGION_PINNING_DEVICE_H_

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "worker/device/device_wrapper.h"
#include "worker/device/host_queue.h"

namespace ringattn::worker {

// Thread safe.
class PinningDevice : public DeviceWrapper {
 public:
  explicit PinningDevice(Device* inner) : DeviceWrapper(inner) {}

  // Called before each pin. If it returns an error, PinHost returns that error.
  std::function<absl::Status(int64_t bytes)> before_pin;

  int64_t pinned_bytes() const {
    absl::MutexLock lock(&mutex_);
    int64_t sum = 0;
    for (const auto& [begin, bytes] : pins_) sum += bytes;
    return sum;
  }
  int64_t direct_bytes_in() const { return direct_in_; }
  int64_t direct_bytes_out() const { return direct_out_; }
  int64_t staged_bytes_in() const { return staged_in_; }

  bool is_host_memory() const override { return false; }
  absl::StatusOr<std::unique_ptr<HostPin>> PinHost(void* data, int64_t bytes) override {
    if (before_pin) {
      if (absl::Status status = before_pin(bytes); !status.ok()) return status;
    }
    absl::MutexLock lock(&mutex_);
    pins_[static_cast<char*>(data)] = bytes;
    return std::make_unique<Pin>(this, static_cast<char*>(data));
  }
  absl::StatusOr<EventRef> CopyToPinned(void* pinned, const void* device, int64_t bytes) override {
    direct_out_ += bytes;
    return CopyLate(pinned, device, bytes, pinned);
  }
  // Supports one target only: packed inputs do not come from pinned memory.
  absl::StatusOr<std::unique_ptr<Upload>> BeginUpload(std::vector<UploadTarget> targets) override {
    if (targets.size() != 1) return absl::UnimplementedError("several targets");
    return std::make_unique<DirectUpload>(this, static_cast<char*>(targets[0].data));
  }

 private:
  class Pin : public HostPin {
   public:
    Pin(PinningDevice* device, char* data) : device_(device), data_(data) {}
    ~Pin() override {
      absl::MutexLock lock(&device_->mutex_);
      device_->pins_.erase(data_);
    }

   private:
    PinningDevice* const device_;
    char* const data_;
  };

  class DirectUpload : public Upload {
   public:
    DirectUpload(PinningDevice* device, char* target) : device_(device), target_(target) {}
    absl::Status Append(const void* data, int64_t bytes) override {
      std::memcpy(target_, data, bytes);
      device_->staged_in_ += bytes;
      target_ += bytes;
      return absl::OkStatus();
    }
    absl::Status AppendPinned(const void* data, int64_t bytes) override {
      device_->direct_in_ += bytes;
      events_.push_back(device_->CopyLate(target_, data, bytes, data));
      target_ += bytes;
      return absl::OkStatus();
    }
    absl::StatusOr<std::vector<EventRef>> Finish() override { return std::move(events_); }

   private:
    PinningDevice* const device_;
    char* target_;
    std::vector<EventRef> events_;
  };

  EventRef CopyLate(void* to, const void* from, int64_t bytes, const void* host) {
    return queue_.Start(
        [this, to, from, bytes, host] {
          if (!IsWithinOnePin(static_cast<const char*>(host), bytes)) {
            return absl::InternalError("the copy does not lie within one pin");
          }
          std::memcpy(to, from, bytes);
          return absl::OkStatus();
        },
        {}, HostQueue::OnFailure::kSkip);
  }
  bool IsWithinOnePin(const char* data, int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    auto pin = pins_.upper_bound(const_cast<char*>(data));
    if (pin == pins_.begin()) return false;
    --pin;
    return data + bytes <= pin->first + pin->second;
  }

  mutable absl::Mutex mutex_;
  std::map<char*, int64_t> pins_;
  std::atomic<int64_t> direct_in_{0}, direct_out_{0}, staged_in_{0};
  HostQueue queue_{"pinning"};
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_REGION_PINNING_DEVICE_H_
