#include "worker/comm/wire/wire_ring_transport.h"

#include <optional>
#include <utility>

#include "worker/comm/wire/wire_communicator.h"

namespace ringattn::worker {

absl::StatusOr<std::unique_ptr<Communicator>> WireRingTransport::Connect(
    uint64_t generation, const std::vector<std::string>& blobs, absl::Time deadline) {
  absl::StatusOr<WireConnector::Joined> joined =
      connector_.Connect(generation, blobs, /*peers=*/std::nullopt, deadline);
  if (!joined.ok()) return joined.status();
  return std::make_unique<WireCommunicator>(joined->rank, joined->world_size,
                                            std::move(joined->streams), options_.step_timeout,
                                            options_.counters);
}

}  // namespace ringattn::worker
