#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "worker/device/device.h"
#include "worker/device/staging.h"

namespace ringattn::worker {
namespace {

class SmallUpload : public Upload {
 public:
  SmallUpload(Device* device, std::vector<UploadTarget> targets)
      : device_(*device), targets_(std::move(targets)) {}

  absl::Status Append(const void* data, int64_t bytes) override {
    const auto* source = static_cast<const char*>(data);
    while (bytes > 0) {
      const UploadTarget& target = targets_[index_];
      const int64_t part = std::min(bytes, target.bytes - static_cast<int64_t>(gathered_.size()));
      absl::Status status;
      if (part == target.bytes) {
        status = StartFilling(source);
      } else {
        gathered_.append(source, part);
        if (static_cast<int64_t>(gathered_.size()) == target.bytes) status = FillWithGathered();
      }
      if (!status.ok()) return status;
      source += part;
      bytes -= part;
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<EventRef>> Finish() override { return std::exchange(events_, {}); }

 private:
  absl::Status StartFilling(const char* source) {
    const UploadTarget& target = targets_[index_++];
    if (target.bytes == 0) return absl::OkStatus();
    absl::StatusOr<EventRef> event = device_.StartCopyFromHost(target.data, source, target.bytes);
    if (!event.ok()) return event.status();
    if (*event != nullptr) events_.push_back(*std::move(event));
    return absl::OkStatus();
  }
  absl::Status FillWithGathered() {
    const UploadTarget& target = targets_[index_++];
    const absl::Status status = device_.CopyFromHost(target.data, gathered_.data(), target.bytes);
    gathered_.clear();
    return status;
  }

  Device& device_;
  const std::vector<UploadTarget> targets_;
  size_t index_ = 0;
  std::string gathered_;  // the beginning of the current target
  std::vector<EventRef> events_;
};

}  // namespace

std::unique_ptr<Upload> MakeSmallUpload(Device* device, std::vector<UploadTarget> targets) {
  return std::make_unique<SmallUpload>(device, std::move(targets));
}

}  // namespace ringattn::worker
