// PackedInput: maps the bytes of a packed shard (qkv or kv) to the tensors that it consists of.
//
// The wire layout is [outer, local rows, parts, heads, dim]. The operation stores each part as a
// separate tensor. A byte range of the packed shard therefore maps to one contiguous range of each
// part, whose bytes are interleaved in the chunk.
#ifndef RINGATTN_WORKER_OPERATION_PACKED_INPUT_H_
#define RINGATTN_WORKER_OPERATION_PACKED_INPUT_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/attention/tensors.h"
#include "common/wire/chunk_codec.h"

namespace ringattn::worker {

// Immutable; thread safe.
class PackedInput {
 public:
  struct Range {
    int64_t begin = 0;
    int64_t bytes = 0;

    bool operator==(const Range&) const = default;
  };

  // `part_bytes`: bytes of one token in one part; all parts have the same. REQUIRES: > 0.
  PackedInput(TensorId id, std::vector<TensorId> parts, int64_t part_bytes)
      : id_(id),
        parts_(std::move(parts)),
        part_bytes_(part_bytes),
        token_bytes_(part_bytes * static_cast<int64_t>(parts_.size())) {}

  TensorId id() const { return id_; }
  const std::vector<TensorId>& parts() const { return parts_; }

  // Returns the range of parts()[part] that bytes [offset, offset + bytes) of the packed shard
  // cover. REQUIRES: the range lies within the shard.
  Range RangeOf(size_t part, int64_t offset, int64_t bytes) const {
    const int64_t begin = Before(part, offset);
    return {begin, Before(part, offset + bytes) - begin};
  }

  // Calls `visit(const uint8_t* data, int64_t bytes)`, which returns a status, for each contiguous
  // run of parts()[part] in `payload`, in order. `payload` starts at `offset` of the packed shard.
  // Stops at the first error and returns it.
  template <typename Visit>
  absl::Status ForEachRun(size_t part, int64_t offset, absl::Span<const wire::Fragment> payload,
                          const Visit& visit) const {
    const int64_t begin = static_cast<int64_t>(part) * part_bytes_;
    const int64_t end = begin + part_bytes_;
    int64_t at = offset % token_bytes_;  // offset in the token
    for (const wire::Fragment& fragment : payload) {
      const uint8_t* data = fragment.data;
      auto left = static_cast<int64_t>(fragment.size);
      while (left > 0) {
        const bool inside = at >= begin && at < end;
        const int64_t until = inside ? end : at < begin ? begin : token_bytes_;
        const int64_t here = std::min(until - at, left);
        if (inside) {
          if (absl::Status status = visit(data, here); !status.ok()) return status;
        }
        data += here;
        left -= here;
        at += here;
        if (at == token_bytes_) at = 0;
      }
    }
    return absl::OkStatus();
  }

 private:
  // Returns how many of the first `offset` bytes of the packed shard belong to the part.
  int64_t Before(size_t part, int64_t offset) const {
    const int64_t inside = offset % token_bytes_ - static_cast<int64_t>(part) * part_bytes_;
    return offset / token_bytes_ * part_bytes_ + std::clamp<int64_t>(inside, 0, part_bytes_);
  }

  TensorId id_;
  std::vector<TensorId> parts_;
  int64_t part_bytes_;
  int64_t token_bytes_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_OPERATION_PACKED_INPUT_H_
