#include "client/call/copied_call.h"

namespace ringattn::client {

CallResult CopiedCall::Wait() {
  const absl::MutexLock lock(&mutex_, absl::Condition(this, &CopiedCall::HasEnded));
  return *result_;
}

void CopiedCall::Cancel() {
  std::optional<PendingCall> call;
  {
    const absl::MutexLock lock(&mutex_);
    cancelled_ = true;
    call = call_;
  }
  if (call) call->Cancel();
}

bool CopiedCall::IsCancelled() const {
  const absl::MutexLock lock(&mutex_);
  return cancelled_;
}

std::optional<absl::Status> CopiedCall::Stopped() const {
  if (IsCancelled()) return absl::CancelledError("cancelled by the caller");
  if (TimeLeft() <= absl::ZeroDuration()) {
    return absl::DeadlineExceededError("the deadline passed while tensors were copied");
  }
  return std::nullopt;
}

double CopiedCall::seconds() const {
  return std::chrono::duration<double>(Clock::now() - began_).count();
}

void CopiedCall::Make(const std::function<PendingCall(absl::Duration deadline)>& start) {
  int number = 0;
  {
    const absl::MutexLock lock(&mutex_);
    number = ++calls_;
  }
  const PendingCall call = start(TimeLeft());
  bool cancelled = false;
  {
    const absl::MutexLock lock(&mutex_);
    // An inner call that has already ended must not be kept, or it would keep what its end
    // released.
    if (!result_.has_value() && number == calls_) call_ = call;
    cancelled = cancelled_;
  }
  if (cancelled) call.Cancel();
}

void CopiedCall::SetTimes(double seconds_before, CallReport* report) const {
  seconds_before -= report->failed_seconds;
  ClientTimes& times = report->times;
  times.began = began_;
  times.accepted_seconds += seconds_before;
  times.uploaded_seconds += seconds_before;
  if (times.first_output_seconds > 0) times.first_output_seconds += seconds_before;
  times.finished_seconds = seconds() - report->failed_seconds;
}

void CopiedCall::Conclude(CallResult result, const std::shared_ptr<CallRegistry>& registry) {
  std::optional<PendingCall> call;  // destroyed without the lock
  {
    const absl::MutexLock lock(&mutex_);
    call.swap(call_);
    result_ = std::move(result);
  }
  call.reset();
  registry->Remove(this);
}

}  // namespace ringattn::client
