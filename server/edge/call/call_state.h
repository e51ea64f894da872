// CallState: where one Forward or Backward call stands, and where it may go from there.
#ifndef RINGATTN_SERVER_EDGE_CALL_CALL_STATE_H_
#define RINGATTN_SERVER_EDGE_CALL_CALL_STATE_H_

namespace ringattn::server {

enum class CallState {
  kAwaitingHeader,
  kCheckingHeader,  // without the call's lock: headers may have 4 MiB
  kQueued,          // announced to the core, which has not accepted it yet
  kOpening,         // accepted; its data plane is being opened
  kTransferring,    // the data plane moves inputs, waits for the ring, moves outputs
  kGivingUp,        // the core was told that the call is over and has not answered yet
  kEnding,          // the status is final and waits behind what is being written
  kCutOff,          // it waited too long: gRPC was told to end the call at once
  kFinished,        // gRPC has the status
  kDone,            // gRPC is done with the call
};

const char* CallStateName(CallState state);

// A call moves down the list above, past states that it does not need:
//
//   AwaitingHeader -> CheckingHeader -> Queued -> Opening -> Transferring
//   Queued, Opening, Transferring -> GivingUp
//   any of the six -> Ending -> Finished -> Done;  Ending -> CutOff -> Finished
bool MayFollow(CallState from, CallState to);

// Not thread safe.
class CallLife {
 public:
  CallState state() const { return state_; }
  // Ends the process if `to` may not follow: whoever asks is wrong about the call.
  void MoveTo(CallState to);

  // Nothing that the client sends or the ring computes changes the outcome any more.
  bool over() const { return state_ >= CallState::kGivingUp; }
  // The core knows of the call and has not answered for good.
  bool in_core() const { return state_ >= CallState::kQueued && state_ <= CallState::kGivingUp; }

 private:
  CallState state_ = CallState::kAwaitingHeader;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_CALL_STATE_H_
