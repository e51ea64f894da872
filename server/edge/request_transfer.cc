// A request's tensors: from the client to the members, and back.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/observability/log.h"
#include "common/wire/grpc_slices.h"
#include "common/wire/proto_values.h"
#include "ringattn/v1/shard.pb.h"
#include "server/edge/error_details.h"
#include "server/edge/replies.h"
#include "server/edge/request_stream.h"

namespace ringattn::server {
namespace {

// ExchangeResponse's members.
constexpr int kOpened = v1::ExchangeResponse::kOpened;
constexpr int kDone = v1::ExchangeResponse::kDone;

// The core's limits on idle transfers are counted in seconds.
constexpr absl::Duration kReportInterval = absl::Milliseconds(200);

// What members are asked to send at a time: not less than is worth a message, not
// more than the read-ahead.
int64_t ShardChunkBytes(int64_t client_chunk_bytes) {
  return std::clamp(client_chunk_bytes, 64 * kKiB, RequestStream::kReadAheadBytes);
}

std::vector<grpc::Slice> PayloadOf(const wire::ReceivedMessage& message) {
  std::vector<grpc::Slice> slices;
  message.AppendPayloadSlices(0, message.payload_bytes(), &slices);
  return slices;
}

}  // namespace

void RequestStream::OpenShards(const AcceptRequest& accept) {
  const ShardPlan& shards = accept.plan.shards;
  router_.emplace(request_->valid, shards, context_->limits);
  const wire::StreamMessage& response =
      direction_ == Direction::kForward ? wire::kForwardResponse : wire::kBackwardResponse;
  merger_.emplace(request_->valid, shards, response, request_->reply.max_chunk_bytes,
                  request_->reply.with_crc32c, kReadAheadBytes);

  v1::ExchangeRequest request;
  v1::OpenShard* open = request.mutable_open();
  open->set_operation_id(accept.operation_id);
  open->set_generation(accept.generation);
  open->set_max_chunk_bytes(ShardChunkBytes(request_->reply.max_chunk_bytes));
  open->set_with_crc32c(request_->reply.with_crc32c);
  for (size_t rank = 0; rank < accept.members.size(); ++rank) {
    const RingMember& target = accept.members[rank];
    Member& member = members_.emplace_back();
    member.name = target.name;
    member.stream =
        ShardStream::Open(shared_from_this(), static_cast<int>(rank),
                          context_->channels->Next(target.data_address), context_->secret);
    member.stream->Write(wire::SerializeProto(request), 0);
  }

  std::vector<InlineData> inline_tensors = std::exchange(request_->inline_tensors, {});
  for (InlineData& data : inline_tensors) {
    wire::ChunkHeader chunk;
    chunk.tensor = ToProto(data.tensor);
    std::vector<grpc::Slice> payload;
    if (!data.bytes.empty()) payload.emplace_back(data.bytes);
    RouteChunk(chunk, std::move(payload));
  }
  if (router_->complete()) {
    for (Member& member : members_) member.stream->WritesDone();
  }
  ReadMore();
}

// --------------------------------------------------------------------------- up

void RequestStream::ReadMore() {
  if (over() || reading_ || half_closed_ || !router_.has_value()) return;
  if (upload_waiting_bytes_ >= kUploadWindowBytes) return;
  reading_ = true;
  StartRead(&incoming_);
}

void RequestStream::HandleChunk() {
  const absl::StatusOr<wire::ReceivedMessage> message =
      wire::ReceivedMessage::Parse(wire::kForwardRequest, incoming_);
  incoming_.Clear();
  Failure bad;
  bad.code = absl::StatusCode::kInvalidArgument;
  bad.reason = "BAD_CHUNK";
  bad.field = "chunk";
  if (!message.ok()) {
    bad.message = "a message is not valid protobuf";
    return GiveUp(std::move(bad));
  }
  if (!message->is_chunk()) {
    bad.message = "only chunks may follow the header";
    return GiveUp(std::move(bad));
  }
  RouteChunk(message->chunk(), PayloadOf(*message));
  if (router_->complete() && !over()) {
    for (Member& member : members_) member.stream->WritesDone();
  }
  ReadMore();
}

void RequestStream::RouteChunk(const wire::ChunkHeader& chunk, std::vector<grpc::Slice> payload) {
  const int64_t received = router_->received_bytes();
  std::vector<RoutedChunk> routed;
  if (std::optional<Failure> failure = router_->Route(chunk, std::move(payload), &routed)) {
    return GiveUp(*std::move(failure));
  }
  context_->metrics->ReceivedFromClient(router_->received_bytes() - received);
  for (RoutedChunk& part : routed) {
    upload_waiting_bytes_ += part.payload_bytes;
    members_[part.rank].waiting_bytes += part.payload_bytes;
    members_[part.rank].stream->Write(std::move(part.message), part.payload_bytes);
  }
  if (TimeToReport(absl::Now())) context_->core->Post(UploadProgressed{id_});
}

bool RequestStream::TimeToReport(absl::Time now) {
  if (now - progress_reported_ < kReportInterval) return false;
  progress_reported_ = now;
  return true;
}

void RequestStream::OnShardWritten(int rank, int64_t payload_bytes) {
  absl::MutexLock lock(&mutex_);
  if (over()) return;
  upload_waiting_bytes_ -= payload_bytes;
  members_[rank].waiting_bytes -= payload_bytes;
  members_[rank].moved = true;
  ReadMore();
}

// ------------------------------------------------------------------------- down

void RequestStream::Download(const BeginDownload& begin) {
  absl::MutexLock lock(&mutex_);
  if (over()) return;
  download_ = begin;
  for (Member& member : members_) member.moved = true;
  PumpDownload();
}

void RequestStream::OnShardMessage(int rank, grpc::ByteBuffer buffer) {
  const absl::StatusOr<wire::ReceivedMessage> message =
      wire::ReceivedMessage::Parse(wire::kExchangeResponse, buffer);
  absl::MutexLock lock(&mutex_);
  if (over()) return;
  Member& member = members_[rank];
  member.reading = false;
  member.moved = true;
  if (!message.ok()) return ShardFailed(rank, "it sent a message that is not valid protobuf");
  if (message->is_chunk()) {
    const absl::Status added = merger_->Add(rank, message->chunk(), PayloadOf(*message));
    if (!added.ok()) return ShardFailed(rank, absl::StrCat("it ", added.message()));
  } else if (message->parsed().member == kDone) {
    member.done = true;
    // The read that follows finds the stream's end.
    member.reading = true;
    member.stream->Read();
  } else if (message->parsed().member != kOpened) {
    return ShardFailed(rank, "it sent an unknown message");
  }
  PumpDownload();
}

// While nothing waits for the client, nothing is its fault.
void RequestStream::ReportDownload(absl::Time now) {
  if (!download_.has_value() || download_reported_ || !TimeToReport(now)) return;
  context_->core->Post(DownloadProgressed{id_});
}

// Moves on whatever can move.
void RequestStream::PumpDownload() {
  if (!merger_.has_value()) return;
  while (download_.has_value() && outgoing_bytes_ < kDownloadWindowBytes) {
    std::optional<DownloadMerger::Chunk> chunk = merger_->Next();
    if (!chunk.has_value()) break;
    Enqueue(std::move(chunk->message), chunk->payload_bytes);
  }
  bool all_done = true;
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    Member& member = members_[rank];
    all_done = all_done && member.done;
    if (member.done || member.reading || !merger_->Wants(rank)) continue;
    member.reading = true;
    member.stream->Read();
  }
  if (!download_.has_value() || download_reported_) return;
  if (!merger_->done() || !all_done || !outgoing_.empty()) return;
  download_reported_ = true;
  context_->core->Post(DownloadFinished{id_});
}

void RequestStream::OnShardEnded(int rank, const grpc::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (over() || members_[rank].done) return;
  LogWarning("shard stream ended early", {{"request_id", request_->request_id},
                                          {"generation", generation_},
                                          {"worker", members_[rank].name},
                                          {"code", CodeName(status.error_code())},
                                          {"error", status.error_message()}});
  // gRPC's own words may hold addresses, which are nothing to the client.
  context_->core->Post(ShardStreamFailed{
      id_, rank, absl::StrCat("its shard stream ended with ", CodeName(status.error_code()))});
}

void RequestStream::ShardFailed(int rank, const std::string& reason) {
  members_[rank].stream->Cancel();
  context_->core->Post(ShardStreamFailed{id_, rank, reason});
}

// --------------------------------------------------------------------- progress

// True while a member has something to do, as far as is known here: one that has all of its
// inputs says so to the core alone.
bool RequestStream::WaitsFor(const Member& member) const {
  if (download_.has_value()) return member.reading && !member.done;
  return member.waiting_bytes > 0 || router_->complete();
}

void RequestStream::LookAtMembers(absl::Time now) {
  if (!router_.has_value() || now - looked_at_ < kReportInterval) return;
  looked_at_ = now;
  MembersStalled report;
  report.stream = id_;
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    Member& member = members_[rank];
    const bool waits = WaitsFor(member);
    if (waits && !member.moved) report.members.push_back(static_cast<int>(rank));
    member.moved = !waits;
  }
  context_->core->Post(std::move(report));
  // The client's clock runs while its next bytes could be taken.
  const bool waits_for_client = reading_ && !router_->complete();
  if (!download_.has_value() && !waits_for_client) context_->core->Post(UploadProgressed{id_});
}

void RequestStream::SendProgress(absl::Time now, const Coordinator& core) {
  next_progress_ = now + request_->reply.progress_interval;
  // A client that does not read gets no backlog of news.
  if (!plan_.has_value() || outgoing_.size() > 4) return;
  const std::optional<OperationView> view = core.FindOperation(request_->request_id, /*principal=*/"");
  if (!view.has_value()) return;
  const auto fraction = [](int64_t part, int64_t whole) {
    return whole == 0 ? 1.0 : static_cast<double>(part) / static_cast<double>(whole);
  };
  v1::Progress progress;
  progress.set_state(view->state);
  if (view->state == v1::OPERATION_STATE_UPLOADING) {
    progress.set_fraction_done(fraction(router_->received_bytes(), router_->total_bytes()));
  } else if (view->state == v1::OPERATION_STATE_COMPUTING) {
    progress.set_fraction_done(view->computed_fraction);
  } else if (view->state == v1::OPERATION_STATE_DOWNLOADING) {
    progress.set_fraction_done(fraction(merger_->sent_bytes(), merger_->total_bytes()));
  }
  Enqueue(Wrap(direction_, std::move(progress)), 0);
}

}  // namespace ringattn::server
