// The client's side of a request: header, messages, status. Tensors are in
// request_transfer.cc.
#include "server/edge/request_stream.h"

#include <algorithm>
#include <utility>

#include <grpc/grpc.h>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/observability/log.h"
#include "common/wire/grpc_slices.h"
#include "server/edge/error_details.h"
#include "server/edge/replies.h"

namespace ringattn::server {
namespace {

// A failed call whose status does not get through to the client is cut off after this.
constexpr absl::Duration kFinishTimeout = absl::Seconds(10);

std::string MakeRequestId() {
  absl::BitGen random;
  return absl::StrCat("req-", absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16),
                      absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16));
}

Failure MakeFailure(absl::StatusCode code, std::string reason, std::string message,
                    std::string field = "") {
  Failure failure;
  failure.code = code;
  failure.reason = std::move(reason);
  failure.message = std::move(message);
  failure.field = std::move(field);
  return failure;
}

Failure Busy(absl::Duration retry_after) {
  Failure failure = MakeFailure(absl::StatusCode::kResourceExhausted, "TOO_MANY_REQUESTS",
                                "the server has too many calls open");
  failure.retry_after = retry_after;
  return failure;
}

// With the client's W3C trace context, if it sent one, so that its traces lead here.
void LogArrival(const grpc::CallbackServerContext& call, const HeaderRequest& request) {
  const auto& metadata = call.client_metadata();
  const auto trace = metadata.find("traceparent");
  const AttentionShape& shape = request.valid.spec.shape;
  LogInfo("request arrived",
          {{"request_id", request.request_id},
           {"method", request.valid.direction == Direction::kForward ? "Forward" : "Backward"},
           {"batch", shape.batch},
           {"seq_len_q", shape.seq_len_q},
           {"seq_len_kv", shape.seq_len_kv},
           {"heads", shape.num_heads},
           {"head_dim", shape.head_dim},
           {"traceparent", trace == metadata.end()
                               ? absl::string_view()
                               : absl::string_view(trace->second.data(),
                                                   std::min<size_t>(trace->second.size(), 64))}});
}

template <typename Request>
std::variant<HeaderRequest, Rejection> ParseHeader(grpc::ByteBuffer* buffer, const Limits& limits) {
  absl::StatusOr<Request> first = wire::ParseProto<Request>(buffer);
  if (first.ok()) return ReadHeader(*std::move(first), limits);
  Rejection rejection;
  rejection.violations = {{"header", "the first message is not valid protobuf"}};
  return rejection;
}

}  // namespace

RequestStream::RequestStream(const RequestContext* context, grpc::CallbackServerContext* call,
                             Direction direction)
    : context_(context), call_(call), direction_(direction), opened_at_(absl::Now()) {}

ByteStreamReactor* RequestStream::Start(const RequestContext* context,
                                        grpc::CallbackServerContext* call, Direction direction) {
  std::shared_ptr<RequestStream> stream(new RequestStream(context, call, direction));
  stream->self_ = stream;
  stream->id_ = context->registry->Add(stream);
  absl::MutexLock lock(&stream->mutex_);
  if (stream->id_ == 0) {
    stream->End(ToGrpcStatus(Busy(context->retry_after), context->limits));
  } else {
    stream->reading_ = true;
    stream->StartRead(&stream->incoming_);
  }
  return stream.get();
}

// ------------------------------------------------------------- from the client

void RequestStream::OnReadDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  reading_ = false;
  if (over()) return;
  if (ok) return request_.has_value() ? HandleChunk() : HandleHeader();
  half_closed_ = true;
  if (call_->IsCancelled()) return;  // OnCancel knows more
  if (!request_.has_value()) {
    return End(ToGrpcStatus(MakeFailure(absl::StatusCode::kInvalidArgument, "INVALID_REQUEST",
                                        "the stream ended before its header", "header"),
                            context_->limits));
  }
  if (router_.has_value() && !router_->complete()) GiveUp(router_->Incomplete());
}

void RequestStream::HandleHeader() {
  const Limits& limits = context_->limits;
  if (static_cast<int64_t>(incoming_.Length()) > limits.max_header_bytes) {
    return End(
        ToGrpcStatus(MakeFailure(absl::StatusCode::kResourceExhausted, "OVER_LIMIT",
                                 absl::StrCat("the header has ", incoming_.Length(),
                                              " bytes, the limit is ", limits.max_header_bytes),
                                 "header"),
                     limits));
  }
  std::variant<HeaderRequest, Rejection> read =
      direction_ == Direction::kForward ? ParseHeader<v1::ForwardRequest>(&incoming_, limits)
                                        : ParseHeader<v1::BackwardRequest>(&incoming_, limits);
  incoming_.Clear();
  if (const auto* rejection = std::get_if<Rejection>(&read)) {
    return End(ToGrpcStatus(*rejection, limits));
  }
  Announce(std::get<HeaderRequest>(std::move(read)));
}

void RequestStream::Announce(HeaderRequest request) {
  if (request.request_id.empty()) request.request_id = MakeRequestId();
  const absl::Time now = absl::Now();
  RequestArrived arrived;
  arrived.stream = id_;
  arrived.request_id = request.request_id;
  arrived.fingerprint = request.fingerprint;
  arrived.spec = request.valid.spec;
  arrived.direction = request.valid.direction;
  arrived.recompute_forward = request.valid.recompute_forward;
  arrived.choice = request.valid.choice;
  arrived.deadline = Deadline(now);
  arrived.with_timeline = request.reply.with_timeline;
  next_progress_ = now + request.reply.progress_interval;
  LogArrival(*call_, request);
  request_ = std::move(request);
  if (!context_->core->TryPost(std::move(arrived))) {
    return End(ToGrpcStatus(Busy(context_->retry_after), context_->limits));
  }
  in_core_ = true;
}

absl::Time RequestStream::Deadline(absl::Time now) const {
  const auto deadline = call_->deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) {
    return now + context_->limits.default_deadline;
  }
  return std::min(absl::FromChrono(deadline), now + context_->limits.max_deadline);
}

void RequestStream::OnCancel() {
  absl::MutexLock lock(&mutex_);
  if (over()) return;
  const bool late = absl::FromChrono(call_->deadline()) <= absl::Now();
  Failure why = late ? MakeFailure(absl::StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED",
                                   "the call's deadline passed")
                     : MakeFailure(absl::StatusCode::kCancelled, "CANCELLED",
                                   "the client cancelled or went away");
  if (in_core_) return GiveUp(std::move(why));
  End(ToGrpcStatus(why, context_->limits));
}

// --------------------------------------------------------------- from the core

void RequestStream::Accept(const AcceptRequest& accept) {
  absl::MutexLock lock(&mutex_);
  if (over()) return;
  plan_ = accept.plan;
  generation_ = accept.generation;
  Enqueue(Wrap(direction_, MakeAccepted(*request_, accept, context_->limits)), 0);
  OpenShards(accept);
}

void RequestStream::Succeed(const FinishRequest& finish) {
  absl::MutexLock lock(&mutex_);
  in_core_ = false;
  if (ended_) return;
  // Whoever gave up in the same moment gets no other answer from the core.
  if (gave_up_) return End(ToGrpcStatus(why_, context_->limits));
  TransferTotals totals;
  totals.bytes_up = router_->total_bytes();
  totals.bytes_down = merger_->total_bytes();
  Enqueue(Wrap(direction_, MakeSummary(*download_, finish.download_time, *plan_, totals)), 0);
  context_->metrics->StageTook("queue", download_->queue_time);
  context_->metrics->StageTook("upload", download_->upload_time);
  context_->metrics->StageTook("compute", download_->compute_time);
  context_->metrics->StageTook("download", finish.download_time);
  End(grpc::Status::OK);
}

void RequestStream::Fail(const Failure& failure) {
  absl::MutexLock lock(&mutex_);
  in_core_ = false;
  if (ended_) return;
  if (failure.reason == "UPLOAD_IDLE") context_->metrics->IdleEnded("upload");
  if (failure.reason == "DOWNLOAD_IDLE") context_->metrics->IdleEnded("download");
  End(ToGrpcStatus(failure, context_->limits));
}

void RequestStream::OnTick(absl::Time now, const Coordinator& core) {
  absl::MutexLock lock(&mutex_);
  if (!request_.has_value() && !over() && now - opened_at_ > context_->limits.upload_idle_timeout) {
    End(ToGrpcStatus(MakeFailure(absl::StatusCode::kDeadlineExceeded, "UPLOAD_IDLE",
                                 "no header came in time", "header"),
                     context_->limits));
  }
  if (!over()) LookAtMembers(now);
  if (!over() && !writing_) ReportDownload(now);
  if (ended_ && !done_) CutOffIfStuck(now);
  if (!over() && now >= next_progress_) SendProgress(now, core);
}

// -------------------------------------------------------------------- endings

void RequestStream::GiveUp(Failure why) {
  if (std::exchange(gave_up_, true)) return;
  StopShards();
  why_ = std::move(why);
  context_->core->Post(RequestEnded{id_, why_});
}

void RequestStream::StopShards() {
  for (Member& member : members_) member.stream->Cancel();
}

void RequestStream::End(const grpc::Status& status) {
  ended_ = true;
  ended_at_ = absl::Now();
  status_ = status;
  if (!status.ok()) {
    // What the client has not got yet is worth nothing to it now.
    while (outgoing_.size() > (writing_ ? 1 : 0)) outgoing_.pop_back();
    StopShards();
  }
  context_->metrics->RequestEnded(direction_, CodeName(status.error_code()));
  LogInfo("request ended",
          {{"request_id", request_.has_value() ? request_->request_id : std::string()},
           {"generation", generation_},
           {"method", direction_ == Direction::kForward ? "Forward" : "Backward"},
           {"code", CodeName(status.error_code())},
           {"error", status.error_message()},
           {"seconds", absl::ToDoubleSeconds(ended_at_ - opened_at_)}});
  if (!writing_ && outgoing_.empty()) FinishCall();
}

// The status waits behind a message that the client does not take. Of a result that is
// the summary, and the client may rest as long as before any other part of it.
// Cancelling lets go of that message and sends the status ahead, code and words without
// the details; what TryCancel sends would be CANCELLED.
void RequestStream::CutOffIfStuck(absl::Time now) {
  const absl::Duration limit =
      status_.ok() ? context_->limits.download_idle_timeout : kFinishTimeout;
  if (cut_off_ || now - ended_at_ <= limit) return;
  cut_off_ = true;
  LogWarning("the client did not take the call's end",
             {{"request_id", request_.has_value() ? request_->request_id : std::string()},
              {"code", CodeName(status_.error_code())},
              {"seconds", absl::ToDoubleSeconds(now - ended_at_)}});
  if (status_.ok()) {
    context_->metrics->IdleEnded("download");
    status_ = {
        grpc::StatusCode::DEADLINE_EXCEEDED,
        absl::StrCat("the client took no bytes of the result for ", absl::FormatDuration(limit))};
  }
  grpc_call_cancel_with_status(call_->c_call(), static_cast<grpc_status_code>(status_.error_code()),
                               status_.error_message().c_str(), nullptr);
}

void RequestStream::FinishCall() {
  if (std::exchange(finished_, true)) return;
  Finish(status_);
}

void RequestStream::OnDone() {
  std::shared_ptr<RequestStream> self;
  std::vector<Member> members;
  {
    absl::MutexLock lock(&mutex_);
    ended_ = done_ = true;
    StopShards();
    // They refer to this object and it to them.
    members.swap(members_);
    self = std::move(self_);
  }
  if (id_ != 0) context_->registry->Remove(id_);
}

// --------------------------------------------------------------------- writes

void RequestStream::Enqueue(grpc::ByteBuffer message, int64_t payload_bytes) {
  outgoing_bytes_ += payload_bytes;
  outgoing_.push_back({std::move(message), payload_bytes});
  WriteNext();
}

void RequestStream::WriteNext() {
  if (writing_ || finished_ || outgoing_.empty()) return;
  writing_ = true;
  StartWrite(&outgoing_.front().message);
}

void RequestStream::OnWriteDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  writing_ = false;
  outgoing_bytes_ -= outgoing_.front().payload_bytes;
  if (ok) context_->metrics->SentToClient(outgoing_.front().payload_bytes);
  outgoing_.pop_front();
  if (!ok) outgoing_.clear();  // the call is broken; OnCancel follows
  if (ended_ && outgoing_.empty()) return FinishCall();
  WriteNext();
  if (over()) return;
  if (ok) ReportDownload(absl::Now());
  PumpDownload();
}

}  // namespace ringattn::server
