// Pause: holds the compute threads of a CpuKernels between two slices of work.
#ifndef RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_PAUSE_H_
#define RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_PAUSE_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>

namespace ringattn::worker::cpu {

// Thread safe.
class Pause {
 public:
  // Begins a pause, which ends with End() or after `longest`. Never blocks for long.
  void Begin(std::chrono::nanoseconds longest) {
    std::lock_guard<std::mutex> lock(mutex_);
    end_ = std::chrono::steady_clock::now() + longest;
    active_.store(true, std::memory_order_relaxed);
  }
  void End() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      active_.store(false, std::memory_order_relaxed);
    }
    ended_.notify_all();
  }

  // Returns at the end of a pause. Costs one load of memory if there is none.
  void Await() {
    if (!active_.load(std::memory_order_relaxed)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    while (active_.load(std::memory_order_relaxed)) {
      const std::chrono::steady_clock::time_point end = end_;
      if (std::chrono::steady_clock::now() < end) {
        ended_.wait_until(lock, end);
      } else {
        active_.store(false, std::memory_order_relaxed);
      }
    }
  }

 private:
  std::atomic<bool> active_{false};
  // std, not absl: ThreadSanitizer cannot see into the distribution's Abseil.
  std::mutex mutex_;
  std::condition_variable ended_;              // of a pause
  std::chrono::steady_clock::time_point end_;  // the latest; guarded by mutex_
};

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_PAUSE_H_
