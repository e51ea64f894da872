#include "server/edge/call/call_state.h"

#include <cstdlib>

#include "common/observability/log.h"

namespace ringattn::server {

const char* CallStateName(CallState state) {
  switch (state) {
    case CallState::kAwaitingHeader:
      return "awaiting header";
    case CallState::kCheckingHeader:
      return "checking header";
    case CallState::kGathering:
      return "gathering";
    case CallState::kQueued:
      return "queued";
    case CallState::kOpening:
      return "opening";
    case CallState::kTransferring:
      return "transferring";
    case CallState::kGivingUp:
      return "giving up";
    case CallState::kEnding:
      return "ending";
    case CallState::kCutOff:
      return "cut off";
    case CallState::kFinished:
      return "finished";
    case CallState::kDone:
      return "done";
  }
  return "unknown";
}

bool MayFollow(CallState from, CallState to) {
  switch (to) {
    case CallState::kAwaitingHeader:
      return false;
    case CallState::kCheckingHeader:
      return from == CallState::kAwaitingHeader;
    case CallState::kGathering:
      return from == CallState::kCheckingHeader;
    case CallState::kQueued:
      return from == CallState::kCheckingHeader || from == CallState::kGathering;
    case CallState::kOpening:
      return from == CallState::kQueued;
    case CallState::kTransferring:
      return from == CallState::kOpening;
    case CallState::kGivingUp:
      return from == CallState::kQueued || from == CallState::kOpening ||
             from == CallState::kTransferring;
    case CallState::kEnding:
      return from <= CallState::kGivingUp;
    case CallState::kCutOff:
      return from == CallState::kEnding;
    case CallState::kFinished:
      return from == CallState::kEnding || from == CallState::kCutOff;
    case CallState::kDone:
      return from == CallState::kFinished;
  }
  return false;
}

void CallLife::MoveTo(CallState to) {
  if (!MayFollow(state_, to)) {
    LogError("invalid state transition of a call",
             {{"from", CallStateName(state_)}, {"to", CallStateName(to)}});
    std::abort();
  }
  state_ = to;
}

}  // namespace ringattn::server
