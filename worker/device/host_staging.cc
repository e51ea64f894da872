#include <algorithm>
#include <cstring>
#include <utility>

#include "worker/device/staging.h"

namespace ringattn::worker {
namespace {

class HostUpload : public Upload {
 public:
  explicit HostUpload(void* target) : target_(static_cast<uint8_t*>(target)) {}

  absl::Status Append(const void* data, int64_t bytes) override {
    if (bytes > 0) std::memcpy(target_, data, bytes);
    target_ += bytes;
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<EventRef>> Finish() override { return std::vector<EventRef>(); }

 private:
  uint8_t* target_;
};

class HostDownload : public Download {
 public:
  explicit HostDownload(std::vector<DeviceRange> ranges) : ranges_(std::move(ranges)) {
    SkipEmpty();
  }

  absl::StatusOr<std::optional<HostRange>> Next(int64_t max_bytes) override {
    if (finished()) return std::nullopt;
    const DeviceRange& range = ranges_[index_];
    HostRange piece{index_, offset_, static_cast<const uint8_t*>(range.data) + offset_,
                    std::min(max_bytes, range.bytes - offset_), nullptr};
    offset_ += piece.bytes;
    SkipEmpty();
    return piece;
  }
  bool finished() const override { return index_ == ranges_.size(); }
  absl::Duration copy_time() const override { return absl::ZeroDuration(); }

 private:
  void SkipEmpty() {
    while (index_ < ranges_.size() && offset_ == ranges_[index_].bytes) {
      ++index_;
      offset_ = 0;
    }
  }

  const std::vector<DeviceRange> ranges_;
  size_t index_ = 0;
  int64_t offset_ = 0;
};

}  // namespace

std::unique_ptr<Upload> MakeHostUpload(void* target) {
  return std::make_unique<HostUpload>(target);
}

std::unique_ptr<Download> MakeHostDownload(std::vector<DeviceRange> ranges) {
  return std::make_unique<HostDownload>(std::move(ranges));
}

}  // namespace ringattn::worker
