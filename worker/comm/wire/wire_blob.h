// WireBlob: a rank's address and secret, which all members receive before they connect, and the
// token of a ring, which is derived from all its blobs.
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_BLOB_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_BLOB_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/comm/sockets/socket_address.h"

namespace ringattn::worker {

inline constexpr int kMaxWireStripes = 8;

struct WireBlob {
  bool tls = false;
  int stripes = 1;  // connections per pair that this rank accepts: 1 to kMaxWireStripes
  SocketAddress address;
  std::string secret;  // kTokenBytes random bytes
};

std::string FormatWireBlob(const WireBlob& blob);

// Returns INVALID_ARGUMENT for anything that FormatWireBlob does not produce.
absl::StatusOr<WireBlob> ParseWireBlob(absl::string_view text);

// Returns the token of a ring. Computing it takes all blobs, which only members know.
std::string WireRingToken(uint64_t generation, const std::vector<WireBlob>& blobs);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_BLOB_H_
