// CallState: the phases of one Forward or Backward call, and the transitions between them.
#ifndef RINGATTN_SERVER_EDGE_CALL_CALL_STATE_H_
#define RINGATTN_SERVER_EDGE_CALL_CALL_STATE_H_

namespace ringattn::server {

enum class CallState {
  kAwaitingHeader,
  kCheckingHeader,  // without the call's lock, since a header may have 4 MiB
  kGathering,       // waits for the other writers of its request (writer_groups.h)
  kQueued,          // sent to the core, or led by a call that is; not yet accepted
  kOpening,         // accepted; its data plane is being opened
  kTransferring,    // the data plane moves inputs, waits for the ring, moves outputs
  kGivingUp,        // the core was informed of the end and has not answered
  kEnding,          // the status is final and waits for a pending write
  kCutOff,          // that wait was too long: gRPC ends the call immediately
  kFinished,        // gRPC has the status
  kDone,            // gRPC has released the call
};

const char* CallStateName(CallState state);

// Returns whether a call may move from `from` to `to`. Calls move down the list above and may skip
// states:
//
//   AwaitingHeader -> CheckingHeader -> Queued -> Opening -> Transferring
//   CheckingHeader -> Gathering -> Queued
//   Queued, Opening, Transferring -> GivingUp
//   any of the seven -> Ending -> Finished -> Done;  Ending -> CutOff -> Finished
bool MayFollow(CallState from, CallState to);

// Not thread safe.
class CallLife {
 public:
  CallState state() const { return state_; }
  // Ends the process if MayFollow(state(), to) is false, which is a programming error.
  void MoveTo(CallState to);

  // Returns true once neither the client nor the ring can change the outcome.
  bool over() const { return state_ >= CallState::kGivingUp; }
  // Returns true while the core owes a final answer.
  bool in_core() const { return state_ >= CallState::kQueued && state_ <= CallState::kGivingUp; }

 private:
  CallState state_ = CallState::kAwaitingHeader;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_CALL_STATE_H_
