// SingleRankTransport: rings of one member, for a device whose transport is not available.
// Everything that needs no peer works. Larger rings are rejected with the reason.
#ifndef RINGATTN_WORKER_COMM_SINGLE_RANK_SINGLE_RANK_TRANSPORT_H_
#define RINGATTN_WORKER_COMM_SINGLE_RANK_SINGLE_RANK_TRANSPORT_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "worker/comm/communicator.h"
#include "worker/comm/ring_attempts.h"

namespace ringattn::worker {

// Thread safe.
class SingleRankTransport : public RingTransport {
 public:
  // `reason`: why no other transport is available; must not be OK.
  explicit SingleRankTransport(absl::Status reason) : reason_(std::move(reason)) {}

  // Returns FAILED_PRECONDITION with the reason if world_size is more than 1.
  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) override;
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(uint64_t generation,
                                                        const std::vector<std::string>& blobs,
                                                        absl::Time deadline) override;
  void Cancel() override { attempts_.Cancel(); }

 private:
  const absl::Status reason_;
  RingAttempts attempts_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_SINGLE_RANK_SINGLE_RANK_TRANSPORT_H_
