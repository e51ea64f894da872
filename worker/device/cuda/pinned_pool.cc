#include "worker/device/cuda/pinned_pool.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"

namespace ringattn::worker {
namespace {

constexpr int kMinBlocks = 4;
// How often a waiting upload checks for finished copies. Copying a block takes about 80 us at 55
// GB/s.
constexpr absl::Duration kLook = absl::Microseconds(100);

}  // namespace

PinnedPool::Block::~Block() {
  if (pool_ != nullptr) pool_->Return(index_, download_);
}

uint8_t* PinnedPool::Block::data() const { return pool_->memory_ + index_ * pool_->block_bytes_; }

int64_t PinnedPool::Block::bytes() const { return pool_->block_bytes_; }

absl::StatusOr<std::shared_ptr<PinnedPool>> PinnedPool::Create(int64_t total_bytes,
                                                               int64_t block_bytes, Source source) {
  const int64_t count = total_bytes / block_bytes;
  if (count < kMinBlocks) {
    return absl::InvalidArgumentError(absl::StrCat("a pinned pool of ", total_bytes,
                                                   " bytes has fewer than ", kMinBlocks,
                                                   " blocks of ", block_bytes));
  }
  std::shared_ptr<PinnedPool> pool(
      new PinnedPool(block_bytes, static_cast<int>(count), std::move(source)));
  absl::StatusOr<void*> memory = pool->source_.allocate(count * block_bytes);
  if (!memory.ok()) return memory.status();
  pool->memory_ = static_cast<uint8_t*>(*memory);
  return pool;
}

PinnedPool::PinnedPool(int64_t block_bytes, int block_count, Source source)
    : block_bytes_(block_bytes), block_count_(block_count), source_(std::move(source)) {
  for (int i = block_count; i > 0; --i) free_.push_back(i - 1);
}

PinnedPool::~PinnedPool() {
  // Copies read these blocks until their events are done.
  for (const Copying& copying : copying_) {
    (void)copying.copied->Wait(MonotonicNow() + absl::Seconds(10));
  }
  if (memory_ != nullptr) source_.free(memory_);
}

absl::StatusOr<PinnedPool::Block> PinnedPool::TakeForUpload(absl::Time deadline) {
  const int most = block_count_ - block_count_ / 4;
  absl::MutexLock lock(&mutex_);
  const uint64_t turn = next_turn_++;
  waiting_.insert(turn);
  while (true) {
    CollectCopied();
    if (*waiting_.begin() == turn && !free_.empty() && upload_blocks_ < most) break;
    const absl::Duration left = deadline - MonotonicNow();
    if (left <= absl::ZeroDuration()) {
      waiting_.erase(turn);
      changed_.SignalAll();
      return absl::UnavailableError(absl::StrCat(
          "no staging memory in time: ", block_count_, " blocks of ", block_bytes_, " bytes, ",
          upload_blocks_, " hold uploads, ", download_blocks_, " downloads"));
    }
    // The end of a copy is not signalled, so the first in the queue polls. The others are
    // signalled.
    const bool look = *waiting_.begin() == turn && !copying_.empty();
    changed_.WaitWithTimeout(&mutex_, look ? std::min(left, kLook) : left);
  }
  waiting_.erase(turn);
  const int index = free_.back();
  free_.pop_back();
  ++upload_blocks_;
  changed_.SignalAll();
  return Block(shared_from_this(), index, false);
}

std::optional<PinnedPool::Block> PinnedPool::TryTakeForDownload(bool ahead) {
  const int most = block_count_ / (ahead ? 4 : 2);
  absl::MutexLock lock(&mutex_);
  CollectCopied();
  if (free_.empty() || download_blocks_ >= most) return std::nullopt;
  const int index = free_.back();
  free_.pop_back();
  ++download_blocks_;
  return Block(shared_from_this(), index, true);
}

void PinnedPool::ReturnAfter(Block block, EventRef copied) {
  // The block's own reference is dropped last, outside the lock.
  const std::shared_ptr<PinnedPool> keeper = std::move(block.pool_);
  absl::MutexLock lock(&mutex_);
  copying_.push_back({block.index_, block.download_, std::move(copied)});
  changed_.SignalAll();
}

int64_t PinnedPool::used_bytes() const {
  absl::MutexLock lock(&mutex_);
  return (block_count_ - static_cast<int64_t>(free_.size())) * block_bytes_;
}

void PinnedPool::Return(int index, bool download) {
  absl::MutexLock lock(&mutex_);
  PutBack(index, download);
}

void PinnedPool::PutBack(int index, bool download) {
  free_.push_back(index);
  --(download ? download_blocks_ : upload_blocks_);
  changed_.SignalAll();
}

void PinnedPool::CollectCopied() {
  for (auto it = copying_.begin(); it != copying_.end();) {
    if (!it->copied->Done()) {
      ++it;
      continue;
    }
    PutBack(it->index, it->download);
    it = copying_.erase(it);
  }
}

}  // namespace ringattn::worker
