#include "server/edge/services/kv_cache_service.h"

#include <string>
#include <utility>
#include <variant>

#include "absl/strings/escaping.h"
#include "common/base/monotonic_time.h"
#include "server/edge/call/call_failures.h"
#include "server/edge/header/error_details.h"
#include "server/edge/kv/kv_hold_call.h"
#include "server/edge/kv/kv_relay.h"
#include "server/edge/kv/kv_requests.h"

namespace ringattn::server {
namespace {

// Returns the caller. Returns nullopt, after finishing the call, for an unknown caller.
std::optional<Caller> IdentifyKvCaller(const KvContext& context, grpc::CallbackServerContext* call,
                                       grpc::ServerUnaryReactor* reactor) {
  std::variant<Caller, grpc::Status> caller = context.callers->Identify(*call);
  if (const auto* refused = std::get_if<grpc::Status>(&caller)) {
    reactor->Finish(*refused);
    return std::nullopt;
  }
  return std::get<Caller>(std::move(caller));
}

void FillInfo(const KvCacheView& view, v1::KvCacheInfo* info) {
  *info = view.info;
  if (view.ended) *info->mutable_ended() = ToRpcStatus(*view.ended);
}

}  // namespace

// ------------------------------------------------------- CreateCache, OpenCache

template <typename Event, typename Answered, typename Response>
void KvCacheServiceImpl::Submit(Event event, const Caller& caller,
                                grpc::ServerUnaryReactor* reactor, Response* response,
                                Calls<Response>* calls) {
  {
    absl::MutexLock lock(&mutex_);
    event.call = ++last_call_;
    (*calls)[event.call] = {reactor, response, caller, MonotonicNow()};
  }
  const uint64_t call = event.call;
  const bool asked = context_->core->Ask(
      [core = context_->core, event = std::move(event)](const Coordinator&) { core->Post(event); });
  if (!asked) Answer(Answered{call, CoreBusy(context_->retry_after), {}});
}

template <typename Answered, typename Response>
void KvCacheServiceImpl::Complete(const Answered& answer, const char* method,
                                  Calls<Response>* calls) {
  Pending<Response> pending;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = calls->find(answer.call);
    if (found == calls->end()) return;
    pending = found->second;
    calls->erase(found);
  }
  if (answer.failure) return Refuse(*answer.failure, method, pending.caller, pending.reactor);
  int64_t bytes_per_worker = 0;
  if constexpr (std::is_same_v<Response, v1::CreateCacheResponse>) {
    bytes_per_worker = static_cast<int64_t>(answer.response.bytes_per_worker());
  }
  Audit(method, pending.caller, grpc::Status::OK, MonotonicNow() - pending.since, bytes_per_worker,
        answer.response.placement());
  *pending.response = answer.response;
  pending.reactor->Finish(grpc::Status::OK);
}

void KvCacheServiceImpl::Answer(const KvCacheAnswered& answer) {
  Complete(answer, "CreateCache", &creating_);
}

void KvCacheServiceImpl::Answer(const KvWriterAnswered& answer) {
  Complete(answer, "OpenCache", &opening_);
}

void KvCacheServiceImpl::Refuse(const Failure& failure, const char* method, const Caller& caller,
                                grpc::ServerUnaryReactor* reactor) const {
  const grpc::Status status = ToGrpcStatus(failure, context_->limits);
  Audit(method, caller, status, absl::ZeroDuration());
  reactor->Finish(status);
}

// The line lacks the cache's id, which is a secret of anonymous clients.
void KvCacheServiceImpl::Audit(const char* method, const Caller& caller, const grpc::Status& status,
                               absl::Duration time, int64_t bytes_per_worker,
                               const v1::KvPlacement& placement) const {
  if (context_->audit == nullptr) return;
  context_->audit->Write({{"client", caller.principal},
                          {"peer", caller.connection},
                          {"method", method},
                          {"code", CodeName(status.error_code())},
                          {"error", status.error_message()},
                          {"bytes_per_worker", bytes_per_worker},
                          {"members", placement.members_size()},
                          {"position_parts", static_cast<int>(placement.position_parts())},
                          {"placement_reason", placement.reason()},
                          {"seconds", absl::ToDoubleSeconds(time)}});
}

grpc::ServerUnaryReactor* KvCacheServiceImpl::CreateCache(grpc::CallbackServerContext* call,
                                                          const v1::CreateCacheRequest* request,
                                                          v1::CreateCacheResponse* response) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  const std::optional<Caller> caller = IdentifyKvCaller(*context_, call, reactor);
  if (!caller) return reactor;
  std::variant<KvCacheRequested, Failure> event =
      ReadCreateCache(*request, *caller, context_->limits);
  if (const auto* failure = std::get_if<Failure>(&event)) {
    Refuse(*failure, "CreateCache", *caller, reactor);
    return reactor;
  }
  Submit<KvCacheRequested, KvCacheAnswered>(std::get<KvCacheRequested>(std::move(event)), *caller,
                                            reactor, response, &creating_);
  return reactor;
}

grpc::ServerUnaryReactor* KvCacheServiceImpl::OpenCache(grpc::CallbackServerContext* call,
                                                        const v1::OpenCacheRequest* request,
                                                        v1::OpenCacheResponse* response) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  const std::optional<Caller> caller = IdentifyKvCaller(*context_, call, reactor);
  if (!caller) return reactor;
  std::variant<KvWriterRequested, Failure> event = ReadOpenCache(*request, *caller);
  if (const auto* failure = std::get_if<Failure>(&event)) {
    Refuse(*failure, "OpenCache", *caller, reactor);
    return reactor;
  }
  Submit<KvWriterRequested, KvWriterAnswered>(std::get<KvWriterRequested>(std::move(event)),
                                              *caller, reactor, response, &opening_);
  return reactor;
}

// ---------------------------------------------- GetCache, ListCaches, DeleteCache

grpc::ServerUnaryReactor* KvCacheServiceImpl::GetCache(grpc::CallbackServerContext* call,
                                                       const v1::GetCacheRequest* request,
                                                       v1::KvCacheInfo* response) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  const std::optional<Caller> caller = IdentifyKvCaller(*context_, call, reactor);
  if (!caller) return reactor;
  const bool asked = context_->core->Ask([context = context_, principal = caller->principal,
                                          reactor, request, response](const Coordinator& core) {
    const KvCacheView view = core.FindKvCache(request->cache_id(), principal);
    if (view.failure) return reactor->Finish(ToGrpcStatus(*view.failure, context->limits));
    FillInfo(view, response);
    reactor->Finish(grpc::Status::OK);
  });
  if (!asked) reactor->Finish(ToGrpcStatus(CoreBusy(context_->retry_after), context_->limits));
  return reactor;
}

grpc::ServerUnaryReactor* KvCacheServiceImpl::ListCaches(grpc::CallbackServerContext* call,
                                                         const v1::ListCachesRequest* request,
                                                         v1::ListCachesResponse* response) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  const std::optional<Caller> caller = IdentifyKvCaller(*context_, call, reactor);
  if (!caller) return reactor;
  std::variant<KvPage, Failure> page = ReadListCaches(*request);
  if (const auto* failure = std::get_if<Failure>(&page)) {
    reactor->Finish(ToGrpcStatus(*failure, context_->limits));
    return reactor;
  }
  const bool asked = context_->core->Ask([page = std::get<KvPage>(page), caller = *caller, reactor,
                                          response](const Coordinator& core) {
    // One more than the page tells whether another page follows.
    std::vector<v1::KvCacheInfo> infos =
        core.ListKvCaches(caller.principal, caller.client, page.after, page.size + 1);
    const bool more = static_cast<int>(infos.size()) > page.size;
    if (more) infos.pop_back();
    if (more) response->set_next_page_token(absl::BytesToHexString(infos.back().cache_id()));
    for (v1::KvCacheInfo& info : infos) *response->add_caches() = std::move(info);
    reactor->Finish(grpc::Status::OK);
  });
  if (!asked) reactor->Finish(ToGrpcStatus(CoreBusy(context_->retry_after), context_->limits));
  return reactor;
}

grpc::ServerUnaryReactor* KvCacheServiceImpl::DeleteCache(grpc::CallbackServerContext* call,
                                                          const v1::DeleteCacheRequest* request,
                                                          v1::DeleteCacheResponse*) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  const std::optional<Caller> caller = IdentifyKvCaller(*context_, call, reactor);
  if (!caller) return reactor;
  const bool asked =
      context_->core->Ask([this, caller = *caller, reactor, request](const Coordinator& core) {
        const KvCacheView view = core.FindKvCache(request->cache_id(), caller.principal);
        if (view.failure) return Refuse(*view.failure, "DeleteCache", caller, reactor);
        Audit("DeleteCache", caller, grpc::Status::OK, absl::ZeroDuration());
        context_->core->Post(KvCacheDeleted{request->cache_id(), caller.principal},
                             [reactor] { reactor->Finish(grpc::Status::OK); });
      });
  if (!asked) {
    Refuse(CoreBusy(context_->retry_after), "DeleteCache", *caller, reactor);
  }
  return reactor;
}

// -------------------------------------------------------------------- streams

grpc::ServerBidiReactor<v1::HoldCachesRequest, v1::HoldCachesResponse>*
KvCacheServiceImpl::HoldCaches(grpc::CallbackServerContext* call) {
  return StartHoldCaches(context_, call);
}

grpc::ServerBidiReactor<v1::StepRequest, v1::StepResponse>* KvCacheServiceImpl::Steps(
    grpc::CallbackServerContext* call) {
  return StartKvRelay(context_, call);
}

}  // namespace ringattn::server
