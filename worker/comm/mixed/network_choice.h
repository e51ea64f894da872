// The rule by which the ranks of a ring choose what carries bytes between ranks that share no
// memory: NCCL or sockets (wire). Every rank derives it from the blobs of all ranks, so all agree.
//
// Tests: network_choice_test.cc
#ifndef RINGATTN_WORKER_COMM_MIXED_NETWORK_CHOICE_H_
#define RINGATTN_WORKER_COMM_MIXED_NETWORK_CHOICE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/comm/mixed/mixed_blob.h"

namespace ringattn::worker {

enum class NetworkEngine { kNone, kNccl, kWire };

// Returns "none", "nccl" or "wire".
absl::string_view NetworkName(NetworkEngine engine);

struct NetworkChoice {
  NetworkEngine engine = NetworkEngine::kNone;  // none: no two ranks need a network
  std::string reason;                           // empty with kNone
};

// Chooses, in this order:
//   NCCL  if ranks that exchange by it are on one host, so nothing leaves the host
//   wire  if a rank has cluster certificates and does not permit a plain ring
//   NCCL  if every rank has an RDMA device, or if a rank's sockets listen on loopback only
//   wire  otherwise
// An engine that a rank lacks is not chosen.
//   island  by rank: ranks with the same number share memory
//   why     why there is more than one island, for messages
// Returns FAILED_PRECONDITION, with the ranks and what they lack, if no engine is left or if the
// only one is NCCL, which does not encrypt, and a rank requires encryption between hosts.
absl::StatusOr<NetworkChoice> ChooseNetwork(const std::vector<MixedBlob>& blobs,
                                            const std::vector<int>& island, absl::string_view why);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_MIXED_NETWORK_CHOICE_H_
