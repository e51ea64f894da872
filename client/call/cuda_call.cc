#include "client/call/cuda_call.h"

#include <chrono>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/api/error.h"
#include "client/call/copied_call.h"
#include "client/memory/staging_pool.h"

namespace ringattn::client {
namespace {

// Returns true if the service rejected the call only because of its transport, before it started.
// Another transport may work.
bool IsAboutTransport(const absl::Status& status) {
  const ErrorDetails details = DetailsOf(status);
  if (details.reason == "TRANSPORT_UNAVAILABLE" || details.reason == "REGION_UNKNOWN") return true;
  // A coordinator that does not know CUDA memory rejects it by field.
  for (const FieldViolation& violation : details.violations) {
    if (absl::StartsWith(violation.field, "transport.accept")) return true;
  }
  return false;
}

class CudaCall final : public CopiedCall, public std::enable_shared_from_this<CudaCall> {
 public:
  explicit CudaCall(CudaCallParams params)
      : CopiedCall(params.request_id, params.deadline), params_(std::move(params)) {}

  void Start() {
    if (!params_.why_not.empty() && !params_.required) {
      return params_.copies->Add([self = shared_from_this()] { self->CallOnCopies(); });
    }
    Call(nullptr,
         [self = shared_from_this()](const CallResult& result) { self->OnCudaCalled(result); });
  }

 private:
  void Call(uint8_t* host, const std::function<void(const CallResult&)>& done) {
    // The end may come at once and clears params_.
    Make([host, done, start = params_.start](absl::Duration deadline) {
      return start(host, deadline, done);
    });
  }

  // Continues on a copying thread, because copies block and gRPC's threads must not.
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
                       " bytes of host memory for another transport, more than is available"));
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
    SetTimes(std::chrono::duration<double>(report.times.began - began()).count(), &report);
    End(std::move(report));
  }

  std::shared_ptr<SharedRegion> RegionOf(const StagingPlan::Tensor& tensor) const {
    return params_.regions->Find(tensor.data, tensor.bytes);
  }

  static absl::Status Released() {
    return MakeError(absl::StatusCode::kCancelled, "the client released a region of the call", {});
  }

  void End(CallResult result) {
    if (params_.done) params_.done(result);
    const std::shared_ptr<CallRegistry> registry = std::move(params_.registry);
    params_ = {};
    host_.reset();
    Conclude(std::move(result), registry);
  }

  CudaCallParams params_;  // used by one thread at a time
  std::unique_ptr<uint8_t[]> host_;
};

}  // namespace

std::string CheckAttached(const StagingPlan& plan, const RegionIndex& regions) {
  for (const std::vector<StagingPlan::Tensor>* tensors : {&plan.inputs, &plan.outputs}) {
    for (const StagingPlan::Tensor& tensor : *tensors) {
      const auto region = regions.Find(tensor.data, tensor.bytes);
      std::string trouble;
      if (region != nullptr && region->id(&trouble).empty()) {
        return absl::StrCat("no worker has attached a region: ", trouble);
      }
    }
  }
  return "";
}

PendingCall StartCudaCall(CudaCallParams params) {
  const std::shared_ptr<CallRegistry> registry = params.registry;
  return StartCopiedCall(std::make_shared<CudaCall>(std::move(params)), *registry);
}

}  // namespace ringattn::client
