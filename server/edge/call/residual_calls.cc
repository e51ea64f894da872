#include "server/edge/call/residual_calls.h"

#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "common/request/validation.h"
#include "server/core/events/residual_view.h"
#include "server/edge/access/audit_log.h"
#include "server/edge/access/callers.h"
#include "server/edge/call/call_failures.h"
#include "server/edge/header/error_details.h"

namespace ringattn::server {
namespace {

// Returns the caller. Returns nullopt, after finishing the call, for an unknown caller.
std::optional<Caller> CallerOf(const RequestContext* context, grpc::CallbackServerContext* call,
                               grpc::ServerUnaryReactor* reactor) {
  std::variant<Caller, grpc::Status> caller = context->callers->Identify(*call);
  if (const auto* refused = std::get_if<grpc::Status>(&caller)) {
    reactor->Finish(*refused);
    return std::nullopt;
  }
  return std::get<Caller>(std::move(caller));
}

// Omits the handle, which is a secret.
void AuditDelete(const RequestContext& context, const Caller& caller, const char* code) {
  if (context.audit == nullptr) return;
  context.audit->Write({{"client", caller.principal},
                        {"peer", caller.connection},
                        {"method", "DeleteResidual"},
                        {"code", code}});
}

std::optional<Rejection> CheckRequest(const v1::RenewResidualsRequest& request,
                                      const Limits& limits, absl::Duration* ttl) {
  Violations violations(limits.max_error_detail_bytes);
  *ttl = CheckResidualTtl(request.has_ttl() ? &request.ttl() : nullptr, "ttl", limits, violations);
  if (request.residual_handles_size() > limits.max_renewed_residuals) {
    violations.Invalid("residual_handles",
                       absl::StrCat("has ", request.residual_handles_size(), " entries, at most ",
                                    limits.max_renewed_residuals, " are allowed"));
  }
  if (violations.empty()) return std::nullopt;
  return std::move(violations).ToRejection();
}

void AnswerBusy(const RequestContext* context, grpc::ServerUnaryReactor* reactor) {
  reactor->Finish(ToGrpcStatus(CoreBusy(context->retry_after), context->limits));
}

}  // namespace

grpc::ServerUnaryReactor* HandleDeleteResidual(const RequestContext* context,
                                               grpc::CallbackServerContext* call,
                                               const v1::DeleteResidualRequest* request) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  const std::optional<Caller> caller = CallerOf(context, call, reactor);
  if (!caller) return reactor;
  const bool asked =
      context->core->Ask([context, reactor, request, caller = *caller](const Coordinator& core) {
        const std::string& handle = request->residual_handle();
        const ResidualView view = core.FindResidual(handle, caller.principal, "");
        const bool known = !view.failure || view.failure->code != absl::StatusCode::kNotFound;
        AuditDelete(*context, caller, known ? "OK" : "NOT_FOUND");
        if (!known) return reactor->Finish(ToGrpcStatus(*view.failure, context->limits));
        // Consumed residuals are deleted as well and cannot be read again.
        context->core->Post(ResidualDeleted{handle, caller.principal},
                            [reactor] { reactor->Finish(grpc::Status::OK); });
      });
  if (!asked) AnswerBusy(context, reactor);
  return reactor;
}

grpc::ServerUnaryReactor* HandleRenewResiduals(const RequestContext* context,
                                               grpc::CallbackServerContext* call,
                                               const v1::RenewResidualsRequest* request,
                                               v1::RenewResidualsResponse* response) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  const std::optional<Caller> caller = CallerOf(context, call, reactor);
  if (!caller) return reactor;
  absl::Duration ttl;
  if (std::optional<Rejection> bad = CheckRequest(*request, context->limits, &ttl)) {
    reactor->Finish(ToGrpcStatus(*bad, context->limits));
    return reactor;
  }
  const bool asked = context->core->Ask([context, reactor, request, response, ttl,
                                         principal = caller->principal](const Coordinator& core) {
    for (const std::string& handle : request->residual_handles()) {
      const ResidualView view = core.FindResidual(handle, principal, "");
      v1::ResidualStatus* status = response->add_residuals();
      if (view.failure) status->set_reason(view.failure->reason);
    }
    context->core->Post(
        ResidualsRenewed{{request->residual_handles().begin(), request->residual_handles().end()},
                         principal,
                         ttl},
        [reactor] { reactor->Finish(grpc::Status::OK); });
  });
  if (!asked) AnswerBusy(context, reactor);
  return reactor;
}

}  // namespace ringattn::server
