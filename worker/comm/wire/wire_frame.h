// WireFrame: the header that precedes everything on an established connection between two ranks.
//
// A grant states that the receiver has posted its receive `sequence` of `total` bytes, so the
// sender may send all of them. A data frame carries one chunk of a send. Only transfers of at most
// kEagerBytes may be sent before their grant, from a fixed credit (wire_link.h).
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_FRAME_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_FRAME_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace ringattn::worker {

struct WireFrame {
  enum class Kind : uint8_t { kGrant = 1, kData = 2 };
  Kind kind = Kind::kGrant;
  uint32_t length = 0;    // bytes that follow the header; 0 for a grant
  uint64_t sequence = 0;  // of the transfer: 0, 1, ... per direction of a pair of ranks
  uint64_t offset = 0;    // of the chunk in the transfer; 0 for a grant
  uint64_t total = 0;     // bytes of the transfer
};

inline constexpr size_t kFrameBytes = 32;

// Transfers are divided into chunks of this size, which any connection of the pair may carry. Long
// enough that a header and a lock per chunk cost nothing; short enough to divide a block of a few
// MiB between connections.
inline constexpr uint64_t kChunkBytes = uint64_t{1} << 20;

// More than the memory of any device.
inline constexpr uint64_t kMaxTransferBytes = uint64_t{1} << 46;

// Appends the header. REQUIRES: ParseFrame accepts the frame.
void AppendFrame(const WireFrame& frame, std::string* bytes);

// Parses kFrameBytes bytes. Returns INVALID_ARGUMENT unless they are a frame whose fields agree:
// a data frame carries a whole chunk of its transfer.
absl::StatusOr<WireFrame> ParseFrame(const char* bytes);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_FRAME_H_
