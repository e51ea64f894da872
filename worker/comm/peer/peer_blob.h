// PeerBlob: what a rank tells the others so that they can map its memory.
#ifndef RINGATTN_WORKER_COMM_PEER_PEER_BLOB_H_
#define RINGATTN_WORKER_COMM_PEER_PEER_BLOB_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringattn::worker {

// How a rank's memory is reached.
enum class PeerSharing {
  kVmm,  // descriptors, out of the rank's door
  kIpc,  // CUDA's legacy handles, and the segment's file under /proc
};

struct PeerBlob {
  PeerSharing sharing = PeerSharing::kIpc;
  // HostKey or DoorKey: ranks with the same one reach one another's memory.
  std::string host_key;
  int64_t process_id = 0;
  std::string device_uuid;                   // 32 hexadecimal digits
  std::vector<std::string> reachable_uuids;  // devices whose memory this one can read
  std::string place;                         // PeerSegment::path, or HandleServer::socket
  std::string token = {};                    // of the door, kTokenBytes; kVmm alone
};

std::string EncodePeerBlob(const PeerBlob& blob);

// All members' blobs by rank. INVALID_ARGUMENT if one is malformed; an empty text says
// that its rank cannot share memory: FAILED_PRECONDITION. So is the answer if two ranks
// are on different machines or on one GPU, share memory in different ways, or if a GPU does not
// reach another: the message names the ranks. The same for everybody who decodes the same texts.
absl::StatusOr<std::vector<PeerBlob>> DecodePeerBlobs(const std::vector<std::string>& texts);

// Of this process, whose files under /proc others can open: the machine's boot and the PID
// namespace.
std::string HostKey();

// Of this process, whose door others reach: the machine's boot, and unless the socket is a file the
// network namespace.
std::string DoorKey(const std::string& socket);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_PEER_PEER_BLOB_H_
