// RingMember: this worker's membership in a ring, from Prepare to Teardown.
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
#include "worker/measurement/ring_measurement.h"
#include "worker/operation/operation_registry.h"
#include "worker/service/activity_probe.h"
#include "worker/service/operation_runner.h"
#include "worker/service/watchdog.h"

namespace ringattn::worker {

struct RingMemberOptions {
  // Limits Commit: connecting to all peers and measuring the ring. The coordinator's own limit may
  // be lower.
  absl::Duration connect_timeout = absl::Seconds(10);
  // Device memory for requests. The measurement uses at most half of it, while there are no
  // requests.
  int64_t memory_limit_bytes = 0;
  // Limits a teardown. If it passes, the process exits.
  absl::Duration teardown_timeout = absl::Seconds(5);
  // Allows kernels that support it to wait for keys in flight (key_arrival()).
  bool late_keys = true;
};

// Returns when received keys arrive in each lane of a ring with these rates, if kernels should wait
// for them. That requires peers with which transfers use no compute units, and a rate in the lane
// at which kernels hardly wait.
KeyArrival KeyArrivalOf(const Communicator& ring, const RingRates& rates);

// Not thread safe: used by one thread, on which calls may block within their limits. CancelForming
// may be called from any thread.
class RingMember {
 public:
  // Every argument must outlive the member.
  RingMember(RingMemberOptions options, Device* device, RingTransport* transport,
             OperationRegistry* registry, OperationRunner* runner, ActivityProbe* probe,
             Watchdog* watchdog);

  // Phase one: returns this worker's blob. Ends an older generation, if any.
  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size);

  // Phase two: connects to all peers and measures the ring with them. Errors:
  //   FAILED_PRECONDITION  another generation is prepared
  //   UNAVAILABLE          a peer cannot be reached or is late, or the ranks share no transport
  //   CANCELLED            CancelForming was called
  //   hosts  as for MeasureRing
  //   limit  in addition to connect_timeout
  absl::StatusOr<RingRates> Commit(uint64_t generation, const std::vector<std::string>& blobs,
                                   const std::vector<int>& hosts,
                                   absl::Duration limit = absl::InfiniteDuration());

  // Ends a current or future Commit of this or an older generation. Never blocks for long.
  void CancelForming(uint64_t generation);

  // Aborts transfers, ends and frees all operations and closes the links. Nothing of any generation
  // is left when it returns. The watchdog fires if it takes too long.
  void TearDown(const std::string& reason);

  // Ends transfers with one rank of the formed ring, because it is lost. Operations without it go
  // on (Communicator::LosePeer). No effect on another generation.
  void LosePeer(uint64_t generation, int rank);

  // Tears down, and accepts any generation number from the next coordinator.
  void Forget(const std::string& reason);

  uint64_t generation() const { return generation_; }  // the last one prepared
  bool formed() const { return communicator_ != nullptr; }
  int rank() const { return rank_; }
  // Returns what carries bytes to the next rank (Communicator::transport); empty in a ring of one.
  // REQUIRES: formed().
  std::string next_transport() const;
  int world_size() const { return world_size_; }
  // The hosts of the formed ring, as Commit got them.
  const std::vector<int>& hosts() const { return hosts_; }
  // Returns KeyArrivalOf the formed ring, or a default value if late keys are off or no ring is
  // formed.
  KeyArrival key_arrival() const;

 private:
  // Sets the communicator that a Commit is measuring, or null. Returns CANCELLED if the generation
  // has been cancelled.
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
  std::vector<int> hosts_;  // of communicator_
  RingRates rates_;         // of communicator_

  absl::Mutex forming_mutex_;
  uint64_t cancelled_generation_ ABSL_GUARDED_BY(forming_mutex_) =
      0;  // this generation and older ones
  Communicator* forming_ ABSL_GUARDED_BY(forming_mutex_) = nullptr;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_RING_MEMBER_H_
