// CopyThreads: a small thread pool for short pieces of work.
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

// Thread safe. First come, first served. Long work should do one piece and add itself again, so
// that other work gets its turn.
class CopyThreads {
 public:
  explicit CopyThreads(int threads);
  // Finishes the work that has been added. That work must not add more by then.
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
