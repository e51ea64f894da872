// Losses: which workers were lost lately, and why.
#ifndef RINGATTN_SERVER_CORE_LOSS_LOSSES_H_
#define RINGATTN_SERVER_CORE_LOSS_LOSSES_H_

#include <cstddef>
#include <deque>

#include "server/core/events/events.h"

namespace ringattn::server {

// "disconnected", "silent", ...: a metric's label.
const char* LossReasonName(LossReason reason);

// Not thread safe.
class Losses {
 public:
  // One screen of an operator's page; metrics count all of them.
  static constexpr size_t kKept = 32;

  void Add(LostWorker loss);
  // The newest first.
  const std::deque<LostWorker>& newest() const { return newest_; }

 private:
  std::deque<LostWorker> newest_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_LOSS_LOSSES_H_
