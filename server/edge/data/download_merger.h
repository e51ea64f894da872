// DownloadMerger: merges the members' output streams into the client's chunks.
//
// Chunks are produced in order: tensor by tensor, with ascending offsets, each as large as the
// client accepts. Each member sends its shard of every output in nearly that order (shard.proto,
// TensorRoute::StreamOrder). The next byte is usually at the head of its owner's stream, and
// otherwise a bounded number of bytes later; the owner is not paused before it. A member that runs
// ahead can therefore be paused without a deadlock. The merger holds at most one chunk under
// construction, each member's read-ahead and the bytes that may precede the next byte.
#ifndef RINGATTN_SERVER_EDGE_DATA_DOWNLOAD_MERGER_H_
#define RINGATTN_SERVER_EDGE_DATA_DOWNLOAD_MERGER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include <grpcpp/support/byte_buffer.h>

#include "absl/status/status.h"
#include "common/layout/tensor_route.h"
#include "common/request/validation.h"
#include "common/wire/chunk_codec.h"
#include "common/wire/message_buffer.h"
#include "server/edge/data/payload.h"
#include "server/edge/data/shard_runs.h"

namespace ringattn::server {

// Not thread safe.
class DownloadMerger {
 public:
  struct Chunk {
    wire::MessageBuffer message;
    int64_t payload_bytes = 0;
  };

  // `read_ahead_bytes`: bytes of a member's stream that may wait here. `response`: the type of the
  // client's messages.
  DownloadMerger(const ValidRequest& request, const ShardPlan& shards,
                 const wire::StreamMessage& response, int64_t max_chunk_bytes, bool with_crc32c,
                 int64_t read_ahead_bytes);
  DownloadMerger(const DownloadMerger&) = delete;
  DownloadMerger& operator=(const DownloadMerger&) = delete;

  // Returns whether a member's chunk matches its crc32c, if it has one. Thread safe, and separate
  // from Add so that chunks of several members are checked concurrently.
  static bool CrcMatches(const wire::ChunkHeader& chunk, const std::vector<grpc::Slice>& payload);

  // Adds a member's chunk, whose crc32c has been checked. Returns INTERNAL if it is not the
  // member's next chunk.
  absl::Status Add(int rank, const wire::ChunkHeader& chunk, std::vector<grpc::Slice> payload);

  // Returns the client's next chunk, if it is complete.
  std::optional<Chunk> Next();

  // Returns true if there is room for another message of this member.
  bool HasRoom(int rank) const;

  // Returns true once Next() has returned everything.
  bool done() const { return tensor_ == outputs_.size(); }
  int64_t sent_bytes() const { return sent_bytes_; }
  int64_t total_bytes() const { return total_bytes_; }

 private:
  struct Output {
    TensorId id;
    TensorRoute route;
  };
  // Position in a member's local tensors: output, part, offset.
  using Position = std::tuple<size_t, size_t, int64_t>;
  // The remainder of a member's chunk.
  struct Waiting {
    PayloadReader payload;
    std::optional<uint32_t> crc32c;  // of the whole chunk; cleared when a piece is removed
    int64_t number = 0;              // sequence number of the chunk
  };
  struct Member {
    // Where the member's next chunk must begin: `done_bytes` into a range of the tensor's order.
    size_t tensor = 0;
    std::vector<LocalRange> order;  // of the tensor
    size_t range = 0;
    int64_t done_bytes = 0;
    std::map<Position, Waiting> waiting;
    int64_t waiting_bytes = 0;
  };

  void SkipDone(int rank);
  void StartChunk();

  const wire::StreamMessage response_;
  const int64_t max_chunk_bytes_;
  const bool with_crc32c_;
  const int64_t read_ahead_bytes_;
  std::vector<Output> outputs_;  // in streaming order
  std::vector<Member> members_;
  int64_t total_bytes_ = 0;
  int64_t sent_bytes_ = 0;
  int64_t added_ = 0;  // number of chunks

  // The byte that Next() waits for, until it has arrived.
  int due_rank_ = kNoRank;
  Position due_;
  // The chunk under construction: bytes [chunk_begin_, chunk_end_) of tensor_.
  size_t tensor_ = 0;
  int64_t chunk_begin_ = 0;
  int64_t chunk_end_ = 0;
  std::optional<ShardRuns> runs_;
  std::optional<PayloadBuilder> payload_;
  // The member's chunk that payload_ begins with. Its crc applies if payload_ is exactly that
  // chunk.
  int64_t source_ = 0;
  std::optional<uint32_t> source_crc32c_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_DATA_DOWNLOAD_MERGER_H_
