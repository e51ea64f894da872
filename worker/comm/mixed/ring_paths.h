// RingPaths: which ranks of a ring exchange by copy engines and which over a network, by NCCL or
// sockets. Every rank derives it from the blobs of all ranks, so all agree.
#ifndef RINGATTN_WORKER_COMM_MIXED_RING_PATHS_H_
#define RINGATTN_WORKER_COMM_MIXED_RING_PATHS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/comm/communicator.h"
#include "worker/comm/mixed/mixed_blob.h"
#include "worker/comm/mixed/network_choice.h"

namespace ringattn::worker {

struct RingPaths {
  enum class Kind {
    kCopies,   // all ranks exchange by copy engines
    kNetwork,  // all over the network
    kMixed,    // some pairs by copy engines, others over the network
  };

  Kind kind = Kind::kCopies;
  // By rank. Ranks with the same number exchange by copy engines, others over the network. Numbered
  // from 0 in the order of their first ranks.
  std::vector<int> island;
  std::string across;  // why there is more than one island; empty with kCopies
  // Why ranks that share memory on one machine exchange over the network; empty if none do. Within
  // a machine, either all pairs of such ranks exchange by copy engines or none.
  std::string within;
  NetworkChoice network;  // what carries the bytes between islands

  // Returns the other ranks of the rank's island, or all ranks of other islands.
  std::vector<int> PeersInside(int rank) const;
  std::vector<int> PeersOutside(int rank) const;

  // Returns, for example, "0-1 2-3".
  std::string Islands() const;
};

// Decides from all members' blobs, by rank. Errors:
//   INVALID_ARGUMENT     a part for copy engines is malformed; the message names the rank
//   FAILED_PRECONDITION  ranks need a network and have none in common (ChooseNetwork)
absl::StatusOr<RingPaths> ChoosePaths(const std::vector<MixedBlob>& blobs);

// A group of transfers by what moves them, each part in the order of the group.
struct SplitGroup {
  std::vector<PeerTransfer> copies;
  std::vector<PeerTransfer> network;
};

//   by_copies  by rank: copy engines move the transfers with it
SplitGroup SplitByPath(const std::vector<PeerTransfer>& group, const std::vector<bool>& by_copies);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_MIXED_RING_PATHS_H_
