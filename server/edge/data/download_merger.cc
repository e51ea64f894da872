#include "server/edge/data/download_merger.h"

#include <algorithm>
#include <string>
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

// Appends the value for bytes that no member has: fp32 -inf, little-endian.
void AppendHole(const ByteRun& run, PayloadBuilder* payload) {
  static const grpc::Slice* const pattern = [] {
    std::string bytes;
    for (int i = 0; i < 16 * 1024; ++i) bytes.append("\x00\x00\x80\xff", 4);
    return new grpc::Slice(bytes);
  }();
  const auto size = static_cast<int64_t>(pattern->size());
  int64_t done = 0;
  while (done < run.bytes) {
    const int64_t phase = (run.global_offset + done) % 4;
    const int64_t bytes = std::min(run.bytes - done, size - phase);
    payload->Append(*pattern, phase, phase + bytes);
    done += bytes;
  }
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
    outputs_.push_back({id, TensorRoute(request.spec, shards, id)});
    total_bytes_ += BytesOf(request.spec, id);
  }
  for (int rank = 0; rank < shards.world_size; ++rank) {
    if (!outputs_.empty()) members_[rank].order = outputs_[0].route.StreamOrder(rank);
    SkipDone(rank);
  }
  StartChunk();
}

// Advances to the next incomplete range.
void DownloadMerger::SkipDone(int rank) {
  Member& member = members_[rank];
  if (member.range < member.order.size() && member.done_bytes == member.order[member.range].bytes) {
    ++member.range;
    member.done_bytes = 0;
  }
  while (member.tensor < outputs_.size() && member.range == member.order.size()) {
    ++member.tensor;
    member.range = 0;
    member.order.clear();
    if (member.tensor == outputs_.size()) return;
    member.order = outputs_[member.tensor].route.StreamOrder(rank);
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
  const LocalRange& range = member.order[member.range];
  const TensorId id = output.route.parts()[range.part];
  const int64_t due = range.offset + member.done_bytes;
  if (chunk.tensor != static_cast<int>(id) || chunk.offset != static_cast<uint64_t>(due)) {
    return absl::InternalError(absl::StrCat("sent tensor ", chunk.tensor, " at ", chunk.offset,
                                            " where ", TensorName(id), " at ", due, " was due"));
  }
  Waiting waiting{PayloadReader(std::move(payload)), chunk.crc32c, ++added_};
  const int64_t bytes = waiting.payload.left();
  if (bytes == 0 || bytes > range.bytes - member.done_bytes) {
    return absl::InternalError(absl::StrCat("sent a chunk of ", bytes, " bytes of ", TensorName(id),
                                            " at ", chunk.offset));
  }
  const Position position(member.tensor, range.part, due);
  member.waiting.emplace(position, std::move(waiting));
  if (rank == due_rank_ && position == due_) due_rank_ = kNoRank;
  member.waiting_bytes += bytes;
  member.done_bytes += bytes;
  SkipDone(rank);
  return absl::OkStatus();
}

bool DownloadMerger::HasRoom(int rank) const {
  return rank == due_rank_ || members_[rank].waiting_bytes < read_ahead_bytes_;
}

void DownloadMerger::StartChunk() {
  while (tensor_ < outputs_.size() && chunk_end_ == outputs_[tensor_].route.global_bytes()) {
    ++tensor_;
    chunk_end_ = 0;
  }
  if (done()) return;
  const TensorRoute& route = outputs_[tensor_].route;
  chunk_begin_ = chunk_end_;
  chunk_end_ = std::min(chunk_begin_ + max_chunk_bytes_, route.global_bytes());
  runs_.emplace(&route, chunk_begin_, chunk_end_);
  payload_.emplace(chunk_end_ - chunk_begin_);
  source_ = 0;
  source_crc32c_.reset();
}

std::optional<DownloadMerger::Chunk> DownloadMerger::Next() {
  if (done()) return std::nullopt;
  due_rank_ = kNoRank;
  while (const ByteRun* run = runs_->Current()) {
    if (run->rank == kNoRank) {
      source_crc32c_.reset();
      AppendHole(*run, &*payload_);
      runs_->Advance(run->bytes);
      continue;
    }
    Member& member = members_[run->rank];
    const Position position(tensor_, run->part, run->local_offset);
    const auto found = member.waiting.find(position);
    if (found == member.waiting.end()) {
      due_rank_ = run->rank;
      due_ = position;
      return std::nullopt;
    }
    Waiting& waiting = found->second;
    const int64_t bytes = std::min(run->bytes, waiting.payload.left());
    if (payload_->bytes() == 0) {
      source_ = waiting.number;
      source_crc32c_ = waiting.crc32c;
    } else if (waiting.number != source_) {
      source_crc32c_.reset();
    }
    waiting.crc32c.reset();
    waiting.payload.MoveTo(bytes, &*payload_);
    const bool is_full = payload_->bytes() == chunk_end_ - chunk_begin_;
    if (is_full && waiting.payload.left() > 0) source_crc32c_.reset();
    // The remainder begins later.
    auto rest = member.waiting.extract(found);
    if (rest.mapped().payload.left() > 0) {
      std::get<2>(rest.key()) += bytes;
      member.waiting.insert(std::move(rest));
    }
    member.waiting_bytes -= bytes;
    runs_->Advance(bytes);
  }
  std::vector<grpc::Slice> slices = payload_->Take();
  wire::ChunkHeader header;
  header.tensor = static_cast<int>(outputs_[tensor_].id);
  header.offset = chunk_begin_;
  if (with_crc32c_) {
    header.crc32c = source_crc32c_.has_value() ? *source_crc32c_ : Crc32cOf(slices);
  }
  Chunk chunk;
  chunk.payload_bytes = chunk_end_ - chunk_begin_;
  chunk.message = wire::MakeChunkBuffer(
      wire::EncodeChunkPrefix(response_, header, chunk.payload_bytes), slices);
  sent_bytes_ += chunk.payload_bytes;
  StartChunk();
  return chunk;
}

}  // namespace ringattn::server
