// CopyLine: copies between a device and pinned host memory in one direction, on a stream of their
// own, and how many of them have ended.
#ifndef RINGATTN_WORKER_COMM_WIRE_CUDA_COPY_LINE_H_
#define RINGATTN_WORKER_COMM_WIRE_CUDA_COPY_LINE_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <functional>

#include "absl/status/status.h"
#include "worker/comm/cuda/stream_flags.h"
#include "worker/comm/wire/wire_staging.h"

namespace ringattn::worker {

// A word that the host and streams write and read, in pinned memory.
struct StreamWord {
  uint64_t* host = nullptr;
  uint64_t* device = nullptr;  // its device address

  uint64_t Load() const { return __atomic_load_n(host, __ATOMIC_ACQUIRE); }
  void Store(uint64_t value) const { __atomic_store_n(host, value, __ATOMIC_RELEASE); }
};

// Used by one thread, except busy(). The device is current on it.
class CopyLine {
 public:
  CopyLine(const StreamFlags* flags, StreamWord ended) : flags_(flags), ended_(ended) {}
  ~CopyLine();
  CopyLine(const CopyLine&) = delete;
  CopyLine& operator=(const CopyLine&) = delete;

  absl::Status Open();

  // Starts a copy, which waits for earlier ones only. If it cannot be started, ends it at once with
  // the error.
  void Start(const WireCopy& copy, cudaMemcpyKind kind);
  // Passes every copy that has ended since the last call to `on_end`, in order. Returns how many.
  int Collect(const std::function<void(const WireCopy& copy, const absl::Status& status)>& on_end);

  bool empty() const { return copies_.empty(); }
  // Returns true while the stream has work. May be called on any thread.
  bool busy() const;

 private:
  struct Copy {
    WireCopy copy;
    uint64_t number = 0;
    absl::Status status;
  };

  const StreamFlags* const flags_;
  const StreamWord ended_;  // the number of the last copy that has ended
  cudaStream_t stream_ = nullptr;
  uint64_t started_ = 0;
  std::deque<Copy> copies_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_CUDA_COPY_LINE_H_
