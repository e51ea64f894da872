#include "client/memory/page_toucher.h"

#include <sys/mman.h>

#include <algorithm>

// Linux 5.14. Older headers lack the constant, and older kernels reject it.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ringattn::client {

PageToucher::PageToucher(absl::Span<uint8_t> mapping, const Options& options)
    : mapping_(mapping), options_(options), thread_([this] { Run(); }) {}

PageToucher::~PageToucher() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void PageToucher::NoteFilled(double share) {
  if (!(share > 0)) return;
  const double bytes = std::min(share, 1.0) * static_cast<double>(mapping_.size());
  {
    const std::lock_guard lock(mutex_);
    filled_bytes_ = std::max(filled_bytes_, static_cast<uint64_t>(bytes));
  }
  changed_.notify_all();
}

void PageToucher::Run() {
  const uint64_t step = options_.step_bytes;
  uint64_t at = 0;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || at < filled_bytes_ + options_.ahead_bytes; });
      if (stopping_) return;
      at = std::max(at, filled_bytes_ / step * step);
    }
    if (at >= mapping_.size()) return;
    const uint64_t bytes = std::min(step, mapping_.size() - at);
    if (madvise(mapping_.data() + at, bytes, MADV_POPULATE_WRITE) != 0) return;
    madvise(mapping_.data() + at, bytes,
            MADV_DONTNEED);  // the mapping is shared, so pages stay in the page cache
    at += bytes;
  }
}

}  // namespace ringattn::client
