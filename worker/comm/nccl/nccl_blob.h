// NcclBlob: what a rank sends to the others before their NCCL communicator is created.
#ifndef RINGATTN_WORKER_COMM_NCCL_NCCL_BLOB_H_
#define RINGATTN_WORKER_COMM_NCCL_NCCL_BLOB_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ringattn::worker {

inline constexpr int kNcclUniqueIdBytes = 128;

struct NcclBlob {
  std::string host;         // for messages; without control characters
  std::string device_uuid;  // 32 hexadecimal digits
  std::string unique_id;    // rank 0: kNcclUniqueIdBytes bytes; other ranks: empty
  // NCCL_HOSTID, for which NCCL regards ranks as on different hosts if it differs; without control
  // characters. Empty: the machine decides.
  std::string host_id = {};
};

std::string EncodeNcclBlob(const NcclBlob& blob);

// Returns the ring's unique id, given all members' blobs by rank. Returns INVALID_ARGUMENT if one
// is malformed, or if two ranks with equal host_id use one GPU, on which NCCL would fail or hang.
absl::StatusOr<std::string> UniqueIdOf(const std::vector<std::string>& blobs);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_NCCL_NCCL_BLOB_H_
