#include "server/edge/data/coordinator_relay.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/observability/log.h"
#include "common/wire/grpc_slices.h"
#include "common/wire/proto_values.h"
#include "ringattn/v1/shard.pb.h"
#include "server/edge/data/bad_chunk.h"
#include "server/edge/data/run_deferred.h"
#include "server/edge/header/error_details.h"

namespace ringattn::server {
namespace {

// Field numbers of ExchangeResponse.
constexpr int kOpened = v1::ExchangeResponse::kOpened;
constexpr int kDone = v1::ExchangeResponse::kDone;

// Bytes per message that members are asked to send: large enough to amortize a message, at most the
// read-ahead.
int64_t ShardChunkBytes(int64_t client_chunk_bytes) {
  return std::clamp(client_chunk_bytes, 64 * kKiB, CoordinatorRelay::kReadAheadBytes);
}

std::vector<grpc::Slice> PayloadOf(const wire::ReceivedMessage& message) {
  std::vector<grpc::Slice> slices;
  message.AppendPayloadSlices(0, message.payload_bytes(), &slices);
  return slices;
}

bool IsForward(const TransferSpec& spec) { return spec.direction == Direction::kForward; }

}  // namespace

CoordinatorRelay::CoordinatorRelay(TransferSpec spec, std::shared_ptr<TransferListener> listener,
                                   const Limits& limits, ShardChannels* channels,
                                   std::string secret)
    : listener_(std::move(listener)),
      secret_(std::move(secret)),
      channels_(channels),
      request_type_(IsForward(spec) ? wire::kForwardRequest : wire::kBackwardRequest),
      request_id_(spec.accept.request_id),
      traceparent_(spec.traceparent),
      operation_id_(spec.accept.operation_id),
      generation_(spec.accept.generation),
      targets_(spec.accept.members),
      shard_chunk_bytes_(ShardChunkBytes(spec.reply.max_chunk_bytes)),
      with_crc32c_(spec.reply.with_crc32c),
      inline_tensors_(std::move(spec.inline_tensors)),
      router_(spec.request, spec.shards, limits),
      merger_(spec.request, spec.shards,
              IsForward(spec) ? wire::kForwardResponse : wire::kBackwardResponse,
              spec.reply.max_chunk_bytes, spec.reply.with_crc32c, kReadAheadBytes),
      members_(spec.accept.members.size()) {
  totals_.bytes_up = router_.total_bytes();
  totals_.bytes_down = merger_.total_bytes();
}

std::optional<Failure> CoordinatorRelay::Open() {
  v1::OpenShard open;
  open.set_operation_id(operation_id_);
  open.set_generation(generation_);
  open.set_max_chunk_bytes(shard_chunk_bytes_);
  open.set_with_crc32c(with_crc32c_);
  for (size_t rank = 0; rank < targets_.size(); ++rank) {
    streams_.push_back(ShardStream::Make(shared_from_this(), static_cast<int>(rank),
                                         channels_->Next(targets_[rank].data_address), secret_,
                                         open));
  }
  // No stream receives an answer before this, so the list is not read while it grows.
  for (const std::shared_ptr<ShardStream>& stream : streams_) stream->Begin();
  const auto inline_tensors = std::exchange(inline_tensors_, nullptr);
  for (const InlineData& data : *inline_tensors) {
    wire::ChunkHeader chunk;
    chunk.tensor = ToProto(data.tensor);
    std::vector<grpc::Slice> payload;
    if (!data.bytes.empty()) payload.emplace_back(data.bytes);
    if (std::optional<Failure> failure = Route(chunk, std::move(payload))) return failure;
  }
  // Nothing was routed if there are no tensors or only empty ones.
  if (!router_.complete() || complete()) return std::nullopt;
  {
    absl::MutexLock lock(&state_mutex_);
    complete_ = true;
  }
  for (const std::shared_ptr<ShardStream>& stream : streams_) stream->WritesDone();
  return std::nullopt;
}

// -------------------------------------------------------------------------- upload

bool CoordinatorRelay::HasRoom() const {
  absl::MutexLock lock(&state_mutex_);
  return WindowHasRoom();
}

bool CoordinatorRelay::complete() const {
  absl::MutexLock lock(&state_mutex_);
  return complete_;
}

std::optional<Failure> CoordinatorRelay::Feed(const grpc::ByteBuffer& buffer) {
  const absl::StatusOr<wire::ReceivedMessage> message =
      wire::ReceivedMessage::Parse(request_type_, buffer);
  if (!message.ok()) return BadChunk("chunk", "a message is not valid protobuf");
  if (!message->is_chunk()) return BadChunk("chunk", "only chunks may follow the header");
  return Route(message->chunk(), PayloadOf(*message));
}

std::optional<Failure> CoordinatorRelay::Route(const wire::ChunkHeader& chunk,
                                               std::vector<grpc::Slice> payload) {
  std::vector<RoutedChunk> routed;
  if (std::optional<Failure> failure = router_.Route(chunk, std::move(payload), &routed)) {
    return failure;
  }
  const bool complete = router_.complete();
  {
    absl::MutexLock lock(&state_mutex_);
    if (stopped_) return std::nullopt;
    client_.Moved();
    totals_.received_bytes = router_.received_bytes();
    complete_ = complete;
    for (const RoutedChunk& part : routed) {
      upload_waiting_bytes_ += part.payload_bytes;
      members_[part.rank].waiting_bytes += part.payload_bytes;
    }
  }
  for (RoutedChunk& part : routed) {
    streams_[part.rank]->Write(std::move(part.message), part.payload_bytes);
  }
  if (complete) {
    for (const std::shared_ptr<ShardStream>& stream : streams_) stream->WritesDone();
  }
  return std::nullopt;
}

void CoordinatorRelay::OnShardWritten(int rank, int64_t payload_bytes) {
  bool has_room = false;
  {
    absl::MutexLock lock(&state_mutex_);
    if (stopped_) return;
    const bool had_room = WindowHasRoom();
    upload_waiting_bytes_ -= payload_bytes;
    members_[rank].waiting_bytes -= payload_bytes;
    members_[rank].watch.Moved();
    has_room = !had_room && WindowHasRoom();
  }
  if (has_room) listener_->OnRoom();
}

// ------------------------------------------------------------------------ download

void CoordinatorRelay::Drain() {
  {
    absl::MutexLock lock(&state_mutex_);
    if (stopped_) return;
    draining_ = true;
    for (Member& member : members_) member.watch.Moved();
  }
  Pump();
}

void CoordinatorRelay::OnShardMessage(int rank, grpc::ByteBuffer buffer) {
  const absl::StatusOr<wire::ReceivedMessage> message =
      wire::ReceivedMessage::Parse(wire::kExchangeResponse, buffer);
  bool is_done = false;
  if (!message.ok()) return MemberFailed(rank, "it sent a message that is not valid protobuf");
  if (message->is_chunk()) {
    std::vector<grpc::Slice> payload = PayloadOf(*message);
    if (!DownloadMerger::CrcMatches(message->chunk(), payload)) {
      return MemberFailed(rank, "it sent a chunk with another crc32c");
    }
    absl::MutexLock lock(&merge_mutex_);
    const absl::Status added = merger_.Add(rank, message->chunk(), std::move(payload));
    if (!added.ok()) return MemberFailed(rank, absl::StrCat("it ", added.message()));
  } else if (message->parsed().member == kDone) {
    is_done = true;
  } else if (message->parsed().member != kOpened) {
    return MemberFailed(rank, "it sent an unknown message");
  }
  {
    absl::MutexLock lock(&state_mutex_);
    if (stopped_) return;
    Member& member = members_[rank];
    member.watch.Moved();
    member.done = member.done || is_done;
    member.reading = is_done;
  }
  // Reading after the last message returns the stream's end.
  if (is_done) streams_[rank]->Read();
  Pump();
}

std::optional<DownloadMerger::Chunk> CoordinatorRelay::NextForClient() {
  {
    absl::MutexLock lock(&state_mutex_);
    if (stopped_ || !draining_ || undelivered_bytes_ >= kDownloadWindowBytes) return std::nullopt;
  }
  std::optional<DownloadMerger::Chunk> chunk = merger_.Next();
  if (chunk.has_value()) {
    absl::MutexLock lock(&state_mutex_);
    undelivered_bytes_ += chunk->payload_bytes;
    totals_.sent_bytes = merger_.sent_bytes();
  }
  return chunk;
}

std::vector<int> CoordinatorRelay::TakeReaders() {
  std::vector<int> readers;
  absl::MutexLock lock(&state_mutex_);
  for (size_t rank = 0; rank < members_.size() && !stopped_; ++rank) {
    Member& member = members_[rank];
    if (member.done || member.reading || !merger_.HasRoom(static_cast<int>(rank))) continue;
    member.reading = true;
    readers.push_back(static_cast<int>(rank));
  }
  return readers;
}

bool CoordinatorRelay::TakeDrained() {
  absl::MutexLock lock(&state_mutex_);
  if (stopped_ || !draining_ || drained_ || undelivered_bytes_ > 0 || !merger_.done()) return false;
  drained_ = std::all_of(members_.begin(), members_.end(),
                         [](const Member& member) { return member.done; });
  return drained_;
}

// A thread that is already moving outputs checks again before it leaves, so it also handles outputs
// that arrive now.
void CoordinatorRelay::Pump() {
  {
    absl::MutexLock lock(&merge_mutex_);
    if (std::exchange(pumping_, true)) return;
  }
  bool drained = false;
  int chunks = 0;
  for (bool more = true; more;) {
    if (chunks == kChunksAtATime) {
      absl::MutexLock lock(&merge_mutex_);
      pumping_ = false;
      return RunDeferred([self = shared_from_this()] { self->Pump(); });
    }
    std::optional<DownloadMerger::Chunk> chunk;
    std::vector<int> readers;
    {
      absl::MutexLock lock(&merge_mutex_);
      chunk = NextForClient();
      readers = TakeReaders();
      more = chunk.has_value() || !readers.empty();
      if (!more) {
        drained = TakeDrained();
        pumping_ = false;
      }
    }
    // Read first: members continue to send while the chunk is written.
    for (int rank : readers) streams_[rank]->Read();
    if (!chunk.has_value()) continue;
    ++chunks;
    listener_->OnOutput(std::move(chunk->message), chunk->payload_bytes);
  }
  if (drained) listener_->OnDrained();
}

void CoordinatorRelay::Delivered(int64_t payload_bytes) {
  {
    absl::MutexLock lock(&state_mutex_);
    undelivered_bytes_ -= payload_bytes;
    client_.Moved();
  }
  Pump();
}

// --------------------------------------------------------------- stalls and ends

// Returns true while a member has work, as far as this process knows. A member with all its inputs
// reports that to the core only.
bool CoordinatorRelay::WaitsFor(const Member& member) const {
  if (draining_) return member.reading && !member.done;
  return member.waiting_bytes > 0 || complete_;
}

TransferStalls CoordinatorRelay::Look() {
  absl::MutexLock lock(&state_mutex_);
  TransferStalls stalls;
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    Member& member = members_[rank];
    if (member.watch.Look(WaitsFor(member))) stalls.members.push_back(static_cast<int>(rank));
  }
  stalls.waits_for_input = WindowHasRoom() && !complete_;
  stalls.client = client_.Look(draining_ ? undelivered_bytes_ > 0 : stalls.waits_for_input);
  return stalls;
}

TransferTotals CoordinatorRelay::totals() const {
  absl::MutexLock lock(&state_mutex_);
  return totals_;
}

void CoordinatorRelay::MemberFailed(int rank, const std::string& reason) {
  {
    absl::MutexLock lock(&state_mutex_);
    if (stopped_) return;
  }
  streams_[rank]->Cancel();
  listener_->OnMemberFailed(rank, reason);
}

void CoordinatorRelay::OnShardEnded(int rank, const grpc::Status& status) {
  {
    absl::MutexLock lock(&state_mutex_);
    if (stopped_ || members_[rank].done) return;
  }
  LogWarning("shard stream ended early", {{"request_id", request_id_},
                                          {"traceparent", traceparent_},
                                          {"generation", generation_},
                                          {"worker", targets_[rank].name},
                                          {"code", CodeName(status.error_code())},
                                          {"error", status.error_message()}});
  // gRPC's own message may contain addresses that clients must not see.
  listener_->OnMemberFailed(
      rank, absl::StrCat("its shard stream ended with ", CodeName(status.error_code())));
}

void CoordinatorRelay::Stop() {
  {
    absl::MutexLock lock(&state_mutex_);
    if (std::exchange(stopped_, true)) return;
  }
  for (const std::shared_ptr<ShardStream>& stream : streams_) stream->Cancel();
}

}  // namespace ringattn::server
