// DownloadMerger: turns the members' output streams into the client's chunks.
//
// Chunks come out in order: tensor after tensor, ascending offsets, each as large as
// the client takes. Each member sends its part of every output in nearly that order
// (shard.proto, TensorRoute::StreamOrder): most of the time the next byte is at the head of its
// owner's stream, else a bounded number of bytes behind it, until which the owner is not paused.
// So a member that runs ahead can be paused without a deadlock, and what is held is at most one
// chunk under construction, each member's read-ahead and what may precede the byte that is due.
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
#include "server/edge/data/payload.h"
#include "server/edge/data/shard_runs.h"

namespace ringattn::server {

// Not thread safe.
class DownloadMerger {
 public:
  struct Chunk {
    grpc::ByteBuffer message;
    int64_t payload_bytes = 0;
  };

  // `read_ahead_bytes`: how much of a member's stream may wait here. `response` is
  // the type of the client's messages.
  DownloadMerger(const ValidRequest& request, const ShardPlan& shards,
                 const wire::StreamMessage& response, int64_t max_chunk_bytes, bool with_crc32c,
                 int64_t read_ahead_bytes);
  DownloadMerger(const DownloadMerger&) = delete;
  DownloadMerger& operator=(const DownloadMerger&) = delete;

  // A member's chunk has the crc32c that it says, if it says one. Thread safe, and apart from
  // Add so that members' chunks are looked at side by side.
  static bool CrcMatches(const wire::ChunkHeader& chunk, const std::vector<grpc::Slice>& payload);

  // A chunk from a member, whose crc32c, if it says one, has been looked at. INTERNAL if it is not
  // the one that must come next.
  absl::Status Add(int rank, const wire::ChunkHeader& chunk, std::vector<grpc::Slice> payload);

  // The next chunk for the client, if what has arrived completes one.
  std::optional<Chunk> Next();

  // True if there is room for another message of the member.
  bool Wants(int rank) const;

  // True once Next() has returned everything.
  bool done() const { return tensor_ == outputs_.size(); }
  int64_t sent_bytes() const { return sent_bytes_; }
  int64_t total_bytes() const { return total_bytes_; }

 private:
  struct Output {
    TensorId id;
    TensorRoute route;
  };
  // Where bytes lie in a member's local tensors: output, part, offset.
  using Place = std::tuple<size_t, size_t, int64_t>;
  // What is left of a member's chunk.
  struct Waiting {
    PayloadReader payload;
    std::optional<uint32_t> crc32c;  // of the whole chunk; gone when something is taken off it
    int64_t number = 0;              // of all that were added
  };
  struct Member {
    // Where its next chunk must begin: `done_bytes` into a range of the tensor's order.
    size_t tensor = 0;
    std::vector<LocalRange> order;  // of the tensor
    size_t range = 0;
    int64_t done_bytes = 0;
    std::map<Place, Waiting> waiting;
    int64_t waiting_bytes = 0;
  };

  void SkipDone(int rank);
  void StartChunk();

  const wire::StreamMessage response_;
  const int64_t max_chunk_bytes_;
  const bool with_crc32c_;
  const int64_t read_ahead_bytes_;
  std::vector<Output> outputs_;  // in the order in which they are streamed
  std::vector<Member> members_;
  int64_t total_bytes_ = 0;
  int64_t sent_bytes_ = 0;
  int64_t added_ = 0;  // chunks

  // The byte that Next() waits for, until it is here.
  int due_rank_ = kNoRank;
  Place due_;
  // The chunk under construction: bytes [chunk_begin_, chunk_end_) of tensor_.
  size_t tensor_ = 0;
  int64_t chunk_begin_ = 0;
  int64_t chunk_end_ = 0;
  std::optional<ShardRuns> runs_;
  std::optional<PayloadBuilder> payload_;
  // The member's chunk that payload_ begins with: its crc is payload_'s if that is all of it and
  // nothing else.
  int64_t source_ = 0;
  std::optional<uint32_t> source_crc32c_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_DATA_DOWNLOAD_MERGER_H_
