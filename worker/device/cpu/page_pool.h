// PagePool: anonymous memory that is reused shortly after its release.
//
// Each fresh page costs a page fault and a clearing. For a request dominated by its transfer, that
// takes as long as the copies. Requests often come in series of one size, so the next one reuses
// the pages of the last. Memory that is not reused within `keep_time` is returned to the system, so
// an idle process holds none.
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
  // Keeps released memory only while kept and used memory together stay within `limit_bytes`. Used
  // memory is not limited here.
  PagePool(int64_t limit_bytes, absl::Duration keep_time);
  // REQUIRES: no memory is in use.
  ~PagePool();

  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // Returns `bytes` > 0 of page-aligned memory with undefined contents, or null if there is none.
  void* Take(int64_t bytes);
  // Releases memory that Take(bytes) returned.
  void Give(void* data, int64_t bytes);

  int64_t kept_bytes() const;

 private:
  struct Kept {
    void* data;
    int64_t bytes;
    absl::Time since;
  };
  using Pages = std::deque<Kept>;  // oldest first

  // Removes the oldest entries until limit_bytes_ holds, and returns them.
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
  std::thread thread_;  // last: returns old memory
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CPU_PAGE_POOL_H_
