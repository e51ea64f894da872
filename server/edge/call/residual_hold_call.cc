#include "server/edge/call/residual_hold_call.h"

#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/request/violations.h"
#include "server/core/events/residual_view.h"
#include "server/edge/call/call_failures.h"
#include "server/edge/header/error_details.h"

namespace ringattn::server {
namespace {

// Processes one step at a time: reads a request, queries the core, writes the answer. The current
// step therefore notices the end of the call. Deletes itself.
class HoldCall final
    : public grpc::ServerBidiReactor<v1::HoldResidualsRequest, v1::HoldResidualsResponse>,
      public ResidualHolds::Stream {
 public:
  HoldCall(const RequestContext* context, grpc::CallbackServerContext* call) : context_(*context) {
    std::variant<Caller, grpc::Status> caller = context_.callers->Identify(*call);
    if (const auto* refused = std::get_if<grpc::Status>(&caller)) {
      End(*refused);
      return;
    }
    principal_ = std::get<Caller>(caller).principal;
    const std::optional<Failure> full =
        context_.holds->Enter(this, std::get<Caller>(caller), context_.retry_after);
    if (full) {
      End(ToGrpcStatus(*full, context_.limits));
      return;
    }
    absl::MutexLock lock(&mutex_);
    if (!finished_) StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return End(grpc::Status::OK);
    if (std::optional<Rejection> bad = Judge()) return End(ToGrpcStatus(*bad, context_.limits));
    {
      absl::MutexLock lock(&mutex_);
      if (finished_) return;
      asking_ = true;
    }
    if (!context_.core->Ask([this](const Coordinator& core) { Answer(core); })) {
      Asked();
      End(ToGrpcStatus(CoreBusy(context_.retry_after), context_.limits));
    }
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return End(grpc::Status::OK);
    absl::MutexLock lock(&mutex_);
    if (!finished_) StartRead(&request_);
  }

  void OnClosed() override {
    End(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is shutting down"));
  }

  void OnDone() override {
    if (std::optional<ResidualsRenewed> left = context_.holds->Leave(this)) {
      context_.core->Post(*std::move(left));
    }
    // Waits until the last holder has released the lock.
    { absl::MutexLock lock(&mutex_); }
    delete this;
  }

 private:
  std::optional<Rejection> Judge() const {
    Violations violations(context_.limits.max_error_detail_bytes);
    const int64_t named =
        int64_t{request_.residual_handles_size()} + request_.released_handles_size();
    if (named <= context_.limits.max_renewed_residuals) return std::nullopt;
    violations.Invalid("residual_handles",
                       absl::StrCat("and released_handles have ", named, " entries, at most ",
                                    context_.limits.max_renewed_residuals, " are allowed"));
    return std::move(violations).ToRejection();
  }

  // Runs on the core's thread.
  void Answer(const Coordinator& core) {
    response_.Clear();
    std::vector<std::string> kept;
    for (const std::string& handle : request_.residual_handles()) {
      const ResidualView view = core.FindResidual(handle, principal_, "");
      v1::ResidualStatus* status = response_.add_residuals();
      if (view.failure) {
        status->set_reason(view.failure->reason);
      } else {
        kept.push_back(handle);
      }
    }
    context_.holds->Hold(this, kept);
    context_.holds->Release(
        this, {request_.released_handles().begin(), request_.released_handles().end()});
    context_.core->Post(
        ResidualsRenewed{std::move(kept), principal_, context_.limits.residual_hold_ttl},
        [this] { Reply(); });
  }

  void Reply() {
    if (Asked()) return;
    absl::MutexLock lock(&mutex_);
    if (!finished_) StartWrite(&response_);
  }

  // The core has answered. Returns true, and finishes the call, if its end was requested meanwhile.
  bool Asked() {
    std::optional<grpc::Status> end;
    {
      absl::MutexLock lock(&mutex_);
      asking_ = false;
      end = std::exchange(end_, std::nullopt);
    }
    if (end) End(*end);
    return end.has_value();
  }

  // While the core has the call, the end is deferred until it answers.
  void End(const grpc::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (asking_) {
      if (!end_) end_ = status;
      return;
    }
    if (std::exchange(finished_, true)) return;
    Finish(status);
  }

  const RequestContext& context_;
  std::string principal_;
  v1::HoldResidualsRequest request_;
  v1::HoldResidualsResponse response_;
  absl::Mutex mutex_;
  bool asking_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

grpc::ServerBidiReactor<v1::HoldResidualsRequest, v1::HoldResidualsResponse>* StartHoldResiduals(
    const RequestContext* context, grpc::CallbackServerContext* call) {
  return new HoldCall(context, call);
}

}  // namespace ringattn::server
