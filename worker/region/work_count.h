// WorkCount: the pieces of work for something that are added or done right now, and which of them
// is the last once it has ended.
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
  // `ended` never becomes false again, and whoever makes it true adds a piece of work after that.
  // It is asked under this count's lock.
  explicit WorkCount(std::function<bool()> ended) : ended_(std::move(ended)) {}

  void Add() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    ++pieces_;
  }

  // A piece is done. True for one of them: nothing is under way any more, and it has ended.
  bool Leave() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    // The end is looked at when the count is known. An answer from before the lock may be old by
    // then: the piece that came with the end has left meanwhile, seen this one and not been the
    // last, and this one would not be it either.
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
