// RequestCall: the endings of a call.
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"
#include "common/observability/log.h"
#include "server/edge/call/call_audit.h"
#include "server/edge/call/call_failures.h"
#include "server/edge/call/request_call.h"
#include "server/edge/data/run_deferred.h"
#include "server/edge/header/error_details.h"

namespace ringattn::server {

void RequestCall::OnCancel() {
  Steps steps;
  {
    absl::MutexLock lock(&mutex_);
    if (life_.over()) return;
    const bool late = client_deadline_ <= MonotonicNow();
    Leave(late ? DeadlinePassed() : CancelledByClient());
    steps = Next();
  }
  Do(std::move(steps));
}

void RequestCall::HalfClosed(absl::Time now) {
  read_phase_ = ReadPhase::kHalfClosed;
  if (life_.over()) return;
  if (client_deadline_ <= now) return Leave(DeadlinePassed());
  half_close_check_at_ = now + context_->cancel_notice;
}

void RequestCall::CheckHalfClose() {
  half_close_check_at_ = absl::InfiniteFuture();
  if (life_.over() || stream_->IsCancelled()) return;  // OnCancel reports the cause
  if (life_.state() == CallState::kAwaitingHeader) {
    End(HeaderMissing());
  } else if (life_.state() == CallState::kTransferring && !plane_->complete()) {
    GiveUp(plane_->Incomplete());
  }
}

void RequestCall::Leave(Failure why) {
  if (life_.in_core()) return GiveUp(std::move(why));
  if (waits_for_writers()) LeaveGroup(why.message);
  End(why);
}

void RequestCall::GiveUp(Failure why) {
  life_.MoveTo(CallState::kGivingUp);
  stops_ = plane_ != nullptr;
  why_ = std::move(why);
  if (!follows()) return context_->core->Post(RequestEnded{id_, why_});
  // The core does not know this call. Its lead ends the request.
  RunDeferred([lead = lead_, index = writer_index(), text = why_.message] {
    lead->LoseWriter(index, text);
  });
}

void RequestCall::End(const Failure& failure) { End(ToGrpcStatus(failure, context_->limits)); }

void RequestCall::End(const grpc::Status& status) {
  const bool left_itself = life_.state() == CallState::kGivingUp && !lost_writer_;
  life_.MoveTo(CallState::kEnding);
  EndFollowers(status, left_itself);
  ended_at_ = MonotonicNow();
  status_ = status;
  if (!status.ok()) {
    outgoing_.clear();  // undelivered messages have no value after a failure
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

// The status waits while the client does not take the last message. After a result, that message is
// the summary, and the client may wait for as long as before any other chunk. Cancelling discards
// the message and sends the status immediately.
void RequestCall::CutOffIfStuck(absl::Time now) {
  const Limits& limits = context_->limits;
  const absl::Duration limit =
      status_.ok() ? limits.download_idle_timeout : limits.unread_status_timeout;
  if (now - ended_at_ <= limit) return;
  life_.MoveTo(CallState::kCutOff);
  LogWarning("the client did not read the call's status",
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
  stream_->CutOff(status_);
}

void RequestCall::CancelIfStuck(absl::Time now) {
  if (cancelled_unread_ || now - ended_at_ <= context_->limits.download_idle_timeout) return;
  cancelled_unread_ = true;
  LogWarning("the client did not read the call's result",
             {{"request_id", RequestId()}, {"traceparent", traceparent_}});
  context_->metrics->IdleEnded("download");
  stream_->TryCancel();
}

void RequestCall::OnDone() {
  std::shared_ptr<RequestCall> self;
  std::shared_ptr<DataPlane> plane;
  StreamId id = 0;
  std::string undelivered_residual;
  {
    absl::MutexLock lock(&mutex_);
    life_.MoveTo(CallState::kDone);
    undelivered_residual = std::move(undelivered_residual_);
    Audit();
    id = id_;
    // The plane and this object refer to each other.
    plane = std::move(plane_);
    self = std::move(self_);
    lead_.reset();
    followers_.clear();
  }
  if (plane != nullptr) plane->Stop();
  // The client does not have the handle, so the residual would count against its quota until it
  // expires.
  if (!undelivered_residual.empty()) {
    context_->core->Post(ResidualDeleted{std::move(undelivered_residual), caller_.principal});
  }
  if (id != 0) context_->registry->Remove(id);
}

void RequestCall::Audit() {
  if (context_->audit == nullptr) return;
  WriteAuditLine({caller_, Method(), request_, download_, transport_, transport_reason_,
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
