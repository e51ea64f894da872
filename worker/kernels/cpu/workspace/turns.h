// Turns: makes tasks that add to the same rows do so in a fixed order.
#ifndef RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_TURNS_H_
#define RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_TURNS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "worker/kernels/cpu/workspace/progress.h"

namespace ringattn::worker::cpu {

// One counter per object that tasks access in order. Await and Pass may be called by any thread;
// Reset by one thread while no other thread uses the object.
class Turns {
 public:
  // `count` counters, all at turn 0. Allocates only to grow.
  void Reset(int64_t count) {
    if (count > capacity_) {
      turns_ = std::make_unique<std::atomic<int64_t>[]>(static_cast<size_t>(count));
      capacity_ = count;
    }
    for (int64_t i = 0; i < count; ++i) turns_[i].store(0, std::memory_order_relaxed);
  }

  // Returns true when it is the caller's turn, false once progress says stopped.
  // The turns before belong to tasks that have started (ThreadPool::ParallelFor).
  bool Await(int64_t index, int64_t turn, const Progress& progress) const {
    for (int spins = 0; turns_[index].load(std::memory_order_acquire) != turn; ++spins) {
      if (progress.stopped()) return false;
      // The other thread may need this very core.
      if (spins > 64) std::this_thread::yield();
    }
    return true;
  }

  // Ends the caller's turn.
  void Pass(int64_t index) { turns_[index].fetch_add(1, std::memory_order_release); }

 private:
  std::unique_ptr<std::atomic<int64_t>[]> turns_;
  int64_t capacity_ = 0;
};

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_TURNS_H_
