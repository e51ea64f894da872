#include "worker/testing/staged_copies.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"

namespace ringattn::worker {
namespace {

constexpr int64_t kBlockBytes = 1000;

class StagedUpload : public Upload {
 public:
  StagedUpload(HostQueue* queue, absl::Duration delay, std::vector<UploadTarget> targets)
      : queue_(queue), delay_(delay), targets_(std::move(targets)) {}

  absl::Status Append(const void* data, int64_t bytes) override {
    block_.append(static_cast<const char*>(data), bytes);
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<EventRef>> Finish() override {
    return std::vector<EventRef>{queue_->Start(
        [delay = delay_, targets = targets_, block = std::move(block_)] {
          absl::SleepFor(delay);
          return MakeHostUpload(targets)->Append(block.data(), block.size());
        },
        {}, HostQueue::OnFailure::kSkip)};
  }

 private:
  HostQueue* const queue_;
  const absl::Duration delay_;
  const std::vector<UploadTarget> targets_;
  std::string block_;
};

// Copies one block at a time and notifies the reader of each.
class StagedDownload : public Download {
 public:
  StagedDownload(HostQueue* queue, absl::Duration delay, std::vector<DeviceRange> ranges,
                 std::function<void()> on_ready)
      : queue_(queue), delay_(delay), ranges_(std::move(ranges)), on_ready_(std::move(on_ready)) {
    absl::MutexLock lock(&mutex_);
    SkipEmpty();
  }
  ~StagedDownload() override {
    if (copied_ != nullptr) (void)copied_->Wait(absl::InfiniteFuture());
  }

  absl::StatusOr<std::optional<HostRange>> Next(int64_t max_bytes) override {
    absl::MutexLock lock(&mutex_);
    if (range_ == ranges_.size()) return std::nullopt;
    if (block_ == nullptr) {
      if (!copying_) CopyNext();
      return std::nullopt;
    }
    const HostRange piece{range_, offset_ + read_bytes_,
                          reinterpret_cast<const uint8_t*>(block_->data()) + read_bytes_,
                          std::min<int64_t>(max_bytes, block_->size() - read_bytes_), block_};
    read_bytes_ += piece.bytes;
    if (read_bytes_ == static_cast<int64_t>(block_->size())) {
      offset_ += read_bytes_;
      read_bytes_ = 0;
      block_ = nullptr;
      SkipEmpty();
    }
    return piece;
  }
  bool finished() const override {
    absl::MutexLock lock(&mutex_);
    return range_ == ranges_.size();
  }
  absl::Duration copy_time() const override {
    absl::MutexLock lock(&mutex_);
    return copies_ * delay_;
  }

 private:
  void SkipEmpty() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    while (range_ < ranges_.size() && offset_ == ranges_[range_].bytes) {
      ++range_;
      offset_ = 0;
    }
  }

  void CopyNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    ++copies_;
    copying_ = true;
    const DeviceRange& range = ranges_[range_];
    auto copy = [this, source = static_cast<const char*>(range.data) + offset_,
                 bytes = std::min(kBlockBytes, range.bytes - offset_)] {
      absl::SleepFor(delay_);
      auto block = std::make_shared<const std::string>(source, bytes);
      {
        absl::MutexLock lock(&mutex_);
        block_ = std::move(block);
        copying_ = false;
      }
      on_ready_();
      return absl::OkStatus();
    };
    copied_ = queue_->Start(std::move(copy), {}, HostQueue::OnFailure::kSkip);
  }

  HostQueue* const queue_;
  const absl::Duration delay_;
  const std::vector<DeviceRange> ranges_;
  const std::function<void()> on_ready_;
  mutable absl::Mutex mutex_;
  size_t range_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t offset_ ABSL_GUARDED_BY(mutex_) = 0;  // in the block
  int64_t read_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t copies_ ABSL_GUARDED_BY(mutex_) = 0;
  bool copying_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<const std::string> block_ ABSL_GUARDED_BY(mutex_);
  EventRef copied_;  // set by Next only
};

}  // namespace

std::unique_ptr<Upload> MakeStagedUpload(HostQueue* queue, absl::Duration delay,
                                         std::vector<UploadTarget> targets) {
  return std::make_unique<StagedUpload>(queue, delay, std::move(targets));
}

std::unique_ptr<Download> MakeStagedDownload(HostQueue* queue, absl::Duration delay,
                                             std::vector<DeviceRange> ranges,
                                             std::function<void()> on_ready) {
  return std::make_unique<StagedDownload>(queue, delay, std::move(ranges), std::move(on_ready));
}

}  // namespace ringattn::worker
