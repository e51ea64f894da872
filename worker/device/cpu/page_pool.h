// PagePool: anonymous memory that is kept for a moment after its release.
//
// Fresh pages cost a fault and a clearing each: for a request whose time goes into
// its transfer, as much as the copies themselves. Requests come in series of one
// size, so the next one takes over the pages of the last. What nobody has taken
// over within `keep_time` goes back to the system, and an idle process holds nothing.
#ifndef RINGATTN_WORKER_DEVICE_CPU_PAGE_POOL_H_
#define RINGATTN_WORKER_DEVICE_CPU_PAGE_POOL_H_

#include <cstdint>
#include <deque>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ringattn::worker {

// Thread safe.
class PagePool {
 public:
  // Memory is kept only while it and what is in use stay within `limit_bytes`
  // together; what is in use is not limited here.
  PagePool(int64_t limit_bytes, absl::Duration keep_time);
  // REQUIRES: nothing is in use any more.
  ~PagePool();

  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // `bytes` > 0 of memory, page-aligned, contents undefined; null if there is none.
  void* Take(int64_t bytes);
  // Gives back what Take(bytes) returned.
  void Give(void* data, int64_t bytes);

  int64_t kept_bytes() const;

 private:
  struct Kept {
    void* data;
    int64_t bytes;
    absl::Time since;
  };
  using Pages = std::deque<Kept>;  // oldest first

  // Takes the oldest out until limit_bytes_ holds again.
  Pages Excess() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void Unmap(const Pages& pages);
  void ReturnOld();

  const int64_t limit_bytes_;
  const absl::Duration keep_time_;

  mutable absl::Mutex mutex_;
  Pages kept_ ABSL_GUARDED_BY(mutex_);
  int64_t kept_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: returns what has become old
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CPU_PAGE_POOL_H_
