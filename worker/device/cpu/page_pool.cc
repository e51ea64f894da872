#include "worker/device/cpu/page_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "common/base/monotonic_time.h"

namespace ringattn::worker {
namespace {

// With pages of 4 KiB, 64 MiB cost 16,384 faults. Advises only huge pages that lie completely
// inside, so that nothing beyond the buffer becomes resident. A system without huge pages rejects
// the advice, which is not an error.
void AskForHugePages(void* data, int64_t bytes) {
  constexpr uintptr_t kHugePageBytes = uintptr_t{2} << 20;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const uintptr_t last = (begin + bytes) / kHugePageBytes * kHugePageBytes;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

void* Map(int64_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  AskForHugePages(data, bytes);
  return data;
}

}  // namespace

PagePool::PagePool(int64_t limit_bytes, absl::Duration keep_time)
    : limit_bytes_(limit_bytes), keep_time_(keep_time), thread_([this] { ReturnOld(); }) {}

PagePool::~PagePool() {
  {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
  }
  thread_.join();
  absl::MutexLock lock(&mutex_);
  Unmap(kept_);
}

void* PagePool::Take(int64_t bytes) {
  Pages gone;
  {
    absl::MutexLock lock(&mutex_);
    used_bytes_ += bytes;
    // The most recent entry, because it may still be in a cache.
    const auto found = std::find_if(kept_.rbegin(), kept_.rend(),
                                    [bytes](const Kept& kept) { return kept.bytes == bytes; });
    if (found != kept_.rend()) {
      void* const data = found->data;
      kept_.erase(std::next(found).base());
      kept_bytes_ -= bytes;
      return data;
    }
    gone = Excess();
  }
  Unmap(gone);
  if (void* const data = Map(bytes)) return data;
  // The system is out of memory; the kept memory may be what it lacks.
  Pages all;
  {
    absl::MutexLock lock(&mutex_);
    all.swap(kept_);
    kept_bytes_ = 0;
  }
  Unmap(all);
  void* const data = Map(bytes);
  if (data == nullptr) {
    absl::MutexLock lock(&mutex_);
    used_bytes_ -= bytes;
  }
  return data;
}

void PagePool::Give(void* data, int64_t bytes) {
  Pages gone;
  {
    absl::MutexLock lock(&mutex_);
    used_bytes_ -= bytes;
    kept_bytes_ += bytes;
    kept_.push_back({data, bytes, MonotonicNow()});
    gone = Excess();
  }
  Unmap(gone);
}

int64_t PagePool::kept_bytes() const {
  absl::MutexLock lock(&mutex_);
  return kept_bytes_;
}

PagePool::Pages PagePool::Excess() {
  Pages excess;
  while (!kept_.empty() && used_bytes_ + kept_bytes_ > limit_bytes_) {
    kept_bytes_ -= kept_.front().bytes;
    excess.push_back(kept_.front());
    kept_.pop_front();
  }
  return excess;
}

void PagePool::Unmap(const Pages& pages) {
  for (const Kept& kept : pages) munmap(kept.data, kept.bytes);
}

void PagePool::ReturnOld() {
  const auto something_to_do = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return closing_ || !kept_.empty();
  };
  while (true) {
    Pages old;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&something_to_do));
      if (closing_) return;
      const absl::Time due = kept_.front().since + keep_time_;
      if (AwaitUntil(mutex_, absl::Condition(&closing_), due)) return;
      // It may have been reused meanwhile.
      while (!kept_.empty() && kept_.front().since + keep_time_ <= MonotonicNow()) {
        kept_bytes_ -= kept_.front().bytes;
        old.push_back(kept_.front());
        kept_.pop_front();
      }
    }
    Unmap(old);
  }
}

}  // namespace ringattn::worker
