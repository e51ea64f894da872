// Chunks in gRPC buffers without copies. A chunk to send is a small slice with its prefix, and
// slices over borrowed memory. A received message keeps its slices for as long as the caller needs
// them.
#ifndef RINGATTN_COMMON_WIRE_GRPC_SLICES_H_
#define RINGATTN_COMMON_WIRE_GRPC_SLICES_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/wire/chunk_codec.h"

namespace ringattn::wire {

// Returns a slice over borrowed bytes [data, data + size). `done(arg)` is called once, on any
// thread, when gRPC no longer needs the bytes. That is later than the completion of the write.
inline grpc::Slice BorrowSlice(const void* data, size_t size, void (*done)(void*), void* arg) {
  return grpc::Slice(const_cast<void*>(data), size, done, arg);
}

// Returns a complete message: the prefix, then the payload's slices.
// REQUIRES: the slices' sizes add up to the prefix's payload_bytes.
inline grpc::ByteBuffer MakeChunkBuffer(const ChunkPrefix& prefix,
                                        const std::vector<grpc::Slice>& payload) {
  std::vector<grpc::Slice> slices;
  slices.reserve(payload.size() + 1);
  slices.emplace_back(prefix.bytes.data(), prefix.size);
  slices.insert(slices.end(), payload.begin(), payload.end());
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// A received message, parsed by ParseMessage. Keeps gRPC's memory alive; the payload's fragments
// point into it. Movable; thread compatible.
class ReceivedMessage {
 public:
  // Errors: INVALID_ARGUMENT if it is not legal protobuf; INTERNAL if gRPC cannot provide the
  // buffer's bytes (compressed with an unknown method).
  static absl::StatusOr<ReceivedMessage> Parse(const StreamMessage& type,
                                               const grpc::ByteBuffer& buffer) {
    ReceivedMessage message;
    if (!buffer.Dump(&message.slices_).ok()) return absl::InternalError("unreadable message");
    // Small slices hold their bytes inside the object. So fragments may point into slices_, whose
    // storage does not change from here on, even when moved.
    message.fragments_.reserve(message.slices_.size());
    for (const grpc::Slice& slice : message.slices_) {
      message.fragments_.push_back({slice.begin(), slice.size()});
    }
    absl::StatusOr<ParsedMessage> parsed = ParseMessage(type, message.fragments_);
    if (!parsed.ok()) return parsed.status();
    message.parsed_ = *std::move(parsed);
    return message;
  }

  ReceivedMessage(ReceivedMessage&&) = default;
  ReceivedMessage& operator=(ReceivedMessage&&) = default;

  const ParsedMessage& parsed() const { return parsed_; }
  bool is_chunk() const { return parsed_.is_chunk; }
  const ChunkHeader& chunk() const { return parsed_.chunk; }
  const std::vector<Fragment>& payload() const { return parsed_.payload; }
  uint64_t payload_bytes() const { return parsed_.payload_bytes; }

  // Appends slices of payload bytes [offset, offset + bytes). They share gRPC's memory by reference
  // count.
  // REQUIRES: is_chunk() and the range lies inside the payload.
  void AppendPayloadSlices(uint64_t offset, uint64_t bytes,
                           std::vector<grpc::Slice>* target) const {
    size_t index = 0;
    for (const Fragment& fragment : Subrange(parsed_.payload, offset, bytes)) {
      // Both lists are in message order, so the search continues where it stopped.
      while (!Holds(slices_[index], fragment)) ++index;
      const size_t begin = fragment.data - slices_[index].begin();
      target->push_back(slices_[index].sub(begin, begin + fragment.size));
    }
  }

 private:
  ReceivedMessage() = default;

  static bool Holds(const grpc::Slice& slice, const Fragment& fragment) {
    return fragment.data >= slice.begin() && fragment.data < slice.end();
  }

  std::vector<grpc::Slice> slices_;
  std::vector<Fragment> fragments_;
  ParsedMessage parsed_;
};

// Parses a whole message with protobuf (one that is not a chunk). Empties `buffer`. Errors:
// INVALID_ARGUMENT if it is not a Message.
template <typename Message>
absl::StatusOr<Message> ParseProto(grpc::ByteBuffer* buffer) {
  Message message;
  if (!grpc::SerializationTraits<Message>::Deserialize(buffer, &message).ok()) {
    return absl::InvalidArgumentError("not a valid message");
  }
  return message;
}

template <typename Message>
grpc::ByteBuffer SerializeProto(const Message& message) {
  grpc::ByteBuffer buffer;
  bool own_buffer = false;
  // Fails only for messages over 2 GiB, which no caller builds.
  const grpc::Status status =
      grpc::SerializationTraits<Message>::Serialize(message, &buffer, &own_buffer);
  if (!status.ok()) std::abort();
  return buffer;
}

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_GRPC_SLICES_H_
