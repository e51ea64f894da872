// One call with all its replays.
#ifndef RINGATTN_CLIENT_CALL_OPERATION_H_
#define RINGATTN_CLIENT_CALL_OPERATION_H_

#include <functional>
#include <memory>
#include <string>

#include <grpcpp/channel.h>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/api/call.h"
#include "client/call/attempt.h"
#include "client/call/call_registry.h"
#include "client/call/retry_policy.h"

namespace ringattn::client {

using CallResult = absl::StatusOr<CallReport>;

// A call in flight, or ended. Copies stand for the same call; dropping them all
// neither ends nor loses it. May outlive its client. Thread safe.
class Operation {
 public:
  // What copies of an operation share. Thread safe.
  class State {
   public:
    virtual ~State() = default;
    virtual const std::string& request_id() const = 0;
    virtual CallResult Wait() = 0;
    virtual void Cancel() = 0;
  };

  explicit Operation(std::shared_ptr<State> state) : state_(std::move(state)) {}

  const std::string& request_id() const { return state_->request_id(); }

  // Until the call has ended, its deadline at the latest (but see MakeAttempt about
  // a server that has stopped reading). After that the caller's memory is its own.
  CallResult Wait() const { return state_->Wait(); }

  // Ends the call soon, with CANCELLED unless it ends otherwise first. Idempotent.
  void Cancel() const { state_->Cancel(); }

 private:
  std::shared_ptr<State> state_;
};

struct OperationParams {
  std::string request_id = {};
  std::shared_ptr<grpc::Channel> channel = nullptr;
  std::shared_ptr<WorkerChannels> workers = nullptr;  // null: no streams straight to them
  std::shared_ptr<const CallPlan> plan = nullptr;
  // Takes its place, once, when the residual that `plan` reads is gone; null: there is none.
  std::shared_ptr<const CallPlan> fallback = nullptr;
  std::shared_ptr<CallRegistry> registry = nullptr;  // the call is in it until its end
  RetryOptions retry = {};
  std::shared_ptr<BearerToken> token = nullptr;  // shown by each attempt; null: none
  absl::Duration deadline = absl::InfiniteDuration();
  // Called once when the call ends, on one of gRPC's threads, before Wait returns.
  // May be empty; must not block.
  std::function<void(const CallResult&)> done = {};
};

Operation StartOperation(OperationParams params);

// A call that failed before it began: Wait gives `error`, and `done` is called.
Operation FailedOperation(const std::string& request_id, const absl::Status& error,
                          const std::function<void(const CallResult&)>& done);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_OPERATION_H_
