// UploadRouter: checks a client's chunks and deals their bytes out to the shards.
// Payload is passed on by reference (payload.h). No I/O.
//
// A rank's bytes keep their order in its shard, so the part of a chunk that belongs
// to one rank is one piece of its local tensor: at most one message per rank. Of a packed tensor
// whose parts a plan cuts differently it is one for each of them, of a tensor per document as many
// as there are heads in the chunk. Chunks of a replicated tensor go to every rank.
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

  // What is wrong with a chunk, if anything: INVALID_ARGUMENT for an unknown or
  // unexpected tensor, bytes outside it or sent before, no data (unless the tensor
  // is empty), too much data, a wrong crc; RESOURCE_EXHAUSTED for chunks strewn with
  // too many gaps between them. Otherwise appends messages to `routed`.
  std::optional<Failure> Route(const wire::ChunkHeader& chunk, std::vector<grpc::Slice> payload,
                               std::vector<RoutedChunk>* routed);

  // True once every input has arrived completely. Empty tensors need no chunk.
  bool complete() const { return received_bytes_ == total_bytes_; }
  int64_t received_bytes() const { return received_bytes_; }
  int64_t total_bytes() const { return total_bytes_; }

  // INVALID_ARGUMENT naming the first tensor that lacks bytes and the first of them.
  // REQUIRES: !complete().
  Failure Incomplete() const;

 private:
  struct Input {
    TensorId id;
    TensorRoute route;
    ByteRangeSet arrived;
  };

  // What one rank gets of a chunk: a piece of one of its local tensors.
  struct Part {
    int rank = 0;
    TensorId tensor = TensorId::kQ;
    int64_t local_begin = 0;
    PayloadBuilder payload;
    bool is_whole_chunk = false;  // its bytes are the chunk's, in their order
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
  std::vector<Input> inputs_;  // in the order in which they are streamed
  int64_t received_bytes_ = 0;
  int64_t total_bytes_ = 0;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_DATA_UPLOAD_ROUTER_H_
