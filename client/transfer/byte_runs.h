// ByteRuns: a view of a tensor's bytes in one piece or in equally spaced runs, as for a component
// of a packed tensor.
#ifndef RINGATTN_CLIENT_TRANSFER_BYTE_RUNS_H_
#define RINGATTN_CLIENT_TRANSFER_BYTE_RUNS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "absl/types/span.h"

namespace ringattn::client {

// Runs of equal length at a distance of `stride` bytes. One piece is one run. Offsets count only
// the runs' bytes, in order. Does not own the memory. `Byte`: uint8_t or const uint8_t.
template <typename Byte>
class ByteRuns {
 public:
  ByteRuns() = default;
  ByteRuns(absl::Span<Byte> piece)  // NOLINT: wherever a view will do, a piece does
      : data_(piece.data()), run_bytes_(piece.size()), stride_(piece.size()), size_(piece.size()) {}
  // Requires stride >= run_bytes.
  ByteRuns(Byte* data, uint64_t runs, uint64_t run_bytes, uint64_t stride)
      : data_(data), run_bytes_(run_bytes), stride_(stride), size_(runs * run_bytes) {
    if (run_bytes == stride || runs <= 1) run_bytes_ = stride_ = size_;
  }

  uint64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  Byte* data() const { return data_; }  // the first byte
  bool in_one_piece() const { return run_bytes_ == size_; }

  // Calls visit(Byte* data, uint64_t bytes) for every contiguous piece of [offset, offset + bytes).
  // Requires that the range lies inside the view.
  template <typename Visit>
  void ForEachPiece(uint64_t offset, uint64_t bytes, const Visit& visit) const {
    while (bytes > 0) {
      const uint64_t in_run = offset % run_bytes_;
      const uint64_t piece = std::min(bytes, run_bytes_ - in_run);
      visit(data_ + offset / run_bytes_ * stride_ + in_run, piece);
      offset += piece;
      bytes -= piece;
    }
  }

 private:
  Byte* data_ = nullptr;
  uint64_t run_bytes_ = 0;
  uint64_t stride_ = 0;
  uint64_t size_ = 0;
};

using ConstRuns = ByteRuns<const uint8_t>;
using MutableRuns = ByteRuns<uint8_t>;

// Copies bytes [offset, offset + bytes) of `view` to `target`, contiguously.
inline void CopyOut(const ConstRuns& view, uint64_t offset, uint64_t bytes, uint8_t* target) {
  view.ForEachPiece(offset, bytes, [&](const uint8_t* data, uint64_t size) {
    std::memcpy(target, data, size);
    target += size;
  });
}

// Copies `bytes` contiguous bytes to [offset, offset + bytes) of `view`.
inline void CopyIn(const uint8_t* source, uint64_t offset, uint64_t bytes,
                   const MutableRuns& view) {
  view.ForEachPiece(offset, bytes, [&](uint8_t* data, uint64_t size) {
    std::memcpy(data, source, size);
    source += size;
  });
}

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_TRANSFER_BYTE_RUNS_H_
