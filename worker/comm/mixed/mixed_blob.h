// MixedBlob: what a GPU worker sends to the other members of a ring: its blobs for copy engines and
// for NCCL.
#ifndef RINGATTN_WORKER_COMM_MIXED_MIXED_BLOB_H_
#define RINGATTN_WORKER_COMM_MIXED_MIXED_BLOB_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ringattn::worker {

struct MixedBlob {
  std::string copies;   // PeerBlob; empty: the rank cannot share memory
  std::string network;  // NcclBlob; empty: the rank has no NCCL
};

// The maximum length of either part.
inline constexpr size_t kMaxMixedPartBytes = 64 << 10;

// REQUIRES: both parts are within the limit.
std::string EncodeMixedBlob(const MixedBlob& blob);

// Does not decode the parts. Returns INVALID_ARGUMENT, with `rank` and what is wrong, if the text
// is of another kind or version, or if its lengths do not fit.
absl::StatusOr<MixedBlob> DecodeMixedBlob(absl::string_view text, int rank);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_MIXED_MIXED_BLOB_H_
