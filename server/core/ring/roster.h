// Roster: the workers that are connected, and what each has said of itself.
#ifndef RINGATTN_SERVER_CORE_RING_ROSTER_H_
#define RINGATTN_SERVER_CORE_RING_ROSTER_H_

#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/core/events/events.h"

namespace ringattn::server {

struct Worker {
  v1::Register registration;
  absl::Time last_heard;
  v1::Heartbeat heartbeat;  // the newest
  v1::Committed committed;  // what it measured of its newest ring
  bool leaving = false;     // it said so
};

// Not thread safe.
class Roster {
 public:
  // REQUIRES: the connection is not in it.
  void Add(ConnectionId connection, const v1::Register& registration, absl::Time now);
  void Remove(ConnectionId connection) { workers_.erase(connection); }
  // False if it is not connected.
  bool Heard(ConnectionId connection, absl::Time now);
  // False if it is no newer than what is known.
  bool TakeHeartbeat(ConnectionId connection, const v1::Heartbeat& heartbeat);
  // REQUIRES: Has(connection).
  void SetLeaving(ConnectionId connection) { workers_.at(connection).leaving = true; }
  void TakeMeasurements(ConnectionId connection, const v1::Committed& committed);
  // The process itself did not run for so long: nobody was silent because of it.
  void Forgive(absl::Duration pause);

  bool Has(ConnectionId connection) const { return workers_.count(connection) > 0; }
  // REQUIRES: Has(connection).
  const Worker& at(ConnectionId connection) const { return workers_.at(connection); }
  const std::string& NameOf(ConnectionId connection) const {
    return at(connection).registration.name();
  }
  std::vector<ConnectionId> Named(const std::string& name) const;
  // Not heard of since `time`; the longest silent first.
  std::vector<ConnectionId> SilentSince(absl::Time time) const;
  // In the order in which they came.
  const std::map<ConnectionId, Worker>& workers() const { return workers_; }
  bool empty() const { return workers_.empty(); }
  size_t size() const { return workers_.size(); }
  // Those that have said that they leave.
  std::vector<ConnectionId> Leaving() const;
  absl::Time newest_join() const { return newest_join_; }

 private:
  std::map<ConnectionId, Worker> workers_;
  absl::Time newest_join_ = absl::InfinitePast();
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_RING_ROSTER_H_
