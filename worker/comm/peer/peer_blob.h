// PeerBlob: what a rank sends to the others so that they can map its memory.
#ifndef RINGATTN_WORKER_COMM_PEER_PEER_BLOB_H_
#define RINGATTN_WORKER_COMM_PEER_PEER_BLOB_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringattn::worker {

// Larger rings would need more streams than a device has queues.
inline constexpr int kMaxPeerRing = 16;

// How other ranks access a rank's memory.
enum class PeerSharing {
  kVmm,  // descriptors, from the rank's HandleServer
  kIpc,  // CUDA's legacy handles, and the segment's file under /proc
};

struct PeerBlob {
  PeerSharing sharing = PeerSharing::kIpc;
  // From HostKey or SocketKey: ranks with equal keys can access each other's memory.
  std::string host_key;
  int64_t process_id = 0;
  std::string device_uuid;  // 32 hexadecimal digits
  // Devices whose memory this one can read. With its own, ranks on one GPU exchange, too.
  std::vector<std::string> reachable_uuids;
  std::string place;       // PeerSegment::path or HandleServer::socket
  std::string token = {};  // for the HandleServer, kTokenBytes; kVmm only
};

std::string EncodePeerBlob(const PeerBlob& blob);

// Decodes the blob of one rank. Errors:
//   INVALID_ARGUMENT     it is malformed
//   FAILED_PRECONDITION  it is empty: the rank cannot share memory
absl::StatusOr<PeerBlob> DecodePeerBlob(const std::string& text, int rank);

// Returns why two ranks cannot read each other's memory, as in "ranks 0 and 1 " + it; empty if they
// can.
std::string PeerObstacle(const PeerBlob& a, const PeerBlob& b);

// Decodes all members' blobs, by rank. The result depends only on the texts. Errors:
//   INVALID_ARGUMENT     a blob is malformed
//   FAILED_PRECONDITION  a blob is empty (its rank cannot share memory), two ranks are on
//                        different machines or on one GPU, share memory in different ways,
//                        or have GPUs without peer access; the message names the ranks
absl::StatusOr<std::vector<PeerBlob>> DecodePeerBlobs(const std::vector<std::string>& texts);
// The same for some ranks; the others' entries in the result are empty.
absl::StatusOr<std::vector<PeerBlob>> DecodePeerBlobs(const std::vector<std::string>& texts,
                                                      const std::vector<int>& ranks);

// Identifies the processes that can open this process's files under /proc: the machine's boot id
// and the PID namespace. Processes with different `host_id` (--host_id) do not share memory.
std::string HostKey(const std::string& host_id = "");

// Identifies the processes that can reach this process's socket: the machine's boot id and, for an
// abstract socket, the network namespace; `host_id` as for HostKey.
std::string SocketKey(const std::string& socket, const std::string& host_id = "");

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_PEER_PEER_BLOB_H_
