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

void KvEngine::Loop() {
  const auto has_news = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return closing_ || !queue_.empty();
  };
  while (true) {
    Work work;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&has_news));
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    work(kernels_.get());
  }
}

}  // namespace ringattn::worker
