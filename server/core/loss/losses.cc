#include "server/core/loss/losses.h"

#include <utility>

namespace ringattn::server {

const char* LossReasonName(LossReason reason) {
  switch (reason) {
    case LossReason::kDisconnected:
      return "disconnected";
    case LossReason::kSilent:
      return "silent";
    case LossReason::kNoAnswer:
      return "no_answer";
    case LossReason::kStuck:
      return "stuck";
    case LossReason::kTransferStalled:
      return "transfer_stalled";
    case LossReason::kReplaced:
      return "replaced";
  }
  return "unknown";
}

void Losses::Add(LostWorker loss) {
  newest_.push_front(std::move(loss));
  if (newest_.size() > kKept) newest_.pop_back();
}

}  // namespace ringattn::server
