// CopyThreads: a few threads that take short pieces of work in turn.
#ifndef RINGATTN_WORKER_REGION_COPY_THREADS_H_
#define RINGATTN_WORKER_REGION_COPY_THREADS_H_

#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ringattn::worker {

// Thread safe. First come, first served: work that is long does a piece and adds itself again,
// so that whoever comes meanwhile has a turn.
class CopyThreads {
 public:
  explicit CopyThreads(int threads);
  // Does what has been added, which may add no more by then.
  ~CopyThreads();

  CopyThreads(const CopyThreads&) = delete;
  CopyThreads& operator=(const CopyThreads&) = delete;

  int size() const { return static_cast<int>(threads_.size()); }
  // Never blocks.
  void Add(std::function<void()> work) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run();

  absl::Mutex mutex_;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<std::function<void()>> work_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_REGION_COPY_THREADS_H_
