#include "worker/kv/kv_engine.h"

#include <pthread.h>

#include <utility>

#include "absl/synchronization/notification.h"

namespace ringattn::worker {

KvEngine::KvEngine(std::unique_ptr<StepKernels> kernels)
    : kernels_(std::move(kernels)), thread_([this] { Loop(); }) {
  pthread_setname_np(thread_.native_handle(), "kv_engine");
}

KvEngine::~KvEngine() {
  {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
  }
  thread_.join();
}

void KvEngine::Post(Work work) {
  absl::MutexLock lock(&mutex_);
  queue_.push_back(std::move(work));
}

void KvEngine::Run(Work work) {
  absl::Notification done;
  Post([&](StepKernels* kernels) {
    work(kernels);
    done.Notify();
  });
  done.WaitForNotification();
}

void KvEngine::RunHere(const Work& work) {
  const bool is_idle = [this] {
    absl::MutexLock lock(&mutex_);
    if (runs_here_ || runs_queued_ || !queue_.empty()) return false;
    return runs_here_ = true;
  }();
  if (!is_idle) return Run(work);
  work(kernels_.get());
  absl::MutexLock lock(&mutex_);
  runs_here_ = false;
}

void KvEngine::Loop() {
  const auto may_run = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !runs_here_ && (closing_ || !queue_.empty());
  };
  while (true) {
    Work work;
    {
      absl::MutexLock lock(&mutex_);
      runs_queued_ = false;
      mutex_.Await(absl::Condition(&may_run));
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
      runs_queued_ = true;
    }
    work(kernels_.get());
  }
}

}  // namespace ringattn::worker
