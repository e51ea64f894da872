// RingMember: this worker's place in the ring, from Prepare to Teardown.
#ifndef RINGATTN_WORKER_SERVICE_RING_MEMBER_H_
#define RINGATTN_WORKER_SERVICE_RING_MEMBER_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/device/device.h"
#include "worker/executor/operation.h"
#include "worker/operation/operation_registry.h"
#include "worker/service/activity_probe.h"
#include "worker/service/operation_runner.h"
#include "worker/service/ring_measurement.h"
#include "worker/service/watchdog.h"

namespace ringattn::worker {

struct RingMemberOptions {
  // Of a commit: connecting to all peers and measuring the ring.
  absl::Duration connect_timeout = absl::Seconds(10);
  // What requests may take of the device; the measurement takes at most half of it, while
  // there are none.
  int64_t memory_limit_bytes = 0;
  // Bound of a teardown; past it the process ends.
  absl::Duration teardown_timeout = absl::Seconds(5);
  // Kernels that can may wait for keys that are on their way (key_arrival()).
  bool late_keys = true;
};

// Used by one thread, on which its calls may block within their bounds; CancelForming may
// come from any.
class RingMember {
 public:
  // Everything outlives the member.
  RingMember(RingMemberOptions options, Device* device, RingTransport* transport,
             OperationRegistry* registry, OperationRunner* runner, ActivityProbe* probe,
             Watchdog* watchdog);

  // Phase one; the blob. Ends what is left of an older generation.
  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size);

  // Phase two: connects to all peers and measures the ring with them. FAILED_PRECONDITION
  // if another generation is prepared, UNAVAILABLE if a peer cannot be reached, the ranks
  // have no transport in common, or one does not take part in time, CANCELLED by
  // CancelForming.
  absl::StatusOr<RingRates> Commit(uint64_t generation, const std::vector<std::string>& blobs);

  // Ends a Commit of this or an older generation, in progress or to come. Never blocks for
  // long.
  void CancelForming(uint64_t generation);

  // Aborts transfers, ends and frees all operations, closes the links. When it
  // returns nothing of any generation is left. Past its bound the watchdog strikes.
  void TearDown(const std::string& reason);

  // TearDown, and the next coordinator may count generations anew.
  void Forget(const std::string& reason);

  uint64_t generation() const { return generation_; }  // last prepared
  bool formed() const { return communicator_ != nullptr; }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  // When keys come that a step receives. Of a ring whose transfers take no units that compute, at a
  // rate by which a kernel that has them hardly waits; else kernels do not.
  KeyArrival key_arrival() const;

 private:
  // While a Commit measures `communicator`, or null. CANCELLED if it is too late.
  absl::Status SetForming(uint64_t generation, Communicator* communicator);

  const RingMemberOptions options_;
  Device* const device_;
  RingTransport* const transport_;
  OperationRegistry* const registry_;
  OperationRunner* const runner_;
  ActivityProbe* const probe_;
  Watchdog* const watchdog_;

  uint64_t generation_ = 0;
  int rank_ = 0;
  int world_size_ = 0;
  std::shared_ptr<Communicator> communicator_;
  RingRates rates_;  // of communicator_

  absl::Mutex forming_mutex_;
  uint64_t cancelled_generation_ ABSL_GUARDED_BY(forming_mutex_) = 0;  // and older ones
  Communicator* forming_ ABSL_GUARDED_BY(forming_mutex_) = nullptr;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_RING_MEMBER_H_
