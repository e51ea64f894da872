#include "server/edge/call/residual_hold_call.h"

#include <string>
#include <utility>

#include "server/core/events/residual_view.h"
#include "server/edge/call/hold_stream.h"

namespace ringattn::server {
namespace {

struct ResidualHoldKind {
  using Request = v1::HoldResidualsRequest;
  using Response = v1::HoldResidualsResponse;
  static const auto& Ids(const Request& request) { return request.residual_handles(); }
  static const auto& Released(const Request& request) { return request.released_handles(); }
  static const char* IdsField() { return "residual_handles"; }
  static const char* ReleasedField() { return "released_handles"; }

  static bool Describe(const Coordinator& core, const std::string& id, const std::string& principal,
                       Response* response) {
    const ResidualView view = core.FindResidual(id, principal, "");
    v1::ResidualStatus* status = response->add_residuals();
    if (view.failure) status->set_reason(view.failure->reason);
    return !view.failure;
  }

  static Event ToEvent(Renewal renewal) {
    return ResidualsRenewed{std::move(renewal.ids), std::move(renewal.principal), renewal.ttl};
  }
};

}  // namespace

grpc::ServerBidiReactor<v1::HoldResidualsRequest, v1::HoldResidualsResponse>* StartHoldResiduals(
    const RequestContext* context, grpc::CallbackServerContext* call) {
  return new HoldStream<ResidualHoldKind>(
      {context->limits, context->retry_after, context->core, context->callers, context->holds},
      call);
}

}  // namespace ringattn::server
