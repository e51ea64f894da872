#include "worker/kernels/cpu/workspace/thread_pool.h"

#include <cassert>

namespace ringattn::worker::cpu {

ThreadPool::ThreadPool(int threads) {
  assert(threads >= 1);
  for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { WorkerLoop(t); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  round_started_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::ParallelFor(int64_t tasks, Body run) {
  if (tasks <= 1 || workers_.empty()) {
    for (int64_t task = 0; task < tasks; ++task) run(0, task);
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    next_task_.store(0, std::memory_order_relaxed);
    body_ = &run;
    tasks_ = tasks;
    busy_workers_ = static_cast<int>(workers_.size());
    ++round_;
  }
  round_started_.notify_all();
  Drain(0, tasks, run);
  std::unique_lock<std::mutex> lock(mutex_);
  workers_done_.wait(lock, [this] { return busy_workers_ == 0; });
}

void ThreadPool::Drain(int thread, int64_t tasks, const Body& run) {
  for (;;) {
    const int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks) return;
    run(thread, task);
  }
}

void ThreadPool::WorkerLoop(int thread) {
  int64_t done_round = 0;
  for (;;) {
    const Body* body;
    int64_t tasks;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      round_started_.wait(lock, [&] { return ending_ || round_ != done_round; });
      if (ending_) return;
      done_round = round_;
      body = body_;
      tasks = tasks_;
    }
    Drain(thread, tasks, *body);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--busy_workers_ == 0) workers_done_.notify_one();
  }
}

}  // namespace ringattn::worker::cpu
