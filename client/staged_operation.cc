#include "client/staged_operation.h"

#include <chrono>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "client/error.h"

namespace ringattn::client {
namespace {

using Clock = std::chrono::steady_clock;

// Kept alive by the work that is to come: a copy's end, the call's `done`.
class StagedCall final : public Operation::State, public std::enable_shared_from_this<StagedCall> {
 public:
  explicit StagedCall(StagedParams params) : params_(std::move(params)) {}

  const std::string& request_id() const override { return request_id_; }

  void Start() {
    params_.copies->Add([self = shared_from_this()] { self->TakeRegion(); });
  }

  CallResult Wait() override ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::MutexLock lock(&mutex_, absl::Condition(this, &StagedCall::HasEnded));
    return *result_;
  }

  void Cancel() override ABSL_LOCKS_EXCLUDED(mutex_) {
    std::optional<Operation> call;
    {
      const absl::MutexLock lock(&mutex_);
      cancelled_ = true;
      call = call_;
    }
    if (call) call->Cancel();
  }

 private:
  bool HasEnded() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return result_.has_value(); }

  bool IsCancelled() const ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::MutexLock lock(&mutex_);
    return cancelled_;
  }

  absl::Duration TimeLeft() const {
    return params_.deadline - absl::FromChrono(Clock::now() - began_);
  }

  // Cancelled or too late.
  std::optional<absl::Status> Stopped() const {
    if (IsCancelled()) return absl::CancelledError("cancelled by the caller");
    if (TimeLeft() <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError("the deadline passed while tensors were copied");
    }
    return std::nullopt;
  }

  // --- One after another, each on a thread of copies or of the call's `done`.

  void TakeRegion() {
    region_ = std::move(params_.region);
    if (const auto stopped = Stopped()) return End(*stopped);
    if (region_ == nullptr) {
      auto region = params_.pool->Take(static_cast<int64_t>(params_.plan.region_bytes));
      if (!region.ok()) return Call(nullptr, std::string(region.status().message()));
      region_ = *std::move(region);
    }
    std::vector<CopyPool::Piece> pieces;
    for (const StagingPlan::Tensor& input : params_.plan.inputs) {
      pieces.push_back({region_->data() + input.offset, input.data, input.bytes});
    }
    params_.copies->Copy(
        pieces, [self = shared_from_this()] { return !self->IsCancelled(); },
        [self = shared_from_this()] { self->Call(self->region_->data(), ""); });
  }

  void Call(uint8_t* base, const std::string& why_not) ABSL_LOCKS_EXCLUDED(mutex_) {
    if (const auto stopped = Stopped()) return End(*stopped);
    staging_seconds_ = SecondsSince(began_);
    // The end, which may come at once, clears params_.
    const auto start = std::move(params_.start);
    const Operation call =
        start(base, why_not, TimeLeft(),
              [self = shared_from_this()](const CallResult& result) { self->OnCalled(result); });
    bool cancelled = false;
    {
      const absl::MutexLock lock(&mutex_);
      // Has it ended already, keeping it would keep what its end let go of.
      if (!result_.has_value()) call_ = call;
      cancelled = cancelled_;
    }
    if (cancelled) call.Cancel();
  }

  // What follows may block, which gRPC's threads must not.
  void OnCalled(const CallResult& result) {
    auto self = shared_from_this();
    if (!result.ok() || region_ == nullptr) {
      return params_.copies->Add([self, result] { self->End(result); });
    }
    std::vector<CopyPool::Piece> pieces;
    for (const StagingPlan::Tensor& output : params_.plan.outputs) {
      pieces.push_back({output.data, region_->data() + output.offset, output.bytes});
    }
    params_.copies->Copy(
        pieces, [] { return true; }, [self, result] { self->End(self->Staged(*result)); });
  }

  CallReport Staged(CallReport report) const {
    if (report.accepted.transport() == v1::TRANSPORT_HOST_MEMORY) {
      absl::StrAppend(&report.transport_reason,
                      "; staged: tensors lay in no region and were copied into and out of one");
    }
    report.staged_bytes = params_.plan.copied_bytes;
    ClientTimes& times = report.times;
    times.began = began_;
    times.accepted_seconds += staging_seconds_;
    times.uploaded_seconds += staging_seconds_;
    if (times.first_output_seconds > 0) times.first_output_seconds += staging_seconds_;
    times.finished_seconds = SecondsSince(began_);
    return report;
  }

  void End(CallResult result) ABSL_LOCKS_EXCLUDED(mutex_) {
    if (region_ != nullptr) {
      // A status of the service comes when nobody writes any more. After any other a frozen
      // worker may still have a piece to finish, if the call was made at all.
      const bool made = staging_seconds_ > 0;
      const bool reusable = !made || result.ok() || !DetailsOf(result.status()).reason.empty();
      params_.pool->GiveBack(std::move(region_), reusable);
    }
    if (params_.done) params_.done(result);
    const std::shared_ptr<CallRegistry> registry = std::move(params_.registry);
    params_ = {};
    std::optional<Operation> call;  // let go of without the lock
    {
      const absl::MutexLock lock(&mutex_);
      call.swap(call_);
      result_ = std::move(result);
    }
    call.reset();
    registry->Remove(this);  // last: the client may be gone from here on
  }

  static double SecondsSince(Clock::time_point moment) {
    return std::chrono::duration<double>(Clock::now() - moment).count();
  }

  StagedParams params_;
  const std::string request_id_ = params_.request_id;
  const Clock::time_point began_ = Clock::now();
  std::shared_ptr<SharedRegion> region_;
  double staging_seconds_ = 0;

  mutable absl::Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<Operation> call_ ABSL_GUARDED_BY(mutex_);
  std::optional<CallResult> result_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

Operation StartStagedOperation(StagedParams params) {
  const std::shared_ptr<CallRegistry> registry = params.registry;
  auto state = std::make_shared<StagedCall>(std::move(params));
  registry->Add(state.get(), [weak = std::weak_ptr<StagedCall>(state)] {
    if (const auto alive = weak.lock()) alive->Cancel();
  });
  state->Start();
  return Operation(state);
}

}  // namespace ringattn::client
