// RingMember: this worker's place in the ring, from Prepare to Teardown.
#ifndef RINGATTN_WORKER_SERVICE_RING_MEMBER_H_
#define RINGATTN_WORKER_SERVICE_RING_MEMBER_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/service/activity_probe.h"
#include "worker/service/operation_registry.h"
#include "worker/service/operation_runner.h"
#include "worker/service/watchdog.h"

namespace ringattn {

struct RingMemberOptions {
  absl::Duration connect_timeout = absl::Seconds(10);
  // Bound of a teardown; past it the process ends.
  absl::Duration teardown_timeout = absl::Seconds(5);
};

// Used by one thread, on which its calls may block within their bounds.
class RingMember {
 public:
  // Everything outlives the member.
  RingMember(RingMemberOptions options, RingTransport* transport, OperationRegistry* registry,
             OperationRunner* runner, ActivityProbe* probe, Watchdog* watchdog);

  // Phase one; the blob. Ends what is left of an older generation.
  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size);

  // Phase two. FAILED_PRECONDITION if another generation is prepared.
  absl::Status Commit(uint64_t generation, const std::vector<std::string>& blobs);

  // Aborts transfers, ends and frees all operations, closes the links. When it
  // returns nothing of any generation is left. Past its bound the watchdog strikes.
  void TearDown(const std::string& reason);

  // TearDown, and the next coordinator may count generations anew.
  void Forget(const std::string& reason);

  uint64_t generation() const { return generation_; }  // last prepared
  bool formed() const { return communicator_ != nullptr; }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

 private:
  const RingMemberOptions options_;
  RingTransport* const transport_;
  OperationRegistry* const registry_;
  OperationRunner* const runner_;
  ActivityProbe* const probe_;
  Watchdog* const watchdog_;

  uint64_t generation_ = 0;
  int rank_ = 0;
  int world_size_ = 0;
  std::shared_ptr<Communicator> communicator_;
};

}  // namespace ringattn

#endif  // RINGATTN_WORKER_SERVICE_RING_MEMBER_H_
