// Losses: the recently lost workers and the reasons.
#ifndef RINGATTN_SERVER_CORE_LOSS_LOSSES_H_
#define RINGATTN_SERVER_CORE_LOSS_LOSSES_H_

#include <cstddef>
#include <deque>

#include "server/core/events/events.h"

namespace ringattn::server {

// Returns "disconnected", "silent", ...: the metric's label.
const char* LossReasonName(LossReason reason);

// Not thread safe.
class Losses {
 public:
  // Fills one screen of the operator's page. Metrics count all losses.
  static constexpr size_t kKept = 32;

  void Add(LostWorker loss);
  // Newest first.
  const std::deque<LostWorker>& newest() const { return newest_; }

 private:
  std::deque<LostWorker> newest_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_LOSS_LOSSES_H_
