// ResidualHold: keeps residuals alive at the workers by the HoldResiduals stream.
// Tests: residual_hold_test.cc.
#ifndef RINGATTN_CLIENT_CALL_RESIDUAL_HOLD_H_
#define RINGATTN_CLIENT_CALL_RESIDUAL_HOLD_H_

#include <memory>

#include <grpcpp/channel.h>

#include "client/call/lease_hold.h"
#include "common/security/bearer_token.h"

namespace ringattn::client {

// Thread safe.
class ResidualHold final : public LeaseHold {
 public:
  // `token` may be null. Sends nothing before the first Hold.
  ResidualHold(std::shared_ptr<grpc::Channel> channel, std::shared_ptr<BearerToken> token,
               const Options& options = {});
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_RESIDUAL_HOLD_H_
