// CacheHold: keeps K/V caches alive at the workers by the HoldCaches stream.
// Tests: client/kv/kv_cache_test.cc.
#ifndef RINGATTN_CLIENT_CALL_CACHE_HOLD_H_
#define RINGATTN_CLIENT_CALL_CACHE_HOLD_H_

#include <memory>

#include <grpcpp/channel.h>

#include "client/call/lease_hold.h"
#include "common/security/bearer_token.h"

namespace ringattn::client {

// Thread safe.
class CacheHold final : public LeaseHold {
 public:
  // `token` may be null. Sends nothing before the first Hold.
  CacheHold(std::shared_ptr<grpc::Channel> channel, std::shared_ptr<BearerToken> token,
            const Options& options = {});
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_CACHE_HOLD_H_
