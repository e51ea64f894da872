// One call with all its replays.
// Tests: client_test.cc, region_call_test.cc, residual_call_test.cc.
#ifndef RINGATTN_CLIENT_CALL_REPLAYED_CALL_H_
#define RINGATTN_CLIENT_CALL_REPLAYED_CALL_H_

#include <functional>
#include <memory>
#include <string>

#include <grpcpp/channel.h>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/api/pending_call.h"
#include "client/api/retry_options.h"
#include "client/call/attempt.h"
#include "client/call/call_registry.h"

namespace ringattn::client {

struct ReplayedCallParams {
  std::string request_id = {};
  AttemptChannels channels = {};
  std::shared_ptr<const CallPlan> plan = nullptr;
  // Replaces `plan`, once, if the residual that it reads no longer exists. Null if there is no
  // replacement.
  std::shared_ptr<const CallPlan> fallback = nullptr;
  std::shared_ptr<CallRegistry> registry = nullptr;  // contains the call until its end
  RetryOptions retry = {};
  absl::Duration deadline = absl::InfiniteDuration();
  // Called once when the call ends, on a thread of gRPC, before Wait returns. May be empty. Must
  // not block.
  std::function<void(const CallResult&)> done = {};
};

PendingCall StartReplayedCall(ReplayedCallParams params);

// Returns a call that failed before it started. Wait returns `error`; `done` is called before this
// returns.
PendingCall FailedCall(const std::string& request_id, const absl::Status& error,
                       const std::function<void(const CallResult&)>& done);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_REPLAYED_CALL_H_
