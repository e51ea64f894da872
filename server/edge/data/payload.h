// Moves payload between messages without a copy, except where pieces are so small that a reference
// costs more than the bytes.
#ifndef RINGATTN_SERVER_EDGE_DATA_PAYLOAD_H_
#define RINGATTN_SERVER_EDGE_DATA_PAYLOAD_H_

#include <cstdint>
#include <vector>

#include <grpcpp/support/slice.h>

namespace ringattn::server {

// Smaller pieces are copied: a slice costs a counted reference, 32 bytes of bookkeeping and a
// writev entry, about as much as copying 2 KiB.
inline constexpr int64_t kMinSliceBytes = 2048;

// The payload of a message under construction. Not thread safe.
class PayloadBuilder {
 public:
  // `total_bytes`: the sum of the bytes that will be appended; sizes the buffers for small pieces.
  explicit PayloadBuilder(int64_t total_bytes) : left_(total_bytes) {}

  // Appends slice bytes [begin, end), by reference or by copy.
  void Append(const grpc::Slice& slice, int64_t begin, int64_t end);

  int64_t bytes() const { return bytes_; }
  // Finishes the payload and returns it as consecutive slices.
  std::vector<grpc::Slice> Take();

 private:
  void Copy(const uint8_t* data, int64_t bytes);
  void CloseBlock();

  int64_t left_;
  int64_t bytes_ = 0;
  std::vector<grpc::Slice> slices_;
  grpc::Slice block_;  // collects small pieces
  int64_t block_size_ = 0;
  int64_t block_used_ = 0;
};

// Reads a received payload sequentially. Not thread safe.
class PayloadReader {
 public:
  PayloadReader() = default;
  explicit PayloadReader(std::vector<grpc::Slice> slices);

  int64_t left() const { return left_; }

  // Moves the next `bytes` to `target`. REQUIRES: bytes <= left().
  void MoveTo(int64_t bytes, PayloadBuilder* target);

 private:
  std::vector<grpc::Slice> slices_;
  size_t index_ = 0;
  int64_t at_ = 0;  // in slices_[index_]
  int64_t left_ = 0;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_DATA_PAYLOAD_H_
