#include "client/call/staged_call.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/api/error.h"
#include "client/call/copied_call.h"

namespace ringattn::client {
namespace {

// Inputs of at most this many bytes are copied by the caller's thread, in about 0.1 ms. A copying
// thread would first have to wake up.
constexpr uint64_t kCopiedByCaller = 1 << 20;

class StagedCall final : public CopiedCall, public std::enable_shared_from_this<StagedCall> {
 public:
  explicit StagedCall(StagedCallParams params)
      : CopiedCall(params.request_id, params.deadline), params_(std::move(params)) {}

  void Start() {
    region_ = std::move(params_.region);
    if (region_ != nullptr) return CopyInputs();
    params_.copies->Add([self = shared_from_this()] { self->TakeRegion(); });
  }

 private:
  // --- Steps in order, on the caller's thread or a copying one, or in the inner call's `done` ----

  void TakeRegion() {
    if (const auto stopped = Stopped()) return End(*stopped);
    auto region = params_.pool->Take(static_cast<int64_t>(params_.plan.region_bytes));
    if (!region.ok()) return Call(nullptr, std::string(region.status().message()));
    region_ = *std::move(region);
    CopyInputs();
  }

  void CopyInputs() {
    if (params_.plan.input_bytes <= kCopiedByCaller) {
      for (const StagingPlan::Tensor& input : params_.plan.inputs) {
        std::memcpy(region_->data() + input.offset, input.data, input.bytes);
      }
      return Call(region_->data(), "");
    }
    std::vector<CopyPool::Piece> pieces;
    for (const StagingPlan::Tensor& input : params_.plan.inputs) {
      pieces.push_back({region_->data() + input.offset, input.data, input.bytes});
    }
    params_.copies->Copy(
        pieces, [self = shared_from_this()] { return !self->IsCancelled(); },
        [self = shared_from_this()] { self->Call(self->region_->data(), ""); });
  }

  void Call(uint8_t* base, const std::string& why_not) {
    if (const auto stopped = Stopped()) return End(*stopped);
    staging_seconds_ = seconds();
    // The end may come at once and clears params_.
    Make([this, base, why_not, start = std::move(params_.start)](absl::Duration deadline) {
      return start(base, why_not, deadline, [self = shared_from_this()](const CallResult& result) {
        self->OnCalled(result);
      });
    });
  }

  // Continues on a copying thread, because the next step may block and gRPC's threads must not.
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
                      "; staged: tensors outside regions were copied into and out of one");
    }
    report.staged_bytes = params_.plan.copied_bytes;
    SetTimes(staging_seconds_, &report);
    return report;
  }

  void End(CallResult result) {
    if (region_ != nullptr) {
      // The service reports its status only when writing has stopped. After any other status a
      // suspended worker may still write to the region, if the call was made at all.
      const bool made = staging_seconds_ > 0;
      const bool reusable = !made || result.ok() || !DetailsOf(result.status()).reason.empty();
      params_.pool->GiveBack(std::move(region_), reusable);
    }
    if (params_.done) params_.done(result);
    const std::shared_ptr<CallRegistry> registry = std::move(params_.registry);
    params_ = {};
    Conclude(std::move(result), registry);
  }

  StagedCallParams params_;
  std::shared_ptr<SharedRegion> region_;
  double staging_seconds_ = 0;
};

}  // namespace

PendingCall StartStagedCall(StagedCallParams params) {
  const std::shared_ptr<CallRegistry> registry = params.registry;
  return StartCopiedCall(std::make_shared<StagedCall>(std::move(params)), *registry);
}

}  // namespace ringattn::client
