// HoldStream: one HoldResiduals or HoldCaches stream. It renews the leases that its client names,
// for as long as it is open.
#ifndef RINGATTN_SERVER_EDGE_CALL_HOLD_STREAM_H_
#define RINGATTN_SERVER_EDGE_CALL_HOLD_STREAM_H_

#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <grpcpp/support/server_callback.h>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/request/violations.h"
#include "server/edge/access/callers.h"
#include "server/edge/call/call_failures.h"
#include "server/edge/call/lease_holds.h"
#include "server/edge/header/error_details.h"
#include "server/edge/loop/core_loop.h"

namespace ringattn::server {

// What the stream uses. Everything outlives it.
struct HoldContext {
  Limits limits;
  absl::Duration retry_after;
  CoreLoop* core = nullptr;
  Callers* callers = nullptr;
  LeaseHolds* holds = nullptr;
};

// `Kind` defines Request, Response and these static functions:
//   const RepeatedPtrField<std::string>& Ids(const Request&)        to hold
//   const RepeatedPtrField<std::string>& Released(const Request&)   to hold no longer
//   const char* IdsField(), *ReleasedField()                        their names
//   bool Describe(const Coordinator&, const std::string& id, const std::string& principal,
//                 Response*)     adds the lease's state; returns whether it exists
//   Event ToEvent(Renewal)       what renews the leases
//
// Processes one step at a time: reads a request, queries the core, writes the answer. The current
// step therefore notices the end of the call. Deletes itself. Thread safe.
template <typename Kind>
class HoldStream final
    : public grpc::ServerBidiReactor<typename Kind::Request, typename Kind::Response>,
      public LeaseHolds::Stream {
 public:
  HoldStream(HoldContext context, grpc::CallbackServerContext* call)
      : context_(std::move(context)) {
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
    if (!finished_) this->StartRead(&request_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return End(grpc::Status::OK);
    if (std::optional<Rejection> bad = CheckRequest()) {
      return End(ToGrpcStatus(*bad, context_.limits));
    }
    {
      absl::MutexLock lock(&mutex_);
      if (finished_) return;
      querying_ = true;
    }
    if (!context_.core->Ask([this](const Coordinator& core) { Lookup(core); })) {
      FinishQuery();
      End(ToGrpcStatus(CoreBusy(context_.retry_after), context_.limits));
    }
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return End(grpc::Status::OK);
    absl::MutexLock lock(&mutex_);
    if (!finished_) this->StartRead(&request_);
  }

  void OnClosed() override {
    End(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the server is shutting down"));
  }

  void OnDone() override {
    if (std::optional<Renewal> left = context_.holds->Leave(this)) {
      context_.core->Post(Kind::ToEvent(*std::move(left)));
    }
    // Waits until the last holder has released the lock.
    { absl::MutexLock lock(&mutex_); }
    delete this;
  }

 private:
  std::optional<Rejection> CheckRequest() const {
    Violations violations(context_.limits.max_error_detail_bytes);
    const int64_t named = int64_t{Kind::Ids(request_).size()} + Kind::Released(request_).size();
    if (named <= context_.limits.max_renewed_residuals) return std::nullopt;
    violations.Invalid(
        Kind::IdsField(),
        absl::StrCat("and ", Kind::ReleasedField(), " have ", named, " entries, at most ",
                     context_.limits.max_renewed_residuals, " are allowed"));
    return std::move(violations).ToRejection();
  }

  // Runs on the core's thread.
  void Lookup(const Coordinator& core) {
    response_.Clear();
    std::vector<std::string> kept;
    for (const std::string& id : Kind::Ids(request_)) {
      if (Kind::Describe(core, id, principal_, &response_)) kept.push_back(id);
    }
    context_.holds->Hold(this, kept);
    context_.holds->Release(this,
                            {Kind::Released(request_).begin(), Kind::Released(request_).end()});
    context_.core->Post(
        Kind::ToEvent({std::move(kept), principal_, context_.limits.residual_hold_ttl}),
        [this] { Reply(); });
  }

  void Reply() {
    if (FinishQuery()) return;
    absl::MutexLock lock(&mutex_);
    if (!finished_) this->StartWrite(&response_);
  }

  // The core has answered. Returns true, and finishes the call, if its end was requested meanwhile.
  bool FinishQuery() {
    std::optional<grpc::Status> end;
    {
      absl::MutexLock lock(&mutex_);
      querying_ = false;
      end = std::exchange(end_, std::nullopt);
    }
    if (end) End(*end);
    return end.has_value();
  }

  // While the core has the call, the end is deferred until it answers.
  void End(const grpc::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (querying_) {
      if (!end_) end_ = status;
      return;
    }
    if (std::exchange(finished_, true)) return;
    this->Finish(status);
  }

  const HoldContext context_;
  std::string principal_;
  typename Kind::Request request_;
  typename Kind::Response response_;
  absl::Mutex mutex_;
  bool querying_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_HOLD_STREAM_H_
