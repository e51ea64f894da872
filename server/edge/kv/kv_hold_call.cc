#include "server/edge/kv/kv_hold_call.h"

#include <string>
#include <utility>

#include "server/edge/call/hold_stream.h"

namespace ringattn::server {
namespace {

struct KvHoldKind {
  using Request = v1::HoldCachesRequest;
  using Response = v1::HoldCachesResponse;
  static const auto& Ids(const Request& request) { return request.cache_ids(); }
  static const auto& Released(const Request& request) { return request.released_ids(); }
  static const char* IdsField() { return "cache_ids"; }
  static const char* ReleasedField() { return "released_ids"; }

  static bool Describe(const Coordinator& core, const std::string& id, const std::string& principal,
                       Response* response) {
    const KvCacheView view = core.FindKvCache(id, principal);
    v1::KvLeaseStatus* status = response->add_caches();
    status->set_cache_id(id);
    if (view.failure || view.ended) {
      status->set_ended_reason(view.failure ? view.failure->reason : view.ended->reason);
      return false;
    }
    *status->mutable_expires_in() = view.info.expires_in();
    return true;
  }

  static Event ToEvent(Renewal renewal) {
    return KvCachesRenewed{std::move(renewal.ids), std::move(renewal.principal), renewal.ttl};
  }
};

}  // namespace

grpc::ServerBidiReactor<v1::HoldCachesRequest, v1::HoldCachesResponse>* StartHoldCaches(
    const KvContext* context, grpc::CallbackServerContext* call) {
  return new HoldStream<KvHoldKind>(
      {context->limits, context->retry_after, context->core, context->callers, context->holds},
      call);
}

}  // namespace ringattn::server
