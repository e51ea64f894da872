#include "client/call/operation.h"

#include <chrono>
#include <optional>
#include <random>
#include <utility>

#include <grpcpp/alarm.h>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/api/error.h"

namespace ringattn::client {
namespace {

std::chrono::system_clock::time_point SystemDeadline(absl::Time deadline) {
  // gRPC's clock does not hold absl's infinite future.
  if (deadline == absl::InfiniteFuture()) return std::chrono::system_clock::time_point::max();
  return absl::ToChronoTime(deadline);
}

// One request. Between attempts an alarm keeps it alive, during one its `done` does.
class Request final : public Operation::State, public std::enable_shared_from_this<Request> {
 public:
  explicit Request(OperationParams params)
      : params_(std::move(params)), start_(absl::Now()), deadline_(start_ + params_.deadline) {}

  const std::string& request_id() const override { return request_id_; }

  void StartNextAttempt() ABSL_LOCKS_EXCLUDED(mutex_) {
    std::shared_ptr<Attempt> attempt;
    {
      const absl::MutexLock lock(&mutex_);
      pause_.reset();
      if (!cancelled_) {
        attempt_ = MakeAttempt(params_.channel, params_.workers, params_.plan, params_.token,
                               SystemDeadline(deadline_), Terms(),
                               [self = shared_from_this()](AttemptResult result) {
                                 self->OnAttemptDone(std::move(result));
                               });
        attempt = attempt_;
      }
    }
    if (attempt == nullptr) return End(absl::CancelledError("cancelled by the caller"));
    attempt->Start();
  }

  void End(CallResult result) ABSL_LOCKS_EXCLUDED(mutex_) {
    if (params_.done) params_.done(result);
    params_.done = nullptr;
    // Before anyone can know of the end, who may then drop the client: the channel's
    // last reference has to be the client's (see attempt.cc).
    params_.channel.reset();
    params_.workers.reset();
    params_.plan.reset();
    params_.fallback.reset();
    params_.token.reset();
    const std::shared_ptr<CallRegistry> registry = std::move(params_.registry);
    {
      const absl::MutexLock lock(&mutex_);
      attempt_.reset();
      result_ = std::move(result);
    }
    if (registry != nullptr) registry->Remove(this);
  }

  CallResult Wait() override ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::MutexLock lock(&mutex_, absl::Condition(this, &Request::HasEnded));
    return *result_;
  }

  void Cancel() override ABSL_LOCKS_EXCLUDED(mutex_) {
    std::shared_ptr<Attempt> attempt;
    {
      const absl::MutexLock lock(&mutex_);
      cancelled_ = true;
      attempt = attempt_;
      if (pause_) pause_->Cancel();  // its callback goes on, and sees cancelled_
    }
    if (attempt != nullptr) attempt->Cancel();
  }

 private:
  // What another call found out a moment ago holds for this one too, unless it has no other way.
  AttemptTerms Terms() const {
    AttemptTerms terms{.offers_host = !host_withdrawn_, .no_direct = no_direct_};
    if (terms.no_direct.empty() && params_.workers != nullptr && !params_.plan->direct_required) {
      terms.no_direct = params_.workers->WhyNot();
    }
    return terms;
  }

  bool HasEnded() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return result_.has_value(); }

  void OnAttemptDone(AttemptResult result) ABSL_LOCKS_EXCLUDED(mutex_) {
    server_ever_answered_ |= result.server_answered;
    if (result.status.ok()) {
      result.report.summary.set_attempts(replays_ + 1);
      result.report.residual_failure = residual_failure_;
      return End(std::move(result.report));
    }
    result.status = WhatHappened(result.status);
    if (params_.fallback != nullptr && IsResidualGone(result.status)) {
      // A residual saves bytes; the call does not depend on it.
      residual_failure_ = DetailsOf(result.status).reason;
      params_.plan = std::move(params_.fallback);
      ++replays_;
      return StartNextAttempt();
    }
    // The coordinator is another one: the regions get new names, and this call need not wait.
    if (result.region_unknown && !host_withdrawn_ && !params_.plan->host_required) {
      host_withdrawn_ = true;
      return StartNextAttempt();
    }
    // A worker is out of reach from here: by the coordinator it is not.
    if (!result.no_direct.empty() && no_direct_.empty()) {
      if (params_.plan->direct_required) return End(TransportUnavailable(result.no_direct));
      no_direct_ = result.no_direct;
      params_.workers->NoteUnreachable(no_direct_);
      return StartNextAttempt();
    }
    // A worker has just joined, or the coordinator is another one.
    if (!result.lacked_at.empty() && replays_ < params_.retry.max_replays) {
      return ShowRegions(result);
    }
    const absl::Time now = absl::Now();
    const FailedAttempt failed{.status = result.status,
                               .replays_so_far = replays_,
                               .server_ever_answered = server_ever_answered_,
                               .elapsed = now - start_,
                               .time_left = deadline_ - now};
    const std::optional<absl::Duration> delay =
        ReplayDelay(params_.retry, failed, std::uniform_real_distribution<>(0.0, 1.0)(random_));
    if (!delay) return End(WithHistory(result.status));
    ++replays_;
    const absl::MutexLock lock(&mutex_);
    attempt_.reset();
    pause_ = std::make_unique<grpc::Alarm>();
    pause_->Set(absl::ToChronoTime(now + *delay),
                [self = shared_from_this()](bool) { self->StartNextAttempt(); });
    if (cancelled_) pause_->Cancel();
  }

  // The call has no other way than its regions: a worker that lacks one is shown it first. Rounds
  // with the workers are bounded, and the call's deadline is the wait's.
  void ShowRegions(const AttemptResult& refused) ABSL_LOCKS_EXCLUDED(mutex_) {
    refusal_ = refused.status;
    // The caller, or the deadline, may end the call from here on.
    const std::shared_ptr<const HostTensorLocations> places = params_.plan->host;
    {
      const absl::MutexLock lock(&mutex_);
      attempt_.reset();
      taken_ = false;
      pause_ = std::make_unique<grpc::Alarm>();
      pause_->Set(SystemDeadline(deadline_),
                  [self = shared_from_this()](bool) { self->OnRegionsShown(); });
      if (cancelled_) pause_->Cancel();
    }
    // The alarm goes off sooner: what comes next may let go of regions, whose thread this is not.
    places->ShowAgain(refused.lacked_at, [weak = weak_from_this()](bool taken) {
      const auto self = weak.lock();
      if (self == nullptr) return;
      const absl::MutexLock lock(&self->mutex_);
      self->taken_ = taken;
      if (self->pause_) self->pause_->Cancel();
    });
  }

  void OnRegionsShown() ABSL_LOCKS_EXCLUDED(mutex_) {
    bool goes_on = false;
    {
      const absl::MutexLock lock(&mutex_);
      pause_.reset();
      goes_on = taken_ || cancelled_;
    }
    if (!goes_on) return End(WithHistory(refusal_));
    ++replays_;
    StartNextAttempt();
  }

  // A server that shuts down leaves calls that it has not begun to gRPC, which ends them with
  // CANCELLED; what the service itself cancels says so with a reason.
  absl::Status WhatHappened(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::MutexLock lock(&mutex_);
    if (cancelled_ || !absl::IsCancelled(status) || !DetailsOf(status).reason.empty()) {
      return status;
    }
    return absl::UnavailableError("the server went away before it took the call");
  }

  // The last failure, saying how often it was tried; code and details unchanged.
  absl::Status WithHistory(const absl::Status& status) const {
    if (replays_ == 0) return status;
    return WithMessage(status, absl::StrCat(status.message(), " (after ", replays_, " replays)"));
  }

  // After construction changed by End only, which comes last.
  OperationParams params_;
  const std::string request_id_ = params_.request_id;
  const absl::Time start_;
  const absl::Time deadline_;

  // Used between attempts only, one thread at a time.
  int replays_ = 0;
  std::string residual_failure_;
  bool server_ever_answered_ = false;
  bool host_withdrawn_ = false;  // by the coordinator from now on
  absl::Status refusal_;         // the last for want of a region
  std::string no_direct_;        // not empty: nor straight to the workers, for this reason
  std::minstd_rand random_{std::random_device()()};

  absl::Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<Attempt> attempt_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<grpc::Alarm> pause_ ABSL_GUARDED_BY(mutex_);
  bool taken_ ABSL_GUARDED_BY(mutex_) = false;  // a worker has taken a region since refusal_
  std::optional<CallResult> result_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

Operation StartOperation(OperationParams params) {
  const std::shared_ptr<CallRegistry> registry = params.registry;
  auto state = std::make_shared<Request>(std::move(params));
  registry->Add(state.get(), [weak = std::weak_ptr<Request>(state)] {
    if (const auto alive = weak.lock()) alive->Cancel();
  });
  state->StartNextAttempt();
  return Operation(state);
}

Operation FailedOperation(const std::string& request_id, const absl::Status& error,
                          const std::function<void(const CallResult&)>& done) {
  auto state = std::make_shared<Request>(OperationParams{.request_id = request_id, .done = done});
  state->End(error);
  return Operation(state);
}

}  // namespace ringattn::client
