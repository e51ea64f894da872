#include "client/cuda_call.h"

#include <atomic>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/error.h"
#include "client/staging_pool.h"

namespace ringattn::client {
namespace {

using Clock = std::chrono::steady_clock;

// Whether the service turned the call down because of its way alone, before it began: it may go
// another one.
bool IsAboutTransport(const absl::Status& status) {
  const ErrorDetails details = DetailsOf(status);
  if (details.reason == "TRANSPORT_UNAVAILABLE" || details.reason == "REGION_UNKNOWN") return true;
  // A coordinator of an older version knows no CUDA memory.
  for (const FieldViolation& violation : details.violations) {
    if (absl::StartsWith(violation.field, "transport.accept")) return true;
  }
  return false;
}

class CudaCall final : public Operation::State, public std::enable_shared_from_this<CudaCall> {
 public:
  explicit CudaCall(CudaCallParams params) : params_(std::move(params)) {}

  const std::string& request_id() const override { return request_id_; }

  void Start() {
    if (!params_.why_not.empty() && !params_.required) {
      return params_.copies->Add([self = shared_from_this()] { self->CallOnCopies(); });
    }
    Call(nullptr,
         [self = shared_from_this()](const CallResult& result) { self->OnCudaCalled(result); });
  }

  CallResult Wait() override ABSL_LOCKS_EXCLUDED(mutex_) {
    const absl::MutexLock lock(&mutex_, absl::Condition(this, &CudaCall::HasEnded));
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

  absl::Duration TimeLeft() const {
    return params_.deadline - absl::FromChrono(Clock::now() - began_);
  }

  std::optional<absl::Status> Stopped() const ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      const absl::MutexLock lock(&mutex_);
      if (cancelled_) return absl::CancelledError("cancelled by the caller");
    }
    if (TimeLeft() <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError("the deadline passed while tensors were copied");
    }
    return std::nullopt;
  }

  void Call(uint8_t* host, const std::function<void(const CallResult&)>& done)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    // The end, which may come at once, clears params_.
    const auto start = params_.start;
    const int number = ++calls_;
    const Operation call = start(host, TimeLeft(), done);
    bool cancelled = false;
    {
      const absl::MutexLock lock(&mutex_);
      // Has it ended already, keeping it would keep what its end let go of.
      if (!result_.has_value() && number == calls_) call_ = call;
      cancelled = cancelled_;
    }
    if (cancelled) call.Cancel();
  }

  // Copies block, which gRPC's threads must not.
  void OnCudaCalled(const CallResult& result) {
    if (result.ok() || params_.required || !IsAboutTransport(result.status())) return End(result);
    params_.why_not = std::string(result.status().message());
    params_.copies->Add([self = shared_from_this()] { self->CallOnCopies(); });
  }

  void CallOnCopies() {
    if (const auto stopped = Stopped()) return End(*stopped);
    if (absl::Status status = CopyInputs(); !status.ok()) return End(status);
    Call(host_.get(), [self = shared_from_this()](const CallResult& result) {
      self->params_.copies->Add([self, result] { self->OnCopiesCalled(result); });
    });
  }

  absl::Status CopyInputs() {
    const auto bytes = static_cast<int64_t>(params_.plan.region_bytes);
    if (bytes > AvailableMemoryBytes()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("tensors in CUDA memory need ", bytes,
                       " bytes of host memory to take another way, more than there are"));
    }
    host_.reset(new uint8_t[bytes]);  // NOLINT: uninitialised
    for (const StagingPlan::Tensor& input : params_.plan.inputs) {
      if (const auto stopped = Stopped()) return *stopped;
      const auto region = RegionOf(input);
      if (region == nullptr) return Released();
      absl::Status status = region->cuda()->CopyToHost(host_.get() + input.offset, input.data,
                                                       static_cast<int64_t>(input.bytes));
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  void OnCopiesCalled(const CallResult& result) {
    if (!result.ok()) return End(result);
    for (const StagingPlan::Tensor& output : params_.plan.outputs) {
      const auto region = RegionOf(output);
      if (region == nullptr) return End(Released());
      absl::Status status = region->cuda()->CopyFromHost(output.data, host_.get() + output.offset,
                                                         static_cast<int64_t>(output.bytes));
      if (!status.ok()) return End(status);
    }
    CallReport report = *result;
    absl::StrAppend(&report.transport_reason, report.transport_reason.empty() ? "" : "; ",
                    "tensors in CUDA memory were copied through host memory: ", params_.why_not);
    report.staged_bytes += params_.plan.copied_bytes;
    const double before = std::chrono::duration<double>(report.times.began - began_).count();
    report.times.began = began_;
    report.times.accepted_seconds += before;
    report.times.uploaded_seconds += before;
    if (report.times.first_output_seconds > 0) report.times.first_output_seconds += before;
    report.times.finished_seconds = std::chrono::duration<double>(Clock::now() - began_).count();
    End(std::move(report));
  }

  std::shared_ptr<SharedRegion> RegionOf(const StagingPlan::Tensor& tensor) const {
    return params_.regions->Find(tensor.data, tensor.bytes);
  }

  static absl::Status Released() {
    return MakeError(absl::StatusCode::kCancelled, "the client released a region of the call", {});
  }

  void End(CallResult result) ABSL_LOCKS_EXCLUDED(mutex_) {
    if (params_.done) params_.done(result);
    const std::shared_ptr<CallRegistry> registry = std::move(params_.registry);
    params_ = {};
    host_.reset();
    std::optional<Operation> call;  // let go of without the lock
    {
      const absl::MutexLock lock(&mutex_);
      call.swap(call_);
      result_ = std::move(result);
    }
    call.reset();
    registry->Remove(this);  // last: the client may be gone from here on
  }

  CudaCallParams params_;  // one thread's at a time
  const std::string request_id_ = params_.request_id;
  const Clock::time_point began_ = Clock::now();
  std::unique_ptr<uint8_t[]> host_;
  std::atomic<int> calls_{0};

  mutable absl::Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<Operation> call_ ABSL_GUARDED_BY(mutex_);
  std::optional<CallResult> result_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::string WhyNotAttached(const StagingPlan& plan, const RegionIndex& regions) {
  for (const std::vector<StagingPlan::Tensor>* tensors : {&plan.inputs, &plan.outputs}) {
    for (const StagingPlan::Tensor& tensor : *tensors) {
      const auto region = regions.Find(tensor.data, tensor.bytes);
      std::string trouble;
      if (region != nullptr && region->id(&trouble).empty()) {
        return absl::StrCat("a region is attached nowhere: ", trouble);
      }
    }
  }
  return "";
}

Operation StartCudaCall(CudaCallParams params) {
  const std::shared_ptr<CallRegistry> registry = params.registry;
  auto state = std::make_shared<CudaCall>(std::move(params));
  registry->Add(state.get(), [weak = std::weak_ptr<CudaCall>(state)] {
    if (const auto alive = weak.lock()) alive->Cancel();
  });
  state->Start();
  return Operation(state);
}

}  // namespace ringattn::client
