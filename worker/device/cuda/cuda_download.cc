#include "worker/device/cuda/cuda_download.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"

namespace ringattn::worker {
namespace {

// Blocks that have been copied and not yet read. The link fills one in 80 us, the network takes
// milliseconds for it, and the service thread polls every 200 us at the latest.
constexpr size_t kBlocksAhead = 4;

}  // namespace

CudaDownloadState::CudaDownloadState(CudaStaging* staging, std::vector<DeviceRange> ranges,
                                     std::function<void()> on_ready)
    : staging_(staging), ranges_(std::move(ranges)), on_ready_(std::move(on_ready)) {
  absl::MutexLock lock(&mutex_);
  SkipEmptyRanges();
}

void CudaDownloadState::SkipEmptyRanges() {
  while (range_ < ranges_.size() && offset_ == ranges_[range_].bytes) {
    ++range_;
    offset_ = 0;
  }
}

bool CudaDownloadState::CopyNext() {
  if (closed_ || !failure_.ok() || range_ == ranges_.size() || ahead_.size() >= kBlocksAhead) {
    return false;
  }
  std::optional<PinnedPool::Block> block =
      staging_->pool()->TryTakeForDownload(/*ahead=*/!ahead_.empty());
  if (!block.has_value()) return false;
  const DeviceRange& range = ranges_[range_];
  const int64_t bytes = std::min(block->bytes(), range.bytes - offset_);
  absl::StatusOr<EventRef> copied =
      staging_->CopyToHost(block->data(), static_cast<const char*>(range.data) + offset_, bytes);
  if (!copied.ok()) {
    failure_ = copied.status();
    return false;
  }
  ahead_.push_back({std::make_shared<PinnedPool::Block>(*std::move(block)), range_, offset_, bytes,
                    0, *std::move(copied)});
  offset_ += bytes;
  SkipEmptyRanges();
  return true;
}

absl::StatusOr<std::optional<Download::HostRange>> CudaDownloadState::Next(int64_t max_bytes) {
  absl::StatusOr<std::optional<Download::HostRange>> next;
  bool waits = false;
  {
    absl::MutexLock lock(&mutex_);
    next = NextLocked(max_bytes);
    waits = reader_waits_ && next.ok() && !next->has_value();
  }
  if (waits) staging_->OnReaderWaits();
  return next;
}

absl::StatusOr<std::optional<Download::HostRange>> CudaDownloadState::NextLocked(
    int64_t max_bytes) {
  CopyNext();
  if (!failure_.ok()) return failure_;
  if (ahead_.empty() && range_ == ranges_.size()) return std::nullopt;
  if (ahead_.empty() || !ahead_.front().copied->Done()) {
    reader_waits_ = true;
    return std::nullopt;
  }
  Ahead& front = ahead_.front();
  if (front.read_bytes == 0) {
    failure_ = front.copied->Wait(absl::InfinitePast());
    if (!failure_.ok()) return failure_;
    copy_time_ += front.copied->end_time() - front.copied->begin_time();
  }
  const Download::HostRange piece{front.range, front.offset + front.read_bytes,
                                  front.block->data() + front.read_bytes,
                                  std::min(max_bytes, front.bytes - front.read_bytes), front.block};
  front.read_bytes += piece.bytes;
  if (front.read_bytes == front.bytes) ahead_.pop_front();
  return piece;
}

bool CudaDownloadState::finished() const {
  absl::MutexLock lock(&mutex_);
  return ahead_.empty() && range_ == ranges_.size();
}

absl::Duration CudaDownloadState::copy_time() const {
  absl::MutexLock lock(&mutex_);
  return copy_time_;
}

bool CudaDownloadState::Advance() {
  bool more = false;
  {
    absl::MutexLock lock(&mutex_);
    if (closed_) return false;
    CopyNext();
    const bool ready = !failure_.ok() || (!ahead_.empty() && ahead_.front().copied->Done());
    more = (range_ < ranges_.size() && ahead_.size() < kBlocksAhead) || reader_waits_;
    if (!reader_waits_ || !ready) return more;
    reader_waits_ = false;
  }
  absl::MutexLock lock(&notice_mutex_);
  if (on_ready_) on_ready_();
  return more;
}

void CudaDownloadState::Close() {
  {
    absl::MutexLock lock(&notice_mutex_);
    on_ready_ = nullptr;
  }
  std::deque<Ahead> ahead;
  {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
    ahead.swap(ahead_);
  }
  // These copies read the operation's memory. The teardown's watchdog handles a copy that hangs.
  for (const Ahead& copy : ahead) (void)copy.copied->Wait(absl::InfiniteFuture());
}

}  // namespace ringattn::worker
