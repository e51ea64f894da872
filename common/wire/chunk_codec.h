// Reads and writes the tensor chunk's wire format without protobuf objects.
//
// ringattn.v1's streams carry messages whose oneof holds a TensorChunk {tensor = 1, offset = 2,
// crc32c = 3, data = 15}. The writer produces plain protobuf that any generated stub reads. The
// reader accepts every legal encoding (fields in any order, repeated, unknown, groups). Payload
// bytes are never copied into a protobuf object: the writer produces only the bytes before the
// payload, and the reader returns pointers into the message's fragments.
//
// This file does no I/O and does not depend on gRPC; common/wire/grpc_slices.h adapts ByteBuffers.
// All functions are pure and thread safe.
#ifndef RINGATTN_COMMON_WIRE_CHUNK_CODEC_H_
#define RINGATTN_COMMON_WIRE_CHUNK_CODEC_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ringattn::wire {

// Borrowed bytes. data may be null if size is 0.
struct Fragment {
  const uint8_t* data = nullptr;
  size_t size = 0;
};

// A message type of ringattn.v1 that consists of one oneof with fields first_member..last_member.
// `chunk_field` is the TensorChunk.
struct StreamMessage {
  int chunk_field = 0;
  int first_member = 1;
  int last_member = 0;
};
inline constexpr StreamMessage kForwardRequest{.chunk_field = 2, .last_member = 2};
inline constexpr StreamMessage kForwardResponse{.chunk_field = 3, .last_member = 5};
inline constexpr StreamMessage kBackwardRequest = kForwardRequest;
inline constexpr StreamMessage kBackwardResponse = kForwardResponse;
inline constexpr StreamMessage kExchangeRequest{
    .chunk_field = 2, .first_member = 2, .last_member = 2};
inline constexpr StreamMessage kExchangeResponse{.chunk_field = 2, .last_member = 3};

// A chunk without its data. `tensor` is the number of a ringattn.v1.TensorId and may be unknown.
struct ChunkHeader {
  int32_t tensor = 0;
  uint64_t offset = 0;
  std::optional<uint32_t> crc32c = std::nullopt;

  bool operator==(const ChunkHeader&) const = default;
};

// The bytes of a message before the payload. The message is complete after exactly `payload_bytes`
// more bytes.
struct ChunkPrefix {
  static constexpr size_t kMaxBytes = 64;

  std::array<uint8_t, kMaxBytes> bytes;
  size_t size = 0;

  absl::string_view view() const { return {reinterpret_cast<const char*>(bytes.data()), size}; }
};

// REQUIRES: payload_bytes < 2^31 - 64 (protobuf's limit on a message).
ChunkPrefix EncodeChunkPrefix(const StreamMessage& type, const ChunkHeader& header,
                              uint64_t payload_bytes);

// Returns the bytes of a message before a submessage of `bytes` bytes in `field`.
ChunkPrefix EncodeFieldPrefix(int field, uint64_t bytes);

struct ParsedMessage {
  // The oneof member that is set; 0 if none is.
  int member = 0;
  // Whether the member is the chunk. If not, the other fields are empty, and protobuf must parse
  // the whole message.
  bool is_chunk = false;
  ChunkHeader chunk = {};
  std::vector<Fragment> payload = {};  // points into the message; no empty fragments
  uint64_t payload_bytes = 0;
};

// Reads one whole message, the concatenation of the fragments. Allocates only the payload's list.
// For a member other than the chunk it checks only the outer encoding. Errors: INVALID_ARGUMENT if
// it is not legal protobuf.
absl::StatusOr<ParsedMessage> ParseMessage(const StreamMessage& type,
                                           absl::Span<const Fragment> message);

// Returns the fragments of bytes [offset, offset + bytes) of `fragments`.
// REQUIRES: the range lies inside them.
std::vector<Fragment> Subrange(absl::Span<const Fragment> fragments, uint64_t offset,
                               uint64_t bytes);

// Copies the concatenated fragments to `target` (host memory, at least their total size, not
// overlapping them).
void CopyFragments(absl::Span<const Fragment> fragments, void* target);

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_CHUNK_CODEC_H_
