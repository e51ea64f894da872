// KvEngine: the thread that executes the steps of all K/V caches of a worker, next to
// OperationRunner. A step does not wait for a running operation.
//
// Tests: kv_store_test.cc, step_streams_test.cc
#ifndef RINGATTN_WORKER_KV_KV_ENGINE_H_
#define RINGATTN_WORKER_KV_KV_ENGINE_H_

#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "worker/device/device.h"

namespace ringattn::worker {

// Thread safe.
class KvEngine {
 public:
  // `kernels` is null if the device keeps the caches (Device::kv_caches).
  using Work = std::function<void(StepKernels* kernels)>;

  explicit KvEngine(std::unique_ptr<StepKernels> kernels);
  // Runs everything that was posted.
  ~KvEngine();
  KvEngine(const KvEngine&) = delete;
  KvEngine& operator=(const KvEngine&) = delete;

  // Runs `work` on the engine's thread, in the order of calls. Never blocks.
  void Post(Work work) ABSL_LOCKS_EXCLUDED(mutex_);
  // The same; returns when it has run. REQUIRES: not on the engine's thread.
  void Run(Work work) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Loop() ABSL_LOCKS_EXCLUDED(mutex_);

  const std::unique_ptr<StepKernels> kernels_;
  absl::Mutex mutex_;
  std::deque<Work> queue_ ABSL_GUARDED_BY(mutex_);
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: uses the rest
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KV_KV_ENGINE_H_
