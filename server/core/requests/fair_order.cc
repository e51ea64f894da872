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
  if (client.places == 0) client.clock = std::max(client.clock, now_);
  ++client.places;
  Place& place = places_[id];
  place.client = client_name;
  place.cost = expected_cost;
  place.weight = weight;
  place.not_before = now_;
  place.arrival = ++last_arrival_;
  client.waiting.insert(OwnKeyOf(id, place));
  SetStarts(client);
}

void FairOrder::Start(Id id) {
  if (!Waits(id)) return;
  Place& place = places_.at(id);
  Client& client = clients_.at(place.client);
  client.waiting.erase(OwnKeyOf(id, place));
  place.waits = false;
  place.was_overdue = IsOverdue(place);
  now_ = std::max(now_, place.start);
  client.clock = std::max(client.clock, place.not_before) + place.cost / place.weight;
  SetStarts(client);
  if (!place.was_overdue) return;
  // After an overdue request, the counts of all others restart. Otherwise many overdue requests
  // would block everyone else.
  for (auto& [other_id, other] : places_) other.passed = 0;
}

void FairOrder::Finish(Id id, double used) {
  assert(used >= 0);
  const auto found = places_.find(id);
  if (found == places_.end()) return;
  const Place ended = std::move(found->second);
  Client& client = clients_.at(ended.client);
  places_.erase(found);
  --client.places;
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
  const auto found = places_.find(id);
  return found != places_.end() && found->second.waits;
}

bool FairOrder::Before(Id a, Id b) const { return KeyOf(places_.at(a)) < KeyOf(places_.at(b)); }

void FairOrder::Sort(std::vector<Id>* ids) const {
  std::vector<std::pair<Key, Id>> keyed;
  keyed.reserve(ids->size());
  for (Id id : *ids) keyed.emplace_back(KeyOf(places_.at(id)), id);
  std::sort(keyed.begin(), keyed.end());
  for (size_t i = 0; i < keyed.size(); ++i) (*ids)[i] = keyed[i].second;
}

FairOrder::OwnKey FairOrder::OwnKeyOf(Id id, const Place& place) {
  return {CostClass(place.cost), place.arrival, id};
}

FairOrder::Key FairOrder::KeyOf(const Place& place) const {
  assert(place.waits);
  if (IsOverdue(place)) return {0, 0.0, 0.0, place.arrival};
  return {1, place.start, place.cost, place.arrival};
}

bool FairOrder::IsOverdue(const Place& place) const {
  return place.passed >= std::max(bounds_.passing_factor * place.cost, bounds_.passing_seconds);
}

void FairOrder::SetStarts(const Client& client) {
  double start = client.clock;
  for (const auto& [cost_class, arrival, id] : client.waiting) {
    Place& place = places_.at(id);
    place.start = start = std::max(start, place.not_before);
    start += place.cost / place.weight;
  }
}

// Only the oldest request of each client counts, because the others wait for their own client.
// Overdue requests were served by right and count for none.
void FairOrder::CountPassing(const Place& ended, double used) {
  if (ended.was_overdue) return;
  for (auto& [name, client] : clients_) {
    Place* oldest = nullptr;
    for (const auto& [cost_class, arrival, id] : client.waiting) {
      if (oldest == nullptr || arrival < oldest->arrival) oldest = &places_.at(id);
    }
    if (oldest != nullptr && oldest->arrival < ended.arrival) oldest->passed += used;
  }
}

// If no request waits or runs, all clients are equal and forgotten. Otherwise a client whose clock
// is not ahead of the common clock equals a new client and is forgotten. Beyond kMaxClients, the
// client with the earliest clock loses the least.
void FairOrder::ForgetIdleClients() {
  if (places_.empty()) return clients_.clear();
  auto earliest = clients_.end();
  for (auto client = clients_.begin(); client != clients_.end();) {
    if (client->second.places > 0) {
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
