#include "server/edge/download_merger.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/wire/crc32c.h"
#include "common/wire/grpc_slices.h"

namespace ringattn::server {
namespace {

uint32_t Crc32cOf(const std::vector<grpc::Slice>& slices) {
  uint32_t crc = 0;
  for (const grpc::Slice& slice : slices) {
    crc = wire::ExtendCrc32c(crc, slice.begin(), slice.size());
  }
  return crc;
}

}  // namespace

DownloadMerger::DownloadMerger(const ValidRequest& request, const ShardPlan& shards,
                               const wire::StreamMessage& response, int64_t max_chunk_bytes,
                               bool with_crc32c, int64_t read_ahead_bytes)
    : response_(response),
      max_chunk_bytes_(max_chunk_bytes),
      with_crc32c_(with_crc32c),
      read_ahead_bytes_(read_ahead_bytes),
      members_(shards.world_size) {
  for (TensorId id : request.outputs) {
    outputs_.push_back({id, ShardMap(request.spec, shards, id)});
    total_bytes_ += BytesOf(request.spec, id);
  }
  for (int rank = 0; rank < shards.world_size; ++rank) SkipEmpty(rank);
  StartChunk();
}

// To the next tensor of which the member owns something.
void DownloadMerger::SkipEmpty(int rank) {
  Member& member = members_[rank];
  while (member.tensor < outputs_.size() &&
         member.local_offset == outputs_[member.tensor].map.local_bytes(rank)) {
    ++member.tensor;
    member.local_offset = 0;
  }
}

bool DownloadMerger::CrcMatches(const wire::ChunkHeader& chunk,
                                const std::vector<grpc::Slice>& payload) {
  return !chunk.crc32c.has_value() || Crc32cOf(payload) == *chunk.crc32c;
}

absl::Status DownloadMerger::Add(int rank, const wire::ChunkHeader& chunk,
                                 std::vector<grpc::Slice> payload) {
  Member& member = members_[rank];
  if (member.tensor == outputs_.size()) return absl::InternalError("sent more than its shard");
  const Output& output = outputs_[member.tensor];
  if (chunk.tensor != static_cast<int>(output.id) ||
      chunk.offset != static_cast<uint64_t>(member.local_offset)) {
    return absl::InternalError(absl::StrCat("sent tensor ", chunk.tensor, " at ", chunk.offset,
                                            " where ", TensorName(output.id), " at ",
                                            member.local_offset, " was due"));
  }
  PayloadReader reader(std::move(payload));
  const int64_t bytes = reader.left();
  if (bytes == 0 || bytes > output.map.local_bytes(rank) - member.local_offset) {
    return absl::InternalError(absl::StrCat("sent a chunk of ", bytes, " bytes of ",
                                            TensorName(output.id), " at ", chunk.offset));
  }
  member.waiting.push_back(std::move(reader));
  member.waiting_bytes += bytes;
  member.local_offset += bytes;
  SkipEmpty(rank);
  return absl::OkStatus();
}

bool DownloadMerger::Wants(int rank) const {
  return members_[rank].waiting_bytes < read_ahead_bytes_;
}

void DownloadMerger::StartChunk() {
  while (tensor_ < outputs_.size() && chunk_end_ == outputs_[tensor_].map.global_bytes()) {
    ++tensor_;
    chunk_end_ = 0;
  }
  if (done()) return;
  const ShardMap& map = outputs_[tensor_].map;
  chunk_begin_ = chunk_end_;
  chunk_end_ = std::min(chunk_begin_ + max_chunk_bytes_, map.global_bytes());
  runs_.emplace(&map, chunk_begin_, chunk_end_);
  payload_.emplace(chunk_end_ - chunk_begin_);
}

std::optional<DownloadMerger::Chunk> DownloadMerger::Next() {
  if (done()) return std::nullopt;
  while (const ByteRun* run = runs_->Current()) {
    Member& member = members_[run->rank];
    if (member.waiting.empty()) return std::nullopt;
    PayloadReader& head = member.waiting.front();
    const int64_t bytes = std::min(run->bytes, head.left());
    head.MoveTo(bytes, &*payload_);
    if (head.left() == 0) member.waiting.pop_front();
    member.waiting_bytes -= bytes;
    runs_->Advance(bytes);
  }
  std::vector<grpc::Slice> slices = payload_->Take();
  wire::ChunkHeader header;
  header.tensor = static_cast<int>(outputs_[tensor_].id);
  header.offset = chunk_begin_;
  if (with_crc32c_) header.crc32c = Crc32cOf(slices);
  Chunk chunk;
  chunk.payload_bytes = chunk_end_ - chunk_begin_;
  chunk.message = wire::MakeChunkBuffer(
      wire::EncodeChunkPrefix(response_, header, chunk.payload_bytes), slices);
  sent_bytes_ += chunk.payload_bytes;
  StartChunk();
  return chunk;
}

}  // namespace ringattn::server
