// RingAttempts: the ring that a transport is forming, if any.
#ifndef RINGATTN_WORKER_COMM_RING_ATTEMPTS_H_
#define RINGATTN_WORKER_COMM_RING_ATTEMPTS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "worker/comm/communicator.h"

namespace ringattn::worker {

// Transports derive what they prepare from it.
struct RingAttempt {
  virtual ~RingAttempt() = default;

  uint64_t generation = 0;
  int rank = 0;
  int world_size = 0;
  std::atomic<bool> cancelled{false};
};

// Thread safe. The phases of RingTransport, whose comments hold.
class RingAttempts {
 public:
  using Joined = absl::StatusOr<std::unique_ptr<Communicator>>;

  // INVALID_ARGUMENT unless 0 <= rank < world_size.
  static absl::Status Check(int rank, int world_size);

  // Cancels what was prepared before.
  void Prepare(std::shared_ptr<RingAttempt> attempt);

  // What `join` makes of the attempt of that generation; Cancel() finds it until then.
  // CANCELLED if it is not the prepared one or is cancelled meanwhile, INVALID_ARGUMENT if
  // not all members' blobs came.
  Joined Connect(uint64_t generation, size_t blob_count,
                 const std::function<Joined(RingAttempt& attempt)>& join);

  void Cancel();

 private:
  absl::Mutex mutex_;
  std::shared_ptr<RingAttempt> prepared_ ABSL_GUARDED_BY(mutex_);  // until connected
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_RING_ATTEMPTS_H_
