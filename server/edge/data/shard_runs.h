// ShardRuns: applies TensorRoute::FromGlobal to a long range in windows, so that a chunk made of
// one-byte runs does not expand to gigabytes of runs.
#ifndef RINGATTN_SERVER_EDGE_DATA_SHARD_RUNS_H_
#define RINGATTN_SERVER_EDGE_DATA_SHARD_RUNS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/layout/tensor_route.h"

namespace ringattn::server {

// Not thread safe.
class ShardRuns {
 public:
  // Iterates over [begin, end) of the client's tensor. `route` must outlive this.
  ShardRuns(const TensorRoute* route, int64_t begin, int64_t end)
      : route_(route), at_(begin), end_(end) {}

  // Returns the current run, valid until Advance(); null at the end.
  const ByteRun* Current() {
    if (index_ == runs_.size()) {
      if (at_ == end_) return nullptr;
      // 64 KiB in runs of one byte: 65,536 runs of 40 bytes.
      const int64_t bytes = std::min<int64_t>(end_ - at_, 64 * 1024);
      runs_ = route_->FromGlobal(at_, bytes);
      at_ += bytes;
      index_ = 0;
    }
    return &runs_[index_];
  }

  // Consumes `bytes` of the current run. REQUIRES: bytes <= Current()->bytes.
  void Advance(int64_t bytes) {
    ByteRun& run = runs_[index_];
    run.global_offset += bytes;
    run.local_offset += bytes;
    run.bytes -= bytes;
    if (run.bytes == 0) ++index_;
  }

 private:
  const TensorRoute* route_;
  int64_t at_;
  int64_t end_;
  std::vector<ByteRun> runs_;
  size_t index_ = 0;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_DATA_SHARD_RUNS_H_
