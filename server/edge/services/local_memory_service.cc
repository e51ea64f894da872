#include "server/edge/services/local_memory_service.h"

#include <openssl/rand.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "common/request/transport_rules.h"
#include "server/edge/header/error_details.h"

namespace ringattn::server {
namespace {

Failure CannotAsk(absl::Duration retry_after) {
  Failure failure;
  failure.code = absl::StatusCode::kUnavailable;
  failure.message = "the server is busy or shutting down";
  failure.reason = "BUSY";
  failure.retry_after = retry_after;
  return failure;
}

Failure BadRegionId() {
  Failure failure;
  failure.code = absl::StatusCode::kInvalidArgument;
  failure.message = "region_id: must be empty or 16 bytes long";
  failure.reason = "INVALID_REQUEST";
  failure.field = "region_id";
  return failure;
}

Failure BadKind(int kind) {
  Failure failure;
  failure.code = absl::StatusCode::kInvalidArgument;
  failure.message =
      absl::StrCat("kind: ", kind,
                   " is not a supported kind of memory; use REGION_KIND_HOST or REGION_KIND_CUDA");
  failure.reason = "INVALID_REQUEST";
  failure.field = "kind";
  return failure;
}

// Returns 128 unguessable bits; empty if the system provides none.
std::string RandomId() {
  std::string id(kRegionIdBytes, 0);
  const bool ok =
      RAND_bytes(reinterpret_cast<unsigned char*>(id.data()), static_cast<int>(id.size())) == 1;
  return ok ? id : std::string();
}

}  // namespace

LocalMemoryServiceImpl::LocalMemoryServiceImpl(const Limits& limits, absl::Duration retry_after,
                                               CoreLoop* core, Callers* callers)
    : limits_(limits), retry_after_(retry_after), core_(core), callers_(callers) {}

grpc::ServerUnaryReactor* LocalMemoryServiceImpl::Attach(grpc::CallbackServerContext* call,
                                                         const v1::AttachRequest* request,
                                                         v1::AttachResponse* response) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  const auto refuse = [&](const Failure& failure) {
    reactor->Finish(ToGrpcStatus(failure, limits_));
    return reactor;
  };
  std::variant<Caller, grpc::Status> identified = callers_->Identify(*call);
  if (const auto* refused = std::get_if<grpc::Status>(&identified)) {
    reactor->Finish(*refused);
    return reactor;
  }
  const auto& caller = std::get<Caller>(identified);
  AttachRequested event;
  event.principal = caller.principal;
  event.client = caller.client;
  event.bytes = static_cast<int64_t>(
      std::min<uint64_t>(request->bytes(), std::numeric_limits<int64_t>::max()));
  event.is_new = request->region_id().empty();
  if (!event.is_new && request->region_id().size() != kRegionIdBytes) return refuse(BadRegionId());
  if (request->kind() != v1::REGION_KIND_UNSPECIFIED) event.kind = request->kind();
  if (!v1::RegionKind_IsValid(request->kind())) return refuse(BadKind(request->kind()));
  event.region_id = event.is_new ? RandomId() : request->region_id();
  for (int i = 0; i < limits_.max_world_size; ++i) event.tokens.push_back(RandomId());
  if (event.region_id.empty() || event.tokens.back().empty()) {
    return refuse(CannotAsk(retry_after_));
  }
  {
    absl::MutexLock lock(&mutex_);
    event.call = ++last_call_;
    pending_[event.call] = {reactor, response};
  }
  const uint64_t id = event.call;
  const bool asked = core_->Ask(
      [core = core_, event = std::move(event)](const Coordinator&) { core->Post(event); });
  if (!asked) {
    AttachCompleted completed{id};
    completed.failure = CannotAsk(retry_after_);
    Complete(completed);
  }
  return reactor;
}

void LocalMemoryServiceImpl::Complete(const AttachCompleted& completed) {
  Pending pending;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = pending_.find(completed.call);
    if (found == pending_.end()) return;
    pending = found->second;
    pending_.erase(found);
  }
  if (completed.failure.has_value()) {
    return pending.reactor->Finish(ToGrpcStatus(*completed.failure, limits_));
  }
  *pending.response = completed.response;
  pending.reactor->Finish(grpc::Status::OK);
}

}  // namespace ringattn::server
