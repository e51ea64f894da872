// CopyPool: a client's threads for copying tensors.
// Tests: copy_pool_test.cc.
#ifndef RINGATTN_CLIENT_MEMORY_COPY_POOL_H_
#define RINGATTN_CLIENT_MEMORY_COPY_POOL_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ringattn::client {

// Thread safe. The threads start with the first work.
class CopyPool {
 public:
  struct Piece {
    uint8_t* to = nullptr;
    const uint8_t* from = nullptr;
    uint64_t bytes = 0;
  };

  // One of the threads calls `on_idle` when no work has been added for `idle`, and again after each
  // further `idle`.
  CopyPool(int threads, absl::Duration idle, std::function<void()> on_idle);
  // Completes the work that has been added.
  ~CopyPool();

  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;

  void Add(std::function<void()> work) ABSL_LOCKS_EXCLUDED(mutex_);
  // Copies the pieces, with several threads if that is faster. The last thread to finish calls
  // `done`. Polls `wanted` between units; if it returns false, the rest is skipped.
  void Copy(const std::vector<Piece>& pieces, std::function<bool()> wanted,
            std::function<void()> done) ABSL_LOCKS_EXCLUDED(mutex_);

  // The number of threads that pays on this machine.
  static int DefaultThreads();

 private:
  void StartThreads() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run(bool minds_idleness) ABSL_LOCKS_EXCLUDED(mutex_);

  const int wanted_threads_;
  const absl::Duration idle_;
  const std::function<void()> on_idle_;
  absl::Mutex mutex_;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<std::function<void()>> work_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_MEMORY_COPY_POOL_H_
