// Progress: receives requests to stop or pause a running call and reports how far the call has
// come.
#ifndef RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_PROGRESS_H_
#define RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_PROGRESS_H_

#include <atomic>
#include <cstdint>

#include "worker/kernels/cpu/workspace/pause.h"

namespace ringattn::worker::cpu {

// Thread safe. All arguments outlive the object.
class Progress {
 public:
  // `pause` may be null.
  Progress(const std::atomic<bool>& stop, Pause* pause, std::atomic<int64_t>* tiles_done,
           std::atomic<int64_t>* work_done)
      : stop_(stop), pause_(pause), tiles_done_(tiles_done), work_done_(work_done) {}

  // Waits for the end of a pause. The computing thread polls it at least once per tile, without
  // locks.
  bool stopped() const {
    if (pause_ != nullptr) pause_->Await();
    return stop_.load(std::memory_order_relaxed);
  }
  // work: of the tile's visible pairs (worker/kernels/work.h); 0 for what is not counted.
  void CountTile(int64_t work) const {
    if (tiles_done_ != nullptr) tiles_done_->fetch_add(1, std::memory_order_relaxed);
    if (work_done_ != nullptr) work_done_->fetch_add(work, std::memory_order_relaxed);
  }

 private:
  const std::atomic<bool>& stop_;
  Pause* const pause_;
  std::atomic<int64_t>* tiles_done_;
  std::atomic<int64_t>* work_done_;
};

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_PROGRESS_H_
