#include <algorithm>
#include <cstring>
#include <utility>

#include "worker/device/staging.h"

namespace ringattn::worker {
namespace {

class HostUpload : public Upload {
 public:
  explicit HostUpload(std::vector<UploadTarget> targets) : cursor_(std::move(targets)) {}

  absl::Status Append(const void* data, int64_t bytes) override {
    const auto* source = static_cast<const uint8_t*>(data);
    cursor_.Advance(bytes, [&source](void* to, int64_t part) {
      std::memcpy(to, source, part);
      source += part;
    });
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<EventRef>> Finish() override { return std::vector<EventRef>(); }

 private:
  TargetCursor cursor_;
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

std::unique_ptr<Upload> MakeHostUpload(std::vector<UploadTarget> targets) {
  return std::make_unique<HostUpload>(std::move(targets));
}

std::unique_ptr<Download> MakeHostDownload(std::vector<DeviceRange> ranges) {
  return std::make_unique<HostDownload>(std::move(ranges));
}

}  // namespace ringattn::worker
