// LoneRingTransport: rings of one member, for a device whose transport is not there.
// Everything that needs no peer works; larger rings are refused with the reason.
#ifndef RINGATTN_WORKER_COMM_LONE_LONE_RING_TRANSPORT_H_
#define RINGATTN_WORKER_COMM_LONE_LONE_RING_TRANSPORT_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "worker/comm/communicator.h"

namespace ringattn::worker {

// Thread safe.
class LoneRingTransport : public RingTransport {
 public:
  // `reason`: why there is no better transport, not OK.
  explicit LoneRingTransport(absl::Status reason) : reason_(std::move(reason)) {}

  // FAILED_PRECONDITION with the reason unless world_size is 1.
  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) override;
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(uint64_t generation,
                                                        const std::vector<std::string>& blobs,
                                                        absl::Time deadline) override;
  void Cancel() override {}

 private:
  const absl::Status reason_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_LONE_LONE_RING_TRANSPORT_H_
