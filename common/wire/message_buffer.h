// MessageBuffer: a grpc::ByteBuffer that moves.
#ifndef RINGATTN_COMMON_WIRE_MESSAGE_BUFFER_H_
#define RINGATTN_COMMON_WIRE_MESSAGE_BUFFER_H_

#include <cstddef>
#include <utility>

#include <grpcpp/support/byte_buffer.h>

namespace ringattn::wire {

// gRPC 1.51's class can only be copied. A copy allocates, and counts a reference to each slice, and
// so does every move of a structure that has one. Thread compatible.
class MessageBuffer {
 public:
  MessageBuffer() = default;
  // Implicit, because functions of gRPC and of this project return its class.
  MessageBuffer(const grpc::ByteBuffer& buffer) : buffer_(buffer) {}
  MessageBuffer(grpc::ByteBuffer&& buffer) noexcept { buffer_.Swap(&buffer); }

  MessageBuffer(const MessageBuffer&) = default;
  MessageBuffer& operator=(const MessageBuffer&) = default;
  MessageBuffer(MessageBuffer&& other) noexcept { buffer_.Swap(&other.buffer_); }
  // `other` is empty afterwards.
  MessageBuffer& operator=(MessageBuffer&& other) noexcept {
    MessageBuffer taken(std::move(other));
    buffer_.Swap(&taken.buffer_);
    return *this;
  }

  operator const grpc::ByteBuffer&() const { return buffer_; }
  grpc::ByteBuffer& get() { return buffer_; }
  const grpc::ByteBuffer& get() const { return buffer_; }

  size_t Length() const { return buffer_.Length(); }
  void Clear() { buffer_.Clear(); }

 private:
  grpc::ByteBuffer buffer_;
};

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_MESSAGE_BUFFER_H_
