#include <algorithm>
#include <cstring>
#include <utility>

#include "worker/device/staging.h"

namespace ringattn::worker {
namespace {

class HostUpload : public Upload {
 public:
  explicit HostUpload(std::vector<UploadTarget> targets) : targets_(std::move(targets)) {}

  absl::Status Append(const void* data, int64_t bytes) override {
    const auto* source = static_cast<const uint8_t*>(data);
    while (bytes > 0) {
      const UploadTarget& target = targets_[index_];
      const int64_t part = std::min(bytes, target.bytes - filled_bytes_);
      if (part > 0) std::memcpy(static_cast<uint8_t*>(target.data) + filled_bytes_, source, part);
      source += part;
      bytes -= part;
      filled_bytes_ += part;
      if (filled_bytes_ < target.bytes) continue;
      ++index_;
      filled_bytes_ = 0;
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<EventRef>> Finish() override { return std::vector<EventRef>(); }

 private:
  const std::vector<UploadTarget> targets_;
  size_t index_ = 0;
  int64_t filled_bytes_ = 0;  // of that target
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
