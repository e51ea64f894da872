// HostLosses: groups the losses of one host, so that a host that dies is one event.
// Tests: host_losses_test.cc
#ifndef RINGATTN_SERVER_CORE_LOSS_HOST_LOSSES_H_
#define RINGATTN_SERVER_CORE_LOSS_HOST_LOSSES_H_

#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/core/events/action_batch.h"
#include "server/core/events/config.h"
#include "server/core/ring/roster.h"

namespace ringattn::server {

// Not thread safe.
class HostLosses {
 public:
  // All arguments must outlive this object.
  HostLosses(const CoordinatorConfig* config, const Roster* roster, ActionBatch* batch)
      : config_(*config), roster_(*roster), batch_(*batch) {}

  // A worker was lost and has left the roster. Emits LossEvent: at once if no other worker of its
  // host is connected, or if it is at fault itself; else when those are lost too, or after one
  // heartbeat. `host` is empty if it is unknown.
  void Add(LostWorker loss, const std::string& host);
  // Ends waits that are over. Call it on every tick.
  void Advance();
  // Returns false while connected workers may have died with their host, because another worker of
  // the host was lost within the last heartbeat. True if no other host has workers: none could
  // serve in its place.
  bool Settled() const;
  // Extends the waits by a pause of this process.
  void Forgive(absl::Duration pause);

 private:
  struct Wait {
    absl::Time until;
    std::vector<LostWorker> lost;
  };

  bool HasWorkers(const std::string& host) const;
  void Emit(const std::string& host, std::vector<LostWorker> lost);

  const CoordinatorConfig& config_;
  const Roster& roster_;
  ActionBatch& batch_;
  std::map<std::string, Wait> waits_;  // by host
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_LOSS_HOST_LOSSES_H_
