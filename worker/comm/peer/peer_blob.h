// PeerBlob: what a rank sends to the others so that they can map its memory.
#ifndef RINGATTN_WORKER_COMM_PEER_PEER_BLOB_H_
#define RINGATTN_WORKER_COMM_PEER_PEER_BLOB_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringattn::worker {

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
  std::string device_uuid;                   // 32 hexadecimal digits
  std::vector<std::string> reachable_uuids;  // devices whose memory this one can read
  std::string place;                         // PeerSegment::path or HandleServer::socket
  std::string token = {};                    // for the HandleServer, kTokenBytes; kVmm only
};

std::string EncodePeerBlob(const PeerBlob& blob);

// Decodes all members' blobs, by rank. The result depends only on the texts. Errors:
//   INVALID_ARGUMENT     a blob is malformed
//   FAILED_PRECONDITION  a blob is empty (its rank cannot share memory), two ranks are on
//                        different machines or on one GPU, share memory in different ways,
//                        or have GPUs without peer access; the message names the ranks
absl::StatusOr<std::vector<PeerBlob>> DecodePeerBlobs(const std::vector<std::string>& texts);

// Identifies the processes that can open this process's files under /proc: the machine's boot id
// and the PID namespace.
std::string HostKey();

// Identifies the processes that can reach this process's socket: the machine's boot id and, for an
// abstract socket, the network namespace.
std::string SocketKey(const std::string& socket);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_PEER_PEER_BLOB_H_
