// WireRingTransport: forms rings of CPU workers over TCP, also between hosts (WireConnector).
//
// Tests: wire_ring_transport_test.cc, wire_forming_test.cc,
// worker/comm/contract
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_RING_TRANSPORT_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_RING_TRANSPORT_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/comm/wire/wire_connector.h"

namespace ringattn::worker {

// Thread safe.
class WireRingTransport : public RingTransport {
 public:
  explicit WireRingTransport(const WireTransportOptions& options)
      : options_(options), connector_(options) {}

  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) override {
    return connector_.Prepare(generation, rank, world_size);
  }
  // Returns FAILED_PRECONDITION, too, if some ranks use TLS and others do not.
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(uint64_t generation,
                                                        const std::vector<std::string>& blobs,
                                                        absl::Time deadline) override;
  void Cancel() override { connector_.Cancel(); }

 private:
  const WireTransportOptions options_;
  WireConnector connector_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_RING_TRANSPORT_H_
