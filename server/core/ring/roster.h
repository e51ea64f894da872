// Roster: the connected workers with their registration, newest heartbeat and measurements.
#ifndef RINGATTN_SERVER_CORE_RING_ROSTER_H_
#define RINGATTN_SERVER_CORE_RING_ROSTER_H_

#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/plan/kernel_rate.h"
#include "server/core/events/events.h"

namespace ringattn::server {

struct Worker {
  v1::Register registration;
  std::vector<KernelRate> kernel_rates;  // of the registration
  absl::Time last_heard;
  v1::Heartbeat heartbeat;  // newest
  v1::Committed committed;  // measurements of its newest ring
  bool leaving = false;     // it sent Leaving
};

// Not thread safe.
class Roster {
 public:
  // REQUIRES: the connection is not in it.
  void Add(ConnectionId connection, const v1::Register& registration, absl::Time now);
  void Remove(ConnectionId connection) { workers_.erase(connection); }
  // Records a message's time. Returns false if the worker is not connected.
  bool Heard(ConnectionId connection, absl::Time now);
  // Returns false if a newer heartbeat is stored already.
  bool TakeHeartbeat(ConnectionId connection, const v1::Heartbeat& heartbeat);
  // REQUIRES: Has(connection).
  void SetLeaving(ConnectionId connection) { workers_.at(connection).leaving = true; }
  void TakeMeasurements(ConnectionId connection, const v1::Committed& committed);
  // Extends every worker's last_heard by a pause of this process.
  void Forgive(absl::Duration pause);

  bool Has(ConnectionId connection) const { return workers_.count(connection) > 0; }
  // REQUIRES: Has(connection).
  const Worker& at(ConnectionId connection) const { return workers_.at(connection); }
  const std::string& NameOf(ConnectionId connection) const {
    return at(connection).registration.name();
  }
  std::vector<ConnectionId> Named(const std::string& name) const;
  // Returns workers without a message since `time`, the longest silent first.
  std::vector<ConnectionId> SilentSince(absl::Time time) const;
  // In the order in which they joined.
  const std::map<ConnectionId, Worker>& workers() const { return workers_; }
  bool empty() const { return workers_.empty(); }
  size_t size() const { return workers_.size(); }
  // Returns the workers that sent Leaving, and the others.
  std::vector<ConnectionId> Leaving() const;
  std::vector<ConnectionId> Staying() const;
  absl::Time newest_join() const { return newest_join_; }

 private:
  std::map<ConnectionId, Worker> workers_;
  absl::Time newest_join_ = absl::InfinitePast();
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_RING_ROSTER_H_
