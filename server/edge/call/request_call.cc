#include "server/edge/call/request_call.h"

#include <algorithm>
#include <utility>
#include <variant>
#include <vector>

#include "common/base/monotonic_time.h"
#include "common/security/token.h"
#include "server/edge/call/call_failures.h"
#include "server/edge/call/call_header.h"
#include "server/edge/call/own_stream.h"
#include "server/edge/call/replies.h"
#include "server/edge/data/member_plane.h"
#include "server/edge/data/run_deferred.h"
#include "server/edge/header/error_details.h"

namespace ringattn::server {
namespace {

// Rejects an unauthenticated call.
class Refusal final : public ByteStreamReactor {
 public:
  explicit Refusal(const grpc::Status& status) { Finish(status); }
  void OnDone() override { delete this; }
};

}  // namespace

RequestCall::RequestCall(const RequestContext* context, ClientStream* stream, Direction direction,
                         Caller caller, CallOrigin origin)
    : context_(context),
      stream_(stream),
      direction_(direction),
      caller_(std::move(caller)),
      client_deadline_(origin.deadline),
      traceparent_(std::move(origin.traceparent)),
      is_one_of_several_(origin.is_one_of_several),
      opened_at_(MonotonicNow()),
      meter_(context->limits) {}

ByteStreamReactor* RequestCall::Start(const RequestContext* context,
                                      grpc::CallbackServerContext* call, Direction direction) {
  std::variant<Caller, grpc::Status> caller = context->callers->Identify(*call);
  if (const auto* status = std::get_if<grpc::Status>(&caller)) {
    context->metrics->RequestEnded(direction, CodeName(status->error_code()));
    return new Refusal(*status);
  }
  CallOrigin origin;
  if (call->deadline() != std::chrono::system_clock::time_point::max()) {
    origin.deadline = ToMonotonic(absl::FromChrono(call->deadline()));
  }
  origin.traceparent = TraceparentOf(call->client_metadata());
  auto* stream = new OwnStream(call);
  Serve(context, stream, direction, std::get<Caller>(std::move(caller)), std::move(origin));
  return stream;
}

void RequestCall::Serve(const RequestContext* context, ClientStream* stream, Direction direction,
                        Caller caller, CallOrigin origin) {
  const std::shared_ptr<RequestCall> self(
      new RequestCall(context, stream, direction, std::move(caller), std::move(origin)));
  self->self_ = self;
  stream->SetUser(self.get());
  const RequestRegistry::Entry entry = context->registry->Add(self, self->caller_);
  self->Begin(entry);
  if (entry.evicted != nullptr) entry.evicted->Evict();
}

void RequestCall::Begin(const RequestRegistry::Entry& entry) {
  Steps steps;
  {
    absl::MutexLock lock(&mutex_);
    id_ = entry.id;
    has_begun_ = true;
    if (entry.refused != ExhaustedLimit::kNone) {
      End(LimitReached(entry.refused, context_->limits, context_->retry_after));
    }
    steps = Next();
  }
  Do(std::move(steps));
}

// ------------------------------------------------------------ work without the lock

RequestCall::Steps RequestCall::Next() {
  Steps steps;
  if (!has_begun_) return steps;
  if (std::exchange(stops_, false)) steps.stop = plane_;
  if (deferred_) {
    steps.deferred = std::exchange(deferred_, nullptr);
    ++busy_;
  }
  const bool takes = life_.state() == CallState::kAwaitingHeader ||
                     (life_.state() == CallState::kTransferring && plane_->HasRoom());
  steps.read = takes && read_phase_ == ReadPhase::kIdle;
  if (steps.read) read_phase_ = ReadPhase::kReading;
  const bool ends = life_.state() == CallState::kEnding || life_.state() == CallState::kCutOff;
  if (!writing_ && !outgoing_.empty()) {
    steps.write = writing_ = true;
    in_flight_ = std::move(outgoing_.front());
    outgoing_.pop_front();
    // The first message carries the initial metadata, whose write ends only once it is flushed.
    steps.more_follows = is_small_ && !outgoing_.empty() && has_written_;
    has_written_ = true;
    if (is_small_ && outgoing_.empty() && ends && busy_ == 0 && status_.ok()) {
      life_.MoveTo(CallState::kFinished);
      steps.finish = status_;
      return steps;
    }
  } else if (!writing_ && ends && busy_ == 0) {
    life_.MoveTo(CallState::kFinished);
    steps.finish = status_;
  }
  if (steps.read || steps.write) ++busy_;
  return steps;
}

void RequestCall::Do(Steps steps) {
  if (steps.stop != nullptr) steps.stop->Stop();
  if (steps.deferred) {
    RunDeferred([self = shared_from_this(), work = std::move(steps.deferred)] {
      work();
      self->Unbusy();
    });
  }
  if (steps.read) stream_->Read(&incoming_);
  if (steps.write && steps.finish.has_value()) {
    // OnWriteDone does not follow.
    if (in_flight_.payload_bytes > 0) context_->metrics->SentToClient(in_flight_.payload_bytes);
    return stream_->WriteAndFinish(&in_flight_.message.get(), *steps.finish);
  }
  if (steps.write) stream_->Write(&in_flight_.message.get(), steps.more_follows);
  if (steps.finish.has_value()) return stream_->Finish(*steps.finish);
  if (steps.read || steps.write) Unbusy();
}

void RequestCall::Unbusy() {
  Steps steps;
  {
    absl::MutexLock lock(&mutex_);
    --busy_;
    steps = Next();
  }
  Do(std::move(steps));
}

void RequestCall::Enqueue(wire::MessageBuffer message, int64_t payload_bytes) {
  outgoing_.push_back({std::move(message), payload_bytes});
}

void RequestCall::OnWriteDone(bool ok) {
  const int64_t written = std::exchange(in_flight_, {}).payload_bytes;
  if (ok) context_->metrics->SentToClient(written);
  std::shared_ptr<DataPlane> plane;
  Steps steps;
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) outgoing_.clear();  // the call is broken; OnCancel follows
    // The summary is the last message.
    const bool summary_sent = ok && life_.state() == CallState::kEnding && status_.ok();
    if (summary_sent && outgoing_.empty()) undelivered_residual_.clear();
    if (ok && written > 0 && !life_.over()) plane = plane_;
    steps = Next();
  }
  Do(std::move(steps));
  if (plane != nullptr) plane->Delivered(written);
}

// ----------------------------------------------------------------- the header

void RequestCall::OnReadDone(bool ok) {
  void (RequestCall::*take)() = nullptr;
  Steps steps;
  {
    absl::MutexLock lock(&mutex_);
    if (ok && life_.state() == CallState::kAwaitingHeader) {
      life_.MoveTo(CallState::kCheckingHeader);
      take = &RequestCall::TakeHeader;
    } else if (ok && !life_.over()) {
      take = &RequestCall::TakeChunk;
    } else {
      read_phase_ = ReadPhase::kIdle;
      if (!ok) HalfClosed(MonotonicNow());
      steps = Next();
    }
  }
  if (take == nullptr) return Do(std::move(steps));
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

// The core's thread only looks up the residual.
void RequestCall::LookUpResidual(ResidualHeader header) {
  auto shared = std::make_shared<ResidualHeader>(std::move(header));
  const bool asked =
      context_->core->Ask([self = shared_from_this(), shared](const Coordinator& core) {
        ResidualView view =
            core.FindResidual(shared->handle(), self->caller_.principal, shared->request_id());
        RunDeferred([self, shared, view = std::move(view)] {
          self->TakeRequest(CompleteHeader(std::move(*shared), view, self->context_->limits));
          self->context_->core->HandleQueued();
        });
      });
  if (!asked) TakeRequest(ToGrpcStatus(CoreBusy(context_->retry_after), context_->limits));
}

void RequestCall::TakeRequest(std::variant<HeaderRequest, grpc::Status> header) {
  Steps steps;
  std::optional<WriterHeader> joins;
  {
    absl::MutexLock lock(&mutex_);
    read_phase_ = ReadPhase::kIdle;
    if (life_.over()) {
      // The call ended while its header was checked.
    } else if (const auto* status = std::get_if<grpc::Status>(&header)) {
      End(*status);
    } else {
      request_ = std::get<HeaderRequest>(std::move(header));
      LogArrival(*request_, traceparent_);
      const ExhaustedLimit full = context_->registry->HeaderCame(id_);
      if (full != ExhaustedLimit::kNone) {
        End(LimitReached(full, context_->limits, context_->retry_after));
      } else if (request_->valid.transport.writer.has_value()) {
        joins = Gather();
      } else {
        Announce(request_->valid.transport);
      }
    }
    steps = Next();
  }
  CoreLoop& core = *context_->core;
  const bool is_one_of_several = is_one_of_several_;
  Do(std::move(steps));  // may be the call's end
  if (!joins.has_value()) {
    if (!is_one_of_several) core.HandleQueued();
    return;
  }
  context_->writers->Join(shared_from_this(), *std::move(joins));
  {
    // If the call ended before it joined, its group has not learned of it.
    absl::MutexLock lock(&mutex_);
    if (life_.over()) LeaveGroup("its stream ended");
    steps = Next();
  }
  Do(std::move(steps));
}

void RequestCall::Announce(TransportChoice transport) {
  const absl::Time now = MonotonicNow();
  const HeaderRequest& request = *request_;
  RequestArrived arrived;
  arrived.stream = id_;
  arrived.request_id = request.request_id;
  arrived.fingerprint = request.fingerprint;
  arrived.recipe_fingerprint = request.recipe_fingerprint;
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
  arrived.prepare_ttl = request.valid.prepare_ttl;
  arrived.residual = request.valid.residual_handle;
  arrived.keep_residual = request.valid.keep_residual;
  arrived.transport = std::move(transport);
  if (request.has_all_inputs()) arrived.inline_inputs = request.inline_tensors;
  const std::vector<TransportKind>& accept = arrived.transport.accept;
  if (std::find(accept.begin(), accept.end(), TransportKind::kDirectStream) != accept.end()) {
    arrived.token_seed = RandomToken();
  }
  if (!context_->core->TryPost(std::move(arrived))) {
    return End(LimitReached(ExhaustedLimit::kServer, context_->limits, context_->retry_after));
  }
  life_.MoveTo(CallState::kQueued);
}

absl::Time RequestCall::Deadline(absl::Time now) const {
  if (client_deadline_ == absl::InfiniteFuture()) return now + context_->limits.default_deadline;
  return std::min(client_deadline_, now + context_->limits.max_deadline);
}

TransferTotals RequestCall::Totals() {
  absl::MutexLock lock(&mutex_);
  return plane_ == nullptr ? TransferTotals() : plane_->totals();
}

void RequestCall::Evict() {
  Steps steps;
  {
    absl::MutexLock lock(&mutex_);
    if (life_.state() != CallState::kAwaitingHeader) return;
    End(Evicted(context_->limits, context_->retry_after));
    steps = Next();
  }
  Do(std::move(steps));
}

// ------------------------------------------------------------- from the core

void RequestCall::Accept(const AcceptRequest& accept) {
  AcceptOwn(accept);
  for (const auto& follower : Followers()) follower->AcceptOwn(accept);
}

void RequestCall::Download(BeginDownload begin) {
  for (const auto& follower : Followers()) follower->DownloadOwn(begin);
  DownloadOwn(std::move(begin));
}

void RequestCall::Advance(const TransferAdvanced& advanced) {
  AdvanceOwn(advanced);
  for (const auto& follower : Followers()) follower->AdvanceOwn(advanced);
}

void RequestCall::Succeed(const FinishRequest& finish) {
  const std::vector<std::shared_ptr<RequestCall>> followers = Followers();
  if (!SucceedOwn(finish)) return;
  for (const auto& follower : followers) (void)follower->SucceedOwn(finish);
}

void RequestCall::AcceptOwn(const AcceptRequest& accept) {
  Steps steps;
  {
    absl::MutexLock lock(&mutex_);
    if (life_.state() != CallState::kQueued) return;
    life_.MoveTo(CallState::kOpening);
    flops_ = accept.plan->flops;
    generation_ = accept.generation;
    members_ = accept.members.size();
    transport_ = accept.transport;
    transport_reason_ = accept.transport_reason;
    if (!follows() && !only_prepares()) context_->metrics->Accepted(transport_);
    v1::Accepted accepted = MakeAccepted(*request_, accept, traceparent_, context_->limits);
    if (accept.is_inline) {
      OpenInline(*accept.plan, std::move(accepted));
      return;  // Succeed sends everything
    }
    TransferSpec spec{
        direction_,
        request_->valid,
        request_->reply,
        std::exchange(request_->inline_tensors, std::make_shared<const InlineTensors>()),
        accept,
        ShardPlan(),
        traceparent_};
    if (transport_ == v1::TRANSPORT_DIRECT) {
      // Before the tickets leave: the request may end before this call has its own, because all
      // writers have the same tokens.
      plane_ = std::make_shared<MemberPlane>(request_->valid, transport_);
      deferred_ = [this, spec = std::move(spec), accepted = std::move(accepted)]() mutable {
        HandOutTickets(spec, std::move(accepted));
      };
    } else if (transport_ == v1::TRANSPORT_HOST_MEMORY || transport_ == v1::TRANSPORT_CUDA_MEMORY) {
      // Immediate: nothing has to be opened, and the members may have finished before another
      // thread ran.
      Enqueue(Wrap(direction_, std::move(accepted)), 0);
      plane_ = std::make_shared<MemberPlane>(request_->valid, transport_);
      life_.MoveTo(CallState::kTransferring);
    } else {
      Enqueue(Wrap(direction_, std::move(accepted)), 0);
      deferred_ = [this, spec = std::move(spec)]() mutable { OpenDataPlane(std::move(spec)); };
    }
    steps = Next();
  }
  Do(std::move(steps));
}

void RequestCall::DownloadOwn(BeginDownload begin) {
  Steps steps;
  {
    absl::MutexLock lock(&mutex_);
    if (life_.over()) return;
    download_ = std::move(begin);
    if (inline_plane_ != nullptr) return EnqueueOutputs();
    if (is_small_) return;  // its outputs are in the client's memory, and Succeed follows
    if (life_.state() == CallState::kTransferring) DrainDeferred();
    steps = Next();
  }
  Do(std::move(steps));
}

void RequestCall::AdvanceOwn(const TransferAdvanced& advanced) {
  std::shared_ptr<DataPlane> plane;
  {
    absl::MutexLock lock(&mutex_);
    plane = plane_;
  }
  if (plane != nullptr) plane->Advanced(advanced);
}

bool RequestCall::SucceedOwn(const FinishRequest& finish) {
  Steps steps;
  bool succeeded = false;
  {
    absl::MutexLock lock(&mutex_);
    if (!life_.in_core()) return false;
    if (!follows()) undelivered_residual_ = finish.residual_handle;
    if (life_.state() == CallState::kGivingUp) {
      // A call that gave up at the same moment receives no other answer from the core.
      End(why_);
    } else {
      succeeded = true;
      plane_->Succeeded();
      Enqueue(Wrap(direction_, MakeSummary(*download_, finish, flops_, plane_->totals())), 0);
      if (is_single_ && !has_written_) JoinMessages();
      download_time_ = finish.download_time;
      if (!follows()) CountSuccess(finish);
      End(grpc::Status::OK);
    }
    steps = Next();
  }
  Do(std::move(steps));
  return succeeded;
}

void RequestCall::CountSuccess(const FinishRequest& finish) {
  ServerMetrics& metrics = *context_->metrics;
  if (finish.prepared.has_value()) {
    metrics.StageTook("queue", download_->queue_time);
    const bool found_all = finish.prepared->found == static_cast<int>(members_);
    return metrics.Prepared(direction_, found_all);
  }
  if (transport_ != v1::TRANSPORT_RELAY) metrics.MovedByMembers(transport_, plane_->totals());
  metrics.StageTook("queue", download_->queue_time);
  metrics.StageTook("upload", download_->upload_time);
  metrics.StageTook("compute", download_->compute_time);
  metrics.StageTook("download", finish.download_time);
  const AttentionShape& shape = request_->valid.spec.shape;
  metrics.Served(direction_, shape.batch * shape.seq_len_q);
}

void RequestCall::Fail(const Failure& failure) {
  Steps steps;
  {
    absl::MutexLock lock(&mutex_);
    if (!life_.in_core() && !waits_for_writers()) return;
    if (failure.reason == "UPLOAD_IDLE" || failure.reason == "UPLOAD_TOO_SLOW") {
      context_->metrics->IdleEnded("upload");
    }
    if (failure.reason == "DOWNLOAD_IDLE") context_->metrics->IdleEnded("download");
    End(failure);
    steps = Next();
  }
  Do(std::move(steps));
}

void RequestCall::OnTick(absl::Time now, const Coordinator& core) {
  Steps steps;
  {
    absl::MutexLock lock(&mutex_);
    if (life_.state() == CallState::kAwaitingHeader &&
        now - opened_at_ > context_->limits.header_timeout) {
      End(HeaderLate(context_->limits.header_timeout));
    }
    if (now >= half_close_check_at_) CheckHalfClose();
    if (life_.state() == CallState::kTransferring && !follows()) LookAtTransfer(now, core);
    if (life_.state() == CallState::kEnding) CutOffIfStuck(now);
    if (life_.state() == CallState::kFinished) CancelIfStuck(now);
    if (!life_.over() && now >= next_progress_) SendProgress(now, core);
    steps = Next();
  }
  Do(std::move(steps));
}

}  // namespace ringattn::server
