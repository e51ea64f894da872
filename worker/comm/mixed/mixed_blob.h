// MixedBlob: what a GPU worker sends to the other members of a ring: its blobs for copy engines,
// NCCL and sockets, and what decides between the last two.
#ifndef RINGATTN_WORKER_COMM_MIXED_MIXED_BLOB_H_
#define RINGATTN_WORKER_COMM_MIXED_MIXED_BLOB_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ringattn::worker {

struct MixedBlob {
  std::string copies = "";  // PeerBlob; empty: the rank cannot share memory
  std::string nccl = "";    // NcclBlob; empty: the rank has no NCCL
  std::string wire = "";    // WireBlob; empty: the rank does not use sockets
  std::string host = "";    // the name of the rank's host; empty: unknown
  // Properties of the rank and its host that decide between NCCL and sockets (network_choice.h).
  bool tls = false;            // it has cluster certificates
  bool insecure_ring = false;  // the ring need not be encrypted (--insecure_ring)
  bool rdma = false;           // NCCL can use an RDMA device
  bool loopback = false;       // its sockets listen on loopback
};

// The maximum length of each part.
inline constexpr size_t kMaxMixedPartBytes = 64 << 10;

// REQUIRES: all parts are within the limit.
std::string EncodeMixedBlob(const MixedBlob& blob);

// Does not decode the parts. Returns INVALID_ARGUMENT, with `rank` and what is wrong, if the text
// is of another kind or version, or if its lengths do not fit.
absl::StatusOr<MixedBlob> DecodeMixedBlob(absl::string_view text, int rank);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_MIXED_MIXED_BLOB_H_
