// PendingCall: the handle of a call that Client::StartForward or StartBackward started.
#ifndef RINGATTN_CLIENT_API_PENDING_CALL_H_
#define RINGATTN_CLIENT_API_PENDING_CALL_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "client/api/call.h"

namespace ringattn::client {

using CallResult = absl::StatusOr<CallReport>;

// A call in flight or ended. Copies refer to the same call. Dropping all copies neither cancels nor
// loses the call. May outlive its client. Thread safe.
class PendingCall {
 public:
  // The state that copies share. The library implements it. Thread safe.
  class State {
   public:
    virtual ~State() = default;
    virtual const std::string& request_id() const = 0;
    virtual CallResult Wait() = 0;
    virtual void Cancel() = 0;
  };

  explicit PendingCall(std::shared_ptr<State> state) : state_(std::move(state)) {}

  const std::string& request_id() const { return state_->request_id(); }

  // Blocks until the call has ended and returns its result. The library no longer uses the caller's
  // memory from then on. Returns by the call's deadline, or about the keepalive timeout later if
  // the server has stopped reading.
  CallResult Wait() const { return state_->Wait(); }

  // Ends the call soon, with CANCELLED unless it ends otherwise first. Idempotent.
  void Cancel() const { state_->Cancel(); }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_API_PENDING_CALL_H_
