#include "server/edge/services/attention_service.h"

#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "server/edge/access/audit_log.h"
#include "server/edge/access/callers.h"
#include "server/edge/call/call_failures.h"
#include "server/edge/call/replies.h"
#include "server/edge/call/residual_calls.h"
#include "server/edge/call/residual_hold_call.h"
#include "server/edge/call/shared_calls.h"
#include "server/edge/header/error_details.h"

namespace ringattn::server {
namespace {

Failure NotKnown() {
  Failure failure;
  failure.code = absl::StatusCode::kNotFound;
  failure.message = "no request in flight or recently ended has this request_id";
  failure.reason = "OPERATION_NOT_FOUND";
  return failure;
}

void Fill(const OperationView& view, v1::GetStatusResponse* response) {
  response->set_request_id(view.request_id);
  response->set_state(view.state);
  response->set_generation(view.generation);
  if (view.plan != nullptr) *response->mutable_plan() = MakePlanReport(*view.plan, view.members);
  if (view.failure.has_value()) {
    *response->mutable_error() = ToRpcStatus(*view.failure);
  }
}

bool IsEnded(const OperationView& view) {
  return view.state == v1::REQUEST_STATE_SUCCEEDED || view.state == v1::REQUEST_STATE_FAILED;
}

void AuditCancel(const RequestContext& context, const Caller& caller, const std::string& request_id,
                 const std::optional<OperationView>& view) {
  if (context.audit == nullptr) return;
  context.audit->Write({{"client", caller.principal},
                        {"peer", caller.connection},
                        {"request_id", request_id.substr(0, context.limits.max_request_id_bytes)},
                        {"method", "Cancel"},
                        {"code", view.has_value() ? "OK" : "NOT_FOUND"}});
}

}  // namespace

ByteStreamReactor* AttentionServiceImpl::Forward(grpc::CallbackServerContext* call) {
  return RequestCall::Start(context_, call, Direction::kForward);
}

ByteStreamReactor* AttentionServiceImpl::Backward(grpc::CallbackServerContext* call) {
  return RequestCall::Start(context_, call, Direction::kBackward);
}

ByteStreamReactor* AttentionServiceImpl::Calls(grpc::CallbackServerContext* call) {
  return StartSharedCalls(context_, call);
}

// Both calls look up the operation on the core's thread and answer from there; gRPC keeps request
// and response until Finish.
grpc::ServerUnaryReactor* AttentionServiceImpl::GetStatus(grpc::CallbackServerContext* call,
                                                          const v1::GetStatusRequest* request,
                                                          v1::GetStatusResponse* response) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  const std::variant<Caller, grpc::Status> caller = context_->callers->Identify(*call);
  if (const auto* refused = std::get_if<grpc::Status>(&caller)) {
    reactor->Finish(*refused);
    return reactor;
  }
  const bool asked = context_->core->Ask([context = context_,
                                          principal = std::get<Caller>(caller).principal, reactor,
                                          request, response](const Coordinator& core) {
    const std::optional<OperationView> view = core.FindOperation(request->request_id(), principal);
    if (!view.has_value()) return reactor->Finish(ToGrpcStatus(NotKnown(), context->limits));
    Fill(*view, response);
    reactor->Finish(grpc::Status::OK);
  });
  if (!asked) reactor->Finish(ToGrpcStatus(CoreBusy(context_->retry_after), context_->limits));
  return reactor;
}

grpc::ServerUnaryReactor* AttentionServiceImpl::Cancel(grpc::CallbackServerContext* call,
                                                       const v1::CancelRequest* request,
                                                       v1::CancelResponse* response) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  std::variant<Caller, grpc::Status> identified = context_->callers->Identify(*call);
  if (const auto* refused = std::get_if<grpc::Status>(&identified)) {
    reactor->Finish(*refused);
    return reactor;
  }
  const bool asked =
      context_->core->Ask([context = context_, caller = std::get<Caller>(std::move(identified)),
                           reactor, request](const Coordinator& core) {
        const std::string id = request->request_id();
        const std::optional<OperationView> view = core.FindOperation(id, caller.principal);
        AuditCancel(*context, caller, id, view);
        if (!view.has_value()) return reactor->Finish(ToGrpcStatus(NotKnown(), context->limits));
        if (IsEnded(*view)) return reactor->Finish(grpc::Status::OK);
        context->core->Post(CancelRequested{id, caller.principal},
                            [reactor] { reactor->Finish(grpc::Status::OK); });
      });
  if (!asked) reactor->Finish(ToGrpcStatus(CoreBusy(context_->retry_after), context_->limits));
  return reactor;
}

grpc::ServerUnaryReactor* AttentionServiceImpl::DeleteResidual(
    grpc::CallbackServerContext* call, const v1::DeleteResidualRequest* request,
    v1::DeleteResidualResponse*) {
  return HandleDeleteResidual(context_, call, request);
}

grpc::ServerUnaryReactor* AttentionServiceImpl::RenewResiduals(
    grpc::CallbackServerContext* call, const v1::RenewResidualsRequest* request,
    v1::RenewResidualsResponse* response) {
  return HandleRenewResiduals(context_, call, request, response);
}

grpc::ServerBidiReactor<v1::HoldResidualsRequest, v1::HoldResidualsResponse>*
AttentionServiceImpl::HoldResiduals(grpc::CallbackServerContext* call) {
  return StartHoldResiduals(context_, call);
}

}  // namespace ringattn::server
