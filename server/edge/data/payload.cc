#include "server/edge/data/payload.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

namespace ringattn::server {
namespace {

constexpr int64_t kBlockBytes = 64 * 1024;

}  // namespace

void PayloadBuilder::Append(const grpc::Slice& slice, int64_t begin, int64_t end) {
  const int64_t bytes = end - begin;
  assert(bytes <= left_);
  if (bytes == 0) return;
  if (bytes < kMinSliceBytes) {
    Copy(slice.begin() + begin, bytes);
  } else {
    CloseBlock();
    slices_.push_back(slice.sub(begin, end));
  }
  bytes_ += bytes;
  left_ -= bytes;
}

void PayloadBuilder::Copy(const uint8_t* data, int64_t bytes) {
  int64_t remaining = bytes;
  while (remaining > 0) {
    if (block_used_ == block_size_) {
      CloseBlock();
      // left_ still includes all of this piece.
      block_size_ = std::min(kBlockBytes, left_ - (bytes - remaining));
      block_ = grpc::Slice(grpc_slice_malloc(block_size_), grpc::Slice::STEAL_REF);
    }
    const int64_t here = std::min(remaining, block_size_ - block_used_);
    // The block has no other reference before CloseBlock.
    std::memcpy(const_cast<uint8_t*>(block_.begin()) + block_used_, data, here);
    block_used_ += here;
    data += here;
    remaining -= here;
  }
}

void PayloadBuilder::CloseBlock() {
  if (block_used_ > 0) slices_.push_back(block_.sub(0, block_used_));
  block_ = grpc::Slice();
  block_size_ = 0;
  block_used_ = 0;
}

std::vector<grpc::Slice> PayloadBuilder::Take() {
  CloseBlock();
  return std::exchange(slices_, {});
}

PayloadReader::PayloadReader(std::vector<grpc::Slice> slices) : slices_(std::move(slices)) {
  for (const grpc::Slice& slice : slices_) left_ += slice.size();
}

void PayloadReader::MoveTo(int64_t bytes, PayloadBuilder* target) {
  assert(bytes <= left_);
  left_ -= bytes;
  while (bytes > 0) {
    const grpc::Slice& slice = slices_[index_];
    const int64_t here = std::min<int64_t>(bytes, slice.size() - at_);
    target->Append(slice, at_, at_ + here);
    at_ += here;
    bytes -= here;
    if (at_ == static_cast<int64_t>(slice.size())) {
      // The receiver owns the bytes that were passed on.
      slices_[index_] = grpc::Slice();
      ++index_;
      at_ = 0;
    }
  }
}

}  // namespace ringattn::server
