#include "client/call/replayed_call.h"

#include <chrono>
#include <optional>
#include <random>
#include <utility>

#include <grpcpp/alarm.h>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/api/error.h"
#include "client/call/retry_policy.h"
#include "common/base/monotonic_time.h"

namespace ringattn::client {
namespace {

// Converts a deadline on the monotonic clock to the wall time that gRPC expects.
std::chrono::system_clock::time_point SystemDeadline(absl::Time deadline) {
  // gRPC's clock cannot represent absl's infinite future.
  if (deadline == absl::InfiniteFuture()) return std::chrono::system_clock::time_point::max();
  return absl::ToChronoTime(absl::Now() + (deadline - MonotonicNow()));
}

// One call. An alarm keeps it alive between attempts, and the attempt's `done` during one.
class Request final : public PendingCall::State, public std::enable_shared_from_this<Request> {
 public:
  explicit Request(ReplayedCallParams params)
      : params_(std::move(params)), start_(MonotonicNow()), deadline_(start_ + params_.deadline) {}

  const std::string& request_id() const override { return request_id_; }

  void StartNextAttempt() ABSL_LOCKS_EXCLUDED(mutex_) {
    attempt_start_ = MonotonicNow();
    std::shared_ptr<Attempt> attempt;
    {
      const absl::MutexLock lock(&mutex_);
      pause_.reset();
      if (!cancelled_) {
        attempt_ = MakeAttempt(params_.channels, params_.plan, SystemDeadline(deadline_), Terms(),
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
    // Release these before anyone can learn of the end and destroy the client. The last reference
    // to the channel must be the client's (see attempt.cc).
    params_.channels = {};
    params_.plan.reset();
    params_.fallback.reset();
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
      if (pause_) pause_->Cancel();  // the callback runs and checks cancelled_
    }
    if (attempt != nullptr) attempt->Cancel();
  }

 private:
  // A worker that another call could not reach a moment ago is not tried again, unless the call
  // requires direct streams.
  AttemptTerms Terms() const {
    AttemptTerms terms{.offers_host = !host_withdrawn_, .no_direct = no_direct_};
    const HostHistory* const history = params_.channels.host_history;
    terms.host_alone = !host_alone_failed_ && !params_.plan->writer.has_value() &&
                       history != nullptr && history->RecommendsAlone();
    if (terms.no_direct.empty() && params_.channels.workers != nullptr &&
        !params_.plan->direct_required) {
      terms.no_direct = params_.channels.workers->UnreachableReason();
    }
    return terms;
  }

  bool HasEnded() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return result_.has_value(); }

  void OnAttemptDone(AttemptResult result) ABSL_LOCKS_EXCLUDED(mutex_) {
    server_ever_answered_ |= result.server_answered;
    if (result.status.ok()) {
      result.report.summary.set_attempts(replays_ + 1);
      result.report.residual_failure = residual_failure_;
      if (!last_failure_.ok()) {
        result.report.failed_seconds = absl::ToDoubleSeconds(attempt_start_ - start_);
        result.report.last_failure = last_failure_;
      }
      return End(std::move(result.report));
    }
    result.status = ExplainCancellation(result.status);
    if (result.host_alone_failed) {
      host_alone_failed_ = true;
      params_.channels.host_history->Refused();
      return StartNextAttempt();
    }
    last_failure_ = result.status;
    if (params_.fallback != nullptr && IsResidualGone(result.status)) {
      // A residual only saves transfers; the call can do without it.
      residual_failure_ = DetailsOf(result.status).reason;
      params_.plan = std::move(params_.fallback);
      ++replays_;
      return StartNextAttempt();
    }
    // The coordinator was replaced. The regions get new names in the background; this attempt does
    // not wait for them.
    if (result.region_unknown && !host_withdrawn_ && !params_.plan->host_required) {
      host_withdrawn_ = true;
      return StartNextAttempt();
    }
    // A worker is unreachable from here but reachable for the coordinator.
    if (!result.no_direct.empty() && no_direct_.empty()) {
      if (params_.plan->direct_required) return End(TransportUnavailable(result.no_direct));
      no_direct_ = result.no_direct;
      params_.channels.workers->NoteUnreachable(no_direct_);
      return StartNextAttempt();
    }
    // A worker has just joined, or the coordinator was replaced.
    if (!result.lacked_at.empty() && replays_ < params_.retry.max_replays) {
      return AttachRegions(result);
    }
    const absl::Time now = MonotonicNow();
    const FailedAttempt failed{.status = result.status,
                               .replays_so_far = replays_,
                               .server_ever_answered = server_ever_answered_,
                               .elapsed = now - start_,
                               .time_left = deadline_ - now};
    std::minstd_rand random{std::random_device()()};
    const std::optional<absl::Duration> delay =
        ReplayDelay(params_.retry, failed, std::uniform_real_distribution<>(0.0, 1.0)(random));
    if (!delay) return End(WithHistory(result.status));
    ++replays_;
    const absl::MutexLock lock(&mutex_);
    attempt_.reset();
    pause_ = std::make_unique<grpc::Alarm>();
    pause_->Set(SystemDeadline(now + *delay),
                [self = shared_from_this()](bool) { self->StartNextAttempt(); });
    if (cancelled_) pause_->Cancel();
  }

  // The call requires its regions, so the workers that lack one attach it first. Each round with
  // the workers is bounded; the call's deadline bounds the wait.
  void AttachRegions(const AttemptResult& refused) ABSL_LOCKS_EXCLUDED(mutex_) {
    refusal_ = refused.status;
    // From here on the caller or the deadline may end the call.
    const std::shared_ptr<const HostTensorLocations> places = params_.plan->host;
    {
      const absl::MutexLock lock(&mutex_);
      attempt_.reset();
      taken_ = false;
      pause_ = std::make_unique<grpc::Alarm>();
      pause_->Set(SystemDeadline(deadline_),
                  [self = shared_from_this()](bool) { self->OnRegionsAttached(); });
      if (cancelled_) pause_->Cancel();
    }
    // Continues from the alarm, because the next step may release regions and must not do so on a
    // region's own thread.
    places->Reattach(refused.lacked_at, [weak = weak_from_this()](bool taken) {
      const auto self = weak.lock();
      if (self == nullptr) return;
      const absl::MutexLock lock(&self->mutex_);
      self->taken_ = taken;
      if (self->pause_) self->pause_->Cancel();
    });
  }

  void OnRegionsAttached() ABSL_LOCKS_EXCLUDED(mutex_) {
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

  // A server that shuts down ends calls that it has not started with gRPC's CANCELLED. A
  // cancellation by the service itself has a reason.
  absl::Status ExplainCancellation(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::MutexLock lock(&mutex_);
    if (cancelled_ || !absl::IsCancelled(status) || !DetailsOf(status).reason.empty()) {
      return status;
    }
    return absl::UnavailableError("the server shut down before it started the call");
  }

  // Returns the last failure with the number of replays. Code and details are unchanged.
  absl::Status WithHistory(const absl::Status& status) const {
    if (replays_ == 0) return status;
    return WithMessage(status, absl::StrCat(status.message(), " (after ", replays_, " replays)"));
  }

  // After construction only End, which runs last, changes it.
  ReplayedCallParams params_;
  const std::string request_id_ = params_.request_id;
  const absl::Time start_;
  const absl::Time deadline_;

  // Used only between attempts, by one thread at a time.
  int replays_ = 0;
  absl::Time attempt_start_;   // of the last attempt
  absl::Status last_failure_;  // of the last attempt that failed
  std::string residual_failure_;
  bool server_ever_answered_ = false;
  bool host_withdrawn_ = false;     // offers no host memory from now on
  bool host_alone_failed_ = false;  // offers host memory with the other transports from now on
  absl::Status refusal_;            // the last rejection for lack of a region
  std::string
      no_direct_;  // the reason for not offering direct streams; empty if they may be offered

  absl::Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<Attempt> attempt_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<grpc::Alarm> pause_ ABSL_GUARDED_BY(mutex_);
  bool taken_ ABSL_GUARDED_BY(mutex_) = false;  // a worker has attached a region since refusal_
  std::optional<CallResult> result_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

PendingCall StartReplayedCall(ReplayedCallParams params) {
  const std::shared_ptr<CallRegistry> registry = params.registry;
  auto state = std::make_shared<Request>(std::move(params));
  registry->Add(state.get(), [weak = std::weak_ptr<Request>(state)] {
    if (const auto alive = weak.lock()) alive->Cancel();
  });
  state->StartNextAttempt();
  return PendingCall(state);
}

PendingCall FailedCall(const std::string& request_id, const absl::Status& error,
                       const std::function<void(const CallResult&)>& done) {
  auto state =
      std::make_shared<Request>(ReplayedCallParams{.request_id = request_id, .done = done});
  state->End(error);
  return PendingCall(state);
}

}  // namespace ringattn::client
