// WorkCount: counts the pieces of work that are queued or running for an operation, and identifies
// the last one after the operation has ended.
#ifndef RINGATTN_WORKER_REGION_WORK_COUNT_H_
#define RINGATTN_WORKER_REGION_WORK_COUNT_H_

#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ringattn::worker {

// Thread safe.
class WorkCount {
 public:
  // `ended` must never change back to false. The thread that makes it true must add a piece of work
  // afterwards. It is called under this object's lock.
  explicit WorkCount(std::function<bool()> ended) : ended_(std::move(ended)) {}

  void Add() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    ++pieces_;
  }

  // A piece of work is done. Returns true exactly once: when no work is left and the operation has
  // ended.
  bool Leave() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    // `ended_` must be read under the lock, together with the count. With an answer from before the
    // lock, the operation could end meanwhile, and the piece added by the end could leave while
    // this one is still counted. Then neither would be the last.
    if (--pieces_ > 0 || over_ || !ended_()) return false;
    over_ = true;
    return true;
  }

 private:
  const std::function<bool()> ended_;
  absl::Mutex mutex_;
  int pieces_ ABSL_GUARDED_BY(mutex_) = 0;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_REGION_WORK_COUNT_H_
