// RingAttempts: the ring that a transport is currently forming, if any.
#ifndef RINGATTN_WORKER_COMM_RING_ATTEMPTS_H_
#define RINGATTN_WORKER_COMM_RING_ATTEMPTS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "worker/comm/communicator.h"

namespace ringattn::worker {

// Base class of what transports prepare.
struct RingAttempt {
  virtual ~RingAttempt() = default;

  uint64_t generation = 0;
  int rank = 0;
  int world_size = 0;
  std::atomic<bool> cancelled{false};
};

// Implements the phases of RingTransport. Thread safe.
class RingAttempts {
 public:
  using Joined = absl::StatusOr<std::unique_ptr<Communicator>>;

  // Returns INVALID_ARGUMENT unless 0 <= rank < world_size.
  static absl::Status Check(int rank, int world_size);

  // Stores the attempt and cancels an earlier one.
  void Prepare(std::shared_ptr<RingAttempt> attempt);

  // Passes the attempt of that generation to `join`, which returns a StatusOr, and returns the
  // result. Cancel() can cancel the attempt until then. Returns CANCELLED if the attempt is not the
  // prepared one or is cancelled meanwhile, INVALID_ARGUMENT if the number of blobs is wrong.
  template <typename Join>
  std::invoke_result_t<Join, RingAttempt&> Connect(uint64_t generation, size_t blob_count,
                                                   Join join) {
    absl::StatusOr<std::shared_ptr<RingAttempt>> attempt = Begin(generation, blob_count);
    if (!attempt.ok()) return attempt.status();
    std::invoke_result_t<Join, RingAttempt&> joined = join(**attempt);
    const absl::Status ended = End(*attempt);
    if (joined.ok() && !ended.ok()) return ended;
    return joined;
  }

  void Cancel();

 private:
  absl::StatusOr<std::shared_ptr<RingAttempt>> Begin(uint64_t generation, size_t blob_count);
  // The attempt is not the prepared one any more. Returns CANCELLED if it was cancelled.
  absl::Status End(const std::shared_ptr<RingAttempt>& attempt);

  absl::Mutex mutex_;
  std::shared_ptr<RingAttempt> prepared_ ABSL_GUARDED_BY(mutex_);  // until connected
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_RING_ATTEMPTS_H_
