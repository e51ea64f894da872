#include "server/core/ring/roster.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "common/wire/kernel_rate_values.h"
#include "server/core/ring/registration_rules.h"

namespace ringattn::server {

void Roster::Add(ConnectionId connection, const v1::Register& registration, absl::Time now) {
  assert(!Has(connection));
  Worker& worker = workers_[connection];
  worker.registration = registration;
  worker.kernel_rates = KernelRatesOf(registration.kernel_rates());
  worker.last_heard = now;
  newest_join_ = now;
}

bool Roster::Heard(ConnectionId connection, absl::Time now) {
  const auto worker = workers_.find(connection);
  if (worker == workers_.end()) return false;
  worker->second.last_heard = std::max(worker->second.last_heard, now);
  return true;
}

bool Roster::TakeHeartbeat(ConnectionId connection, const v1::Heartbeat& heartbeat) {
  v1::Heartbeat& newest = workers_.at(connection).heartbeat;
  if (heartbeat.sequence() <= newest.sequence()) return false;
  newest = heartbeat;
  return true;
}

void Roster::TakeMeasurements(ConnectionId connection, const v1::Committed& committed) {
  workers_.at(connection).committed = Sanitized(committed);
}

void Roster::Forgive(absl::Duration pause) {
  for (auto& [connection, worker] : workers_) worker.last_heard += pause;
}

std::vector<ConnectionId> Roster::Named(const std::string& name) const {
  std::vector<ConnectionId> named;
  for (const auto& [connection, worker] : workers_) {
    if (worker.registration.name() == name) named.push_back(connection);
  }
  return named;
}

std::vector<ConnectionId> Roster::Leaving() const {
  std::vector<ConnectionId> leaving;
  for (const auto& [connection, worker] : workers_) {
    if (worker.leaving) leaving.push_back(connection);
  }
  return leaving;
}

std::vector<ConnectionId> Roster::Staying() const {
  std::vector<ConnectionId> staying;
  for (const auto& [connection, worker] : workers_) {
    if (!worker.leaving) staying.push_back(connection);
  }
  return staying;
}

std::vector<ConnectionId> Roster::SilentSince(absl::Time time) const {
  std::vector<std::pair<absl::Time, ConnectionId>> silent;
  for (const auto& [connection, worker] : workers_) {
    if (worker.last_heard < time) silent.emplace_back(worker.last_heard, connection);
  }
  std::sort(silent.begin(), silent.end());
  std::vector<ConnectionId> connections;
  for (const auto& [last_heard, connection] : silent) connections.push_back(connection);
  return connections;
}

}  // namespace ringattn::server
