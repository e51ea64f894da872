#include "server/edge/request_call.h"

#include <algorithm>
#include <utility>
#include <variant>
#include <vector>

#include <grpc/grpc.h>
#include <grpc/grpc_security_constants.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/attention/dtype.h"
#include "common/observability/log.h"
#include "common/security/token.h"
#include "server/core/plan_summary.h"
#include "server/edge/call_audit.h"
#include "server/edge/call_failures.h"
#include "server/edge/call_header.h"
#include "server/edge/coordinator_relay.h"
#include "server/edge/error_details.h"
#include "server/edge/member_plane.h"
#include "server/edge/replies.h"
#include "server/edge/run_soon.h"

namespace ringattn::server {
namespace {

// Ends a call that is nobody's.
class Refusal final : public ByteStreamReactor {
 public:
  explicit Refusal(const grpc::Status& status) { Finish(status); }
  void OnDone() override { delete this; }
};

}  // namespace

RequestCall::RequestCall(const RequestContext* context, grpc::CallbackServerContext* call,
                         Direction direction, Caller caller)
    : context_(context),
      call_(call),
      direction_(direction),
      caller_(std::move(caller)),
      traceparent_(TraceparentOf(call->client_metadata())),
      opened_at_(absl::Now()),
      meter_(context->limits) {}

ByteStreamReactor* RequestCall::Start(const RequestContext* context,
                                      grpc::CallbackServerContext* call, Direction direction) {
  std::variant<Caller, grpc::Status> caller = context->callers->Identify(*call);
  if (const auto* status = std::get_if<grpc::Status>(&caller)) {
    context->metrics->RequestEnded(direction, CodeName(status->error_code()));
    return new Refusal(*status);
  }
  const std::shared_ptr<RequestCall> self(
      new RequestCall(context, call, direction, std::get<Caller>(std::move(caller))));
  self->self_ = self;
  const RequestRegistry::Entry entry = context->registry->Add(self, self->caller_);
  self->Begin(entry);
  if (entry.evicted != nullptr) entry.evicted->Evict();
  return self.get();
}

void RequestCall::Begin(const RequestRegistry::Entry& entry) {
  Todo todo;
  {
    absl::MutexLock lock(&mutex_);
    id_ = entry.id;
    if (entry.refused != PlacesFull::kNone) {
      End(NoPlace(entry.refused, context_->limits, context_->retry_after));
    }
    todo = Next();
  }
  Do(std::move(todo));
}

// ------------------------------------------------------- what is started when

RequestCall::Todo RequestCall::Next() {
  Todo todo;
  if (std::exchange(stops_, false)) todo.stop = plane_;
  if (soon_) {
    todo.soon = std::exchange(soon_, nullptr);
    ++busy_;
  }
  const bool takes = life_.state() == CallState::kAwaitingHeader ||
                     (life_.state() == CallState::kTransferring && plane_->Wants());
  todo.read = takes && !reading_ && !half_closed_;
  reading_ = reading_ || todo.read;
  const bool ends = life_.state() == CallState::kEnding || life_.state() == CallState::kCutOff;
  if (!writing_ && !outgoing_.empty()) {
    todo.write = writing_ = true;
    in_flight_ = std::move(outgoing_.front());
    outgoing_.pop_front();
  } else if (!writing_ && ends && busy_ == 0) {
    life_.MoveTo(CallState::kFinished);
    todo.finish = status_;
  }
  if (todo.read || todo.write) ++busy_;
  return todo;
}

void RequestCall::Do(Todo todo) {
  if (todo.stop != nullptr) todo.stop->Stop();
  if (todo.soon) {
    RunSoon([self = shared_from_this(), work = std::move(todo.soon)] {
      work();
      self->Unbusy();
    });
  }
  if (todo.read) StartRead(&incoming_);
  if (todo.write) StartWrite(&in_flight_.message);
  if (todo.finish.has_value()) return Finish(*todo.finish);
  if (todo.read || todo.write) Unbusy();
}

void RequestCall::Unbusy() {
  Todo todo;
  {
    absl::MutexLock lock(&mutex_);
    --busy_;
    todo = Next();
  }
  Do(std::move(todo));
}

void RequestCall::Enqueue(grpc::ByteBuffer message, int64_t payload_bytes) {
  outgoing_.push_back({std::move(message), payload_bytes});
}

void RequestCall::OnWriteDone(bool ok) {
  const int64_t written = std::exchange(in_flight_, {}).payload_bytes;
  if (ok) context_->metrics->SentToClient(written);
  std::shared_ptr<DataPlane> plane;
  Todo todo;
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) outgoing_.clear();  // the call is broken; OnCancel follows
    if (ok && written > 0 && !life_.over()) plane = plane_;
    todo = Next();
  }
  Do(std::move(todo));
  if (plane != nullptr) plane->Delivered(written);
}

// ----------------------------------------------------------------- the header

void RequestCall::OnReadDone(bool ok) {
  void (RequestCall::*take)() = nullptr;
  Todo todo;
  {
    absl::MutexLock lock(&mutex_);
    if (ok && life_.state() == CallState::kAwaitingHeader) {
      life_.MoveTo(CallState::kCheckingHeader);
      take = &RequestCall::TakeHeader;
    } else if (ok && !life_.over()) {
      take = &RequestCall::TakeChunk;
    } else {
      reading_ = false;
      if (!ok) HalfClosed(absl::Now());
      todo = Next();
    }
  }
  if (take == nullptr) return Do(std::move(todo));
  (this->*take)();
}

void RequestCall::TakeHeader() {
  auto header = CheckHeader(direction_, &incoming_, context_->limits);
  if (auto* residual = std::get_if<ResidualHeader>(&header)) {
    return LookUpResidual(std::move(*residual));
  }
  if (const auto* status = std::get_if<grpc::Status>(&header)) return TakeRequest(*status);
  TakeRequest(std::get<HeaderRequest>(std::move(header)));
}

// What the core knows of it is all that its thread has to do with this.
void RequestCall::LookUpResidual(ResidualHeader header) {
  auto shared = std::make_shared<ResidualHeader>(std::move(header));
  const bool asked =
      context_->core->Ask([self = shared_from_this(), shared](const Coordinator& core) {
        ResidualView view =
            core.FindResidual(shared->handle(), self->caller_.principal, shared->request_id());
        RunSoon([self, shared, view = std::move(view)] {
          self->TakeRequest(CompleteHeader(std::move(*shared), view, self->context_->limits));
        });
      });
  if (!asked) TakeRequest(ToGrpcStatus(CoreBusy(context_->retry_after), context_->limits));
}

void RequestCall::TakeRequest(std::variant<HeaderRequest, grpc::Status> header) {
  Todo todo;
  {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    if (life_.over()) {
      // It ended while its header was being checked.
    } else if (const auto* status = std::get_if<grpc::Status>(&header)) {
      End(*status);
    } else {
      Announce(std::get<HeaderRequest>(std::move(header)));
    }
    todo = Next();
  }
  Do(std::move(todo));
}

void RequestCall::Announce(HeaderRequest request) {
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
  arrived.principal = caller_.principal;
  arrived.client = caller_.client;
  arrived.terms = caller_.terms;
  next_progress_ = now + request.reply.progress_interval;
  arrived.traceparent = traceparent_;
  if (request.valid.retain_ttl) {
    arrived.retain = RequestArrived::Retain{MakeResidualHandle(), *request.valid.retain_ttl};
  }
  arrived.residual = request.valid.residual_handle;
  arrived.keep_residual = request.valid.keep_residual;
  arrived.transport = request.valid.transport;
  const std::vector<TransportKind>& accept = arrived.transport.accept;
  if (std::find(accept.begin(), accept.end(), TransportKind::kDirectStream) != accept.end()) {
    arrived.token_seed = RandomToken();
  }
  LogArrival(request, traceparent_);
  request_ = std::move(request);
  PlacesFull full = context_->registry->HeaderCame(id_);
  if (full == PlacesFull::kNone && !context_->core->TryPost(std::move(arrived))) {
    full = PlacesFull::kServer;
  }
  if (full != PlacesFull::kNone) {
    return End(NoPlace(full, context_->limits, context_->retry_after));
  }
  life_.MoveTo(CallState::kQueued);
}

absl::Time RequestCall::Deadline(absl::Time now) const {
  const auto deadline = call_->deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) {
    return now + context_->limits.default_deadline;
  }
  return std::min(absl::FromChrono(deadline), now + context_->limits.max_deadline);
}

TransferTotals RequestCall::Totals() {
  absl::MutexLock lock(&mutex_);
  return plane_ == nullptr ? TransferTotals() : plane_->totals();
}

void RequestCall::Evict() {
  Todo todo;
  {
    absl::MutexLock lock(&mutex_);
    if (life_.state() != CallState::kAwaitingHeader) return;
    End(Evicted(context_->limits, context_->retry_after));
    todo = Next();
  }
  Do(std::move(todo));
}

// --------------------------------------------------------------- from the core

void RequestCall::Accept(const AcceptRequest& accept) {
  Todo todo;
  {
    absl::MutexLock lock(&mutex_);
    if (life_.state() != CallState::kQueued) return;
    life_.MoveTo(CallState::kOpening);
    flops_ = accept.plan->flops;
    generation_ = accept.generation;
    transport_ = accept.transport;
    context_->metrics->Accepted(transport_);
    v1::Accepted accepted = MakeAccepted(*request_, accept, traceparent_, context_->limits);
    TransferSpec spec{
        direction_, request_->valid, request_->reply, std::exchange(request_->inline_tensors, {}),
        accept,     ShardPlan(),     traceparent_};
    if (transport_ == v1::TRANSPORT_DIRECT_STREAM) {
      soon_ = [this, spec = std::move(spec), accepted = std::move(accepted)]() mutable {
        HandOutTickets(spec, std::move(accepted));
      };
    } else if (transport_ == v1::TRANSPORT_HOST_MEMORY || transport_ == v1::TRANSPORT_CUDA_MEMORY) {
      // At once: nothing is to be opened, and the members may have done all before another
      // thread came to it.
      Enqueue(Wrap(direction_, std::move(accepted)), 0);
      plane_ = std::make_shared<MemberPlane>(spec);
      life_.MoveTo(CallState::kTransferring);
    } else {
      Enqueue(Wrap(direction_, std::move(accepted)), 0);
      soon_ = [this, spec = std::move(spec)]() mutable { OpenDataPlane(std::move(spec)); };
    }
    todo = Next();
  }
  Do(std::move(todo));
}

void RequestCall::Download(const BeginDownload& begin) {
  Todo todo;
  {
    absl::MutexLock lock(&mutex_);
    if (life_.over()) return;
    download_ = begin;
    if (life_.state() == CallState::kTransferring) DrainSoon();
    todo = Next();
  }
  Do(std::move(todo));
}

void RequestCall::Advance(const TransferAdvanced& advanced) {
  std::shared_ptr<DataPlane> plane;
  {
    absl::MutexLock lock(&mutex_);
    plane = plane_;
  }
  if (plane != nullptr) plane->Advanced(advanced);
}

void RequestCall::Succeed(const FinishRequest& finish) {
  Todo todo;
  {
    absl::MutexLock lock(&mutex_);
    if (!life_.in_core()) return;
    if (life_.state() == CallState::kGivingUp) {
      // Whoever gave up in the same moment gets no other answer from the core.
      End(why_);
    } else {
      plane_->Succeeded();
      if (transport_ != v1::TRANSPORT_COORDINATOR_STREAM) {
        context_->metrics->MovedByMembers(transport_, plane_->totals());
      }
      Enqueue(Wrap(direction_, MakeSummary(*download_, finish, flops_, plane_->totals())), 0);
      context_->metrics->StageTook("queue", download_->queue_time);
      context_->metrics->StageTook("upload", download_->upload_time);
      context_->metrics->StageTook("compute", download_->compute_time);
      context_->metrics->StageTook("download", finish.download_time);
      download_time_ = finish.download_time;
      const AttentionShape& shape = request_->valid.spec.shape;
      context_->metrics->Served(direction_, shape.batch * shape.seq_len_q);
      End(grpc::Status::OK);
    }
    todo = Next();
  }
  Do(std::move(todo));
}

void RequestCall::Fail(const Failure& failure) {
  Todo todo;
  {
    absl::MutexLock lock(&mutex_);
    if (!life_.in_core()) return;
    if (failure.reason == "UPLOAD_IDLE" || failure.reason == "UPLOAD_TOO_SLOW") {
      context_->metrics->IdleEnded("upload");
    }
    if (failure.reason == "DOWNLOAD_IDLE") context_->metrics->IdleEnded("download");
    End(failure);
    todo = Next();
  }
  Do(std::move(todo));
}

void RequestCall::OnTick(absl::Time now, const Coordinator& core) {
  Todo todo;
  {
    absl::MutexLock lock(&mutex_);
    if (life_.state() == CallState::kAwaitingHeader &&
        now - opened_at_ > context_->limits.header_timeout) {
      End(HeaderLate(context_->limits.header_timeout));
    }
    if (now >= judge_at_) JudgeHalfClose();
    if (life_.state() == CallState::kTransferring) LookAtTransfer(now, core);
    if (life_.state() == CallState::kEnding) CutOffIfStuck(now);
    if (!life_.over() && now >= next_progress_) SendProgress(now, core);
    todo = Next();
  }
  Do(std::move(todo));
}

// -------------------------------------------------------------------- tensors

std::shared_ptr<DataPlane> RequestCall::MakePlane(TransferSpec spec) {
  // Up to a million spans: not for the core's thread.
  spec.shards = WithSpans(*spec.accept.plan, spec.request.spec).shards;
  if (context_->make_data_plane) {
    return context_->make_data_plane(std::move(spec), shared_from_this());
  }
  return std::make_shared<CoordinatorRelay>(std::move(spec), shared_from_this(), context_->limits,
                                            context_->channels, context_->secret);
}

void RequestCall::OpenDataPlane(TransferSpec spec) {
  std::shared_ptr<DataPlane> plane = MakePlane(std::move(spec));
  std::optional<Failure> bad = plane->Open();
  CountInputs(*plane);
  {
    absl::MutexLock lock(&mutex_);
    if (life_.state() == CallState::kOpening) {
      life_.MoveTo(CallState::kTransferring);
      plane_ = std::move(plane);
      if (bad.has_value()) {
        GiveUp(*std::move(bad));
      } else if (download_.has_value()) {
        DrainSoon();
      }
      return;  // Unbusy goes on from here
    }
  }
  plane->Stop();
}

// The members have nothing to do before the client knows of them.
void RequestCall::HandOutTickets(const TransferSpec& spec, v1::Accepted accepted) {
  AddTickets(spec.accept, WithSpans(*spec.accept.plan, spec.request.spec).shards, &accepted);
  absl::MutexLock lock(&mutex_);
  if (life_.state() != CallState::kOpening) return;
  Enqueue(Wrap(direction_, std::move(accepted)), 0);
  plane_ = std::make_shared<MemberPlane>(spec);
  life_.MoveTo(CallState::kTransferring);
  if (download_.has_value()) DrainSoon();  // Unbusy goes on from here
}

// gRPC's threads put the result together, not the core's.
void RequestCall::DrainSoon() {
  soon_ = [plane = plane_] { plane->Drain(); };
}

void RequestCall::TakeChunk() {
  std::shared_ptr<DataPlane> plane;
  {
    absl::MutexLock lock(&mutex_);
    if (!life_.over()) plane = plane_;
  }
  std::optional<Failure> bad;
  if (plane != nullptr) {
    bad = plane->Feed(incoming_);
    CountInputs(*plane);
  }
  incoming_.Clear();
  Todo todo;
  {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    if (bad.has_value() && !life_.over()) GiveUp(*std::move(bad));
    todo = Next();
  }
  Do(std::move(todo));
}

void RequestCall::CountInputs(const DataPlane& plane) {
  const int64_t received = plane.totals().received_bytes;
  context_->metrics->ReceivedFromClient(received - std::exchange(counted_bytes_, received));
}

void RequestCall::OnRoom() {
  Todo todo;
  {
    absl::MutexLock lock(&mutex_);
    todo = Next();
  }
  Do(std::move(todo));
}

void RequestCall::OnOutput(grpc::ByteBuffer message, int64_t payload_bytes) {
  Todo todo;
  {
    absl::MutexLock lock(&mutex_);
    if (life_.over()) return;
    Enqueue(std::move(message), payload_bytes);
    todo = Next();
  }
  Do(std::move(todo));
}

void RequestCall::OnDrained() {
  absl::MutexLock lock(&mutex_);
  if (!life_.over()) context_->core->Post(DownloadFinished{id_});
}

void RequestCall::OnMemberFailed(int rank, const std::string& reason) {
  absl::MutexLock lock(&mutex_);
  if (!life_.over()) context_->core->Post(ShardStreamFailed{id_, rank, reason});
}

// The one place where a transfer's stalls are told: the members' and the client's to the core,
// which knows how long each may last, and an upload that is too slow.
void RequestCall::LookAtTransfer(absl::Time now, const Coordinator& core) {
  if (now - looked_at_ < context_->report_interval) return;
  looked_at_ = now;
  TransferStalls stalls = plane_->Look();
  if (stalls.known) context_->core->Post(MembersStalled{id_, std::move(stalls.members)});
  const bool client_moves = stalls.known && !stalls.client;
  if (download_.has_value()) {
    if (client_moves) context_->core->Post(DownloadProgressed{id_});
    return;
  }
  if (client_moves) context_->core->Post(UploadProgressed{id_});
  const int64_t received = plane_->totals().received_bytes;
  const bool contended = stalls.waits_for_input && core.stats().queued_requests > 0;
  meter_.Look(now, received - std::exchange(metered_bytes_, received), stalls.waits_for_input,
              contended);
  if (stalls.waits_for_input && meter_.too_slow()) GiveUp(UploadTooSlow(context_->limits));
}

void RequestCall::SendProgress(absl::Time now, const Coordinator& core) {
  next_progress_ = now + request_->reply.progress_interval;
  // A client that does not read gets no backlog of news.
  if (plane_ == nullptr || outgoing_.size() >= 4) return;
  const std::optional<OperationView> view =
      core.FindOperation(request_->request_id, caller_.principal);
  if (!view.has_value()) return;
  Enqueue(Wrap(direction_, MakeProgress(*view, plane_->totals())), 0);
}

// -------------------------------------------------------------------- endings

void RequestCall::OnCancel() {
  Todo todo;
  {
    absl::MutexLock lock(&mutex_);
    if (life_.over()) return;
    const bool late = absl::FromChrono(call_->deadline()) <= absl::Now();
    Leave(late ? DeadlinePassed() : CancelledByClient());
    todo = Next();
  }
  Do(std::move(todo));
}

void RequestCall::HalfClosed(absl::Time now) {
  half_closed_ = true;
  if (life_.over()) return;
  if (absl::FromChrono(call_->deadline()) <= now) return Leave(DeadlinePassed());
  judge_at_ = now + context_->cancel_notice;
}

void RequestCall::JudgeHalfClose() {
  judge_at_ = absl::InfiniteFuture();
  if (life_.over() || call_->IsCancelled()) return;  // OnCancel knows more
  if (life_.state() == CallState::kAwaitingHeader) {
    End(HeaderMissing());
  } else if (life_.state() == CallState::kTransferring && !plane_->complete()) {
    GiveUp(plane_->Incomplete());
  }
}

void RequestCall::Leave(Failure why) {
  if (life_.in_core()) return GiveUp(std::move(why));
  End(why);
}

void RequestCall::GiveUp(Failure why) {
  life_.MoveTo(CallState::kGivingUp);
  stops_ = plane_ != nullptr;
  why_ = std::move(why);
  context_->core->Post(RequestEnded{id_, why_});
}

void RequestCall::End(const Failure& failure) { End(ToGrpcStatus(failure, context_->limits)); }

void RequestCall::End(const grpc::Status& status) {
  life_.MoveTo(CallState::kEnding);
  ended_at_ = absl::Now();
  status_ = status;
  if (!status.ok()) {
    outgoing_.clear();  // what the client has not got yet is worth nothing to it now
    stops_ = plane_ != nullptr;
  }
  context_->metrics->RequestEnded(direction_, CodeName(status.error_code()));
  context_->callers->CountRequest(caller_, CodeName(status.error_code()));
  LogInfo("request ended", {{"request_id", RequestId()},
                            {"traceparent", traceparent_},
                            {"generation", generation_},
                            {"method", Method()},
                            {"code", CodeName(status.error_code())},
                            {"error", status.error_message()},
                            {"seconds", absl::ToDoubleSeconds(ended_at_ - opened_at_)}});
}

// The status waits behind a message that the client does not take. Of a result that is
// the summary, and the client may rest as long as before any other part of it.
// Cancelling lets go of that message and sends the status ahead, code and words without
// the details; what TryCancel sends would be CANCELLED.
void RequestCall::CutOffIfStuck(absl::Time now) {
  const Limits& limits = context_->limits;
  const absl::Duration limit =
      status_.ok() ? limits.download_idle_timeout : limits.unread_status_timeout;
  if (now - ended_at_ <= limit) return;
  life_.MoveTo(CallState::kCutOff);
  LogWarning("the client did not take the call's end",
             {{"request_id", RequestId()},
              {"traceparent", traceparent_},
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

void RequestCall::OnDone() {
  std::shared_ptr<RequestCall> self;
  std::shared_ptr<DataPlane> plane;
  StreamId id = 0;
  {
    absl::MutexLock lock(&mutex_);
    life_.MoveTo(CallState::kDone);
    Audit();
    id = id_;
    // It refers to this object and this object to it.
    plane = std::move(plane_);
    self = std::move(self_);
  }
  if (plane != nullptr) plane->Stop();
  if (id != 0) context_->registry->Remove(id);
}

void RequestCall::Audit() {
  if (context_->audit == nullptr) return;
  WriteAuditLine({caller_, Method(), request_, download_, transport_,
                  plane_ != nullptr ? plane_->totals() : TransferTotals(), generation_,
                  ended_at_ - opened_at_, download_time_, status_},
                 context_->audit);
}

const char* RequestCall::Method() const {
  return direction_ == Direction::kForward ? "Forward" : "Backward";
}

std::string RequestCall::RequestId() const {
  return request_.has_value() ? request_->request_id : std::string();
}

}  // namespace ringattn::server
