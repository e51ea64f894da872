// KvEngine: executes the steps of all K/V caches of a worker, one at a time, next to
// OperationRunner. A step does not wait for a running operation. "On the engine's thread" means: in
// a work item of the engine, on any thread.
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
  // The same, but on the calling thread if no other work waits or runs, which saves two changes of
  // threads. Work on the engine's thread and work here exclude each other.
  void RunHere(const Work& work) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Loop() ABSL_LOCKS_EXCLUDED(mutex_);

  const std::unique_ptr<StepKernels> kernels_;
  absl::Mutex mutex_;
  std::deque<Work> queue_ ABSL_GUARDED_BY(mutex_);
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool runs_here_ ABSL_GUARDED_BY(mutex_) = false;    // a thread is in RunHere
  bool runs_queued_ ABSL_GUARDED_BY(mutex_) = false;  // the engine's thread is in a work item
  std::thread thread_;                                // last: uses the rest
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KV_KV_ENGINE_H_
