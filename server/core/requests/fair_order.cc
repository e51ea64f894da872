#include "server/core/requests/fair_order.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <utility>

namespace ringattn::server {
namespace {

// Costs below this count as equal, because such requests delay each other unnoticeably.
constexpr double kShortSeconds = 0.01;

// Cost classes are a factor of eight apart: a request delays one of the next class by at most an
// eighth.
int CostClass(double cost) {
  return static_cast<int>(std::floor(std::ilogb(std::max(cost, kShortSeconds)) / 3.0));
}

}  // namespace

void FairOrder::Enter(Id id, const std::string& client_name, double expected_cost, double weight) {
  assert(expected_cost >= 0 && weight > 0 && !Has(id));
  Client& client = clients_[client_name];
  if (client.entries == 0) client.clock = std::max(client.clock, now_);
  ++client.entries;
  Entry& entry = entries_[id];
  entry.client = client_name;
  entry.cost = expected_cost;
  entry.weight = weight;
  entry.not_before = now_;
  entry.arrival = ++last_arrival_;
  client.waiting.insert(OwnKeyOf(id, entry));
  SetStarts(client);
}

void FairOrder::Start(Id id) {
  if (!Waits(id)) return;
  Entry& entry = entries_.at(id);
  Client& client = clients_.at(entry.client);
  client.waiting.erase(OwnKeyOf(id, entry));
  entry.waits = false;
  entry.was_overdue = IsOverdue(entry);
  now_ = std::max(now_, entry.start);
  client.clock = std::max(client.clock, entry.not_before) + entry.cost / entry.weight;
  SetStarts(client);
  if (!entry.was_overdue) return;
  // After an overdue request, the counts of all others restart. Otherwise many overdue requests
  // would block everyone else.
  for (auto& [other_id, other] : entries_) other.passed = 0;
}

void FairOrder::Return(Id id) {
  if (!Has(id) || Waits(id)) return;
  Entry& entry = entries_.at(id);
  Client& client = clients_.at(entry.client);
  client.clock -= entry.cost / entry.weight;
  entry.waits = true;
  entry.was_overdue = false;
  client.waiting.insert(OwnKeyOf(id, entry));
  SetStarts(client);
}

void FairOrder::Finish(Id id, double used) {
  assert(used >= 0);
  const auto found = entries_.find(id);
  if (found == entries_.end()) return;
  const Entry ended = std::move(found->second);
  Client& client = clients_.at(ended.client);
  entries_.erase(found);
  --client.entries;
  if (ended.waits) {
    client.waiting.erase(OwnKeyOf(id, ended));
    if (used > 0) client.clock = std::max(client.clock, ended.not_before) + used / ended.weight;
  } else {
    client.clock += (used - ended.cost) / ended.weight;
    CountPassing(ended, used);
  }
  SetStarts(client);
  ForgetIdleClients();
}

bool FairOrder::Waits(Id id) const {
  const auto found = entries_.find(id);
  return found != entries_.end() && found->second.waits;
}

bool FairOrder::Before(Id a, Id b) const { return KeyOf(entries_.at(a)) < KeyOf(entries_.at(b)); }

void FairOrder::Sort(std::vector<Id>* ids) const {
  std::vector<std::pair<Key, Id>> keyed;
  keyed.reserve(ids->size());
  for (Id id : *ids) keyed.emplace_back(KeyOf(entries_.at(id)), id);
  std::sort(keyed.begin(), keyed.end());
  for (size_t i = 0; i < keyed.size(); ++i) (*ids)[i] = keyed[i].second;
}

FairOrder::OwnKey FairOrder::OwnKeyOf(Id id, const Entry& entry) {
  return {CostClass(entry.cost), entry.arrival, id};
}

FairOrder::Key FairOrder::KeyOf(const Entry& entry) const {
  assert(entry.waits);
  if (IsOverdue(entry)) return {0, 0.0, 0.0, entry.arrival};
  return {1, entry.start + entry.cost / entry.weight, entry.cost, entry.arrival};
}

bool FairOrder::IsOverdue(const Entry& entry) const {
  return entry.passed >= std::max(bounds_.passing_factor * entry.cost, bounds_.passing_seconds);
}

void FairOrder::SetStarts(const Client& client) {
  double start = client.clock;
  for (const auto& [cost_class, arrival, id] : client.waiting) {
    Entry& entry = entries_.at(id);
    entry.start = start = std::max(start, entry.not_before);
    start += entry.cost / entry.weight;
  }
}

// Only the oldest request of each client counts, because the others wait for their own client.
// Overdue requests were served by right and count for none.
void FairOrder::CountPassing(const Entry& ended, double used) {
  if (ended.was_overdue) return;
  for (auto& [name, client] : clients_) {
    Entry* oldest = nullptr;
    for (const auto& [cost_class, arrival, id] : client.waiting) {
      if (oldest == nullptr || arrival < oldest->arrival) oldest = &entries_.at(id);
    }
    if (oldest != nullptr && oldest->arrival < ended.arrival) oldest->passed += used;
  }
}

// If no request waits or runs, all clients are equal and forgotten. Otherwise a client whose clock
// is not ahead of the common clock equals a new client and is forgotten. Beyond kMaxClients, the
// client with the earliest clock loses the least.
void FairOrder::ForgetIdleClients() {
  if (entries_.empty()) return clients_.clear();
  auto earliest = clients_.end();
  for (auto client = clients_.begin(); client != clients_.end();) {
    if (client->second.entries > 0) {
      ++client;
    } else if (client->second.clock <= now_) {
      client = clients_.erase(client);
    } else {
      const bool is_earlier =
          earliest == clients_.end() || client->second.clock < earliest->second.clock;
      if (is_earlier) earliest = client;
      ++client;
    }
  }
  if (clients_.size() > kMaxClients && earliest != clients_.end()) clients_.erase(earliest);
}

}  // namespace ringattn::server
