// A fixed pool that runs numbered tasks, in order of their numbers, on all of
// its threads and the calling one.
#ifndef RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_THREAD_POOL_H_
#define RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_THREAD_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace ringattn::worker::cpu {

// ParallelFor is called by one thread at a time.
class ThreadPool {
 public:
  // Starts threads - 1 threads. REQUIRES: threads >= 1.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls run(thread, task) once for each task in [0, tasks), thread in
  // [0, threads()), and returns when all have returned. A task starts only after
  // every task with a lower number has started, so a task may wait for lower ones.
  void ParallelFor(int64_t tasks, absl::FunctionRef<void(int thread, int64_t task)> run);

 private:
  using Body = absl::FunctionRef<void(int, int64_t)>;

  void WorkerLoop(int thread);
  void Drain(int thread, int64_t tasks, const Body& run);

  std::atomic<int64_t> next_task_{0};

  // std, not absl: ThreadSanitizer cannot see into the distribution's Abseil.
  std::mutex mutex_;
  std::condition_variable round_started_;
  std::condition_variable workers_done_;
  // Guarded by mutex_:
  const Body* body_ = nullptr;
  int64_t tasks_ = 0;
  int64_t round_ = 0;  // one per ParallelFor that wakes the workers
  int busy_workers_ = 0;
  bool ending_ = false;

  std::vector<std::thread> workers_;
};

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_THREAD_POOL_H_
