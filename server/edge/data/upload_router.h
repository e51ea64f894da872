// UploadRouter: validates a client's chunks and distributes their bytes to the shards. Payload is
// passed on by reference (payload.h). No I/O.
//
// A rank's bytes keep their order within its shard, so a chunk yields at most one message per rank.
// A packed tensor whose parts are sharded differently yields one message per part, and a tensor per
// document one per head in the chunk. Chunks of a replicated tensor go to every rank.
//
// Tests: transfer_test.cc
#ifndef RINGATTN_SERVER_EDGE_DATA_UPLOAD_ROUTER_H_
#define RINGATTN_SERVER_EDGE_DATA_UPLOAD_ROUTER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <grpcpp/support/byte_buffer.h>

#include "common/base/byte_range_set.h"
#include "common/base/limits.h"
#include "common/layout/tensor_route.h"
#include "common/request/validation.h"
#include "common/wire/chunk_codec.h"
#include "server/core/events/events.h"
#include "server/edge/data/payload.h"

namespace ringattn::server {

// A message for one member's Exchange stream.
struct RoutedChunk {
  int rank = 0;
  grpc::ByteBuffer message;
  int64_t payload_bytes = 0;
};

// Not thread safe.
class UploadRouter {
 public:
  UploadRouter(const ValidRequest& request, const ShardPlan& shards, const Limits& limits);

  // Appends the chunk's messages to `routed`, or returns the failure. INVALID_ARGUMENT: an unknown
  // or unexpected tensor, bytes outside it or already sent, no data (unless the tensor is empty),
  // too much data, or a wrong crc. RESOURCE_EXHAUSTED: too many gaps between chunks.
  std::optional<Failure> Route(const wire::ChunkHeader& chunk, std::vector<grpc::Slice> payload,
                               std::vector<RoutedChunk>* routed);

  // Returns true once every input has arrived completely. Empty tensors need no chunk.
  bool complete() const { return received_bytes_ == total_bytes_; }
  int64_t received_bytes() const { return received_bytes_; }
  int64_t total_bytes() const { return total_bytes_; }

  // Returns INVALID_ARGUMENT with the first incomplete tensor and its first missing byte. REQUIRES:
  // !complete().
  Failure Incomplete() const;

 private:
  struct Input {
    TensorId id;
    TensorRoute route;
    ByteRangeSet arrived;
  };

  // One rank's bytes of a chunk: a contiguous piece of one of its local tensors.
  struct Part {
    int rank = 0;
    TensorId tensor = TensorId::kQ;
    int64_t local_begin = 0;
    PayloadBuilder payload;
    bool is_whole_chunk = false;  // the same bytes in the same order as the chunk
  };
  using Parts = std::vector<Part>;

  std::optional<Failure> Check(const wire::ChunkHeader& chunk,
                               const std::vector<grpc::Slice>& payload, int64_t bytes,
                               Input** input);
  Parts Cut(const TensorRoute& route, int64_t begin, PayloadReader reader) const;
  Parts Gather(const TensorRoute& route, int64_t begin,
               const std::vector<grpc::Slice>& payload) const;
  Parts Copies(TensorId id, int64_t begin, const std::vector<grpc::Slice>& payload) const;

  const int64_t max_chunk_bytes_;
  const int world_size_;
  std::vector<Input> inputs_;  // in streaming order
  int64_t received_bytes_ = 0;
  int64_t total_bytes_ = 0;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_DATA_UPLOAD_ROUTER_H_
