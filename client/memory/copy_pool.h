// CopyPool: the threads of a client that copy tensors.
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

  // `on_idle` is called, by one of the threads, when nothing has been added for `idle`, and again
  // each `idle` that follows.
  CopyPool(int threads, absl::Duration idle, std::function<void()> on_idle);
  // Does what has been added.
  ~CopyPool();

  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;

  void Add(std::function<void()> work) ABSL_LOCKS_EXCLUDED(mutex_);
  // Copies the pieces, by several threads where that pays; `done` by the one that ends last.
  // `wanted` is asked between parts: false leaves the rest out.
  void Copy(const std::vector<Piece>& pieces, std::function<bool()> wanted,
            std::function<void()> done) ABSL_LOCKS_EXCLUDED(mutex_);

  // As many as pay on this machine.
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
