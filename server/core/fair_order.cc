#include "server/core/fair_order.h"

#include <algorithm>
#include <cassert>
#include <iterator>
#include <set>
#include <utility>

#include "absl/strings/string_view.h"

namespace ringattn::server {

void FairOrder::Enter(Id id, const std::string& client, double cost) {
  assert(cost >= 0 && !Has(id));
  double& clock = clocks_.emplace(client, now_).first->second;
  clock = std::max(clock, now_);
  Place& place = places_[id];
  place.client = client;
  place.start = clock;
  place.cost = cost;
  place.arrival = ++last_arrival_;
  clock += cost;
}

void FairOrder::Serve(Id id) {
  const auto found = places_.find(id);
  if (found == places_.end()) return;
  const Place served = std::move(found->second);
  places_.erase(found);
  now_ = std::max(now_, served.start);
  // One that was overdue had its turn: the next of them waits for as long again, or many of
  // them would lock everybody else out.
  const bool was_overdue = IsOverdue(served);
  for (auto& [other_id, other] : places_) {
    if (was_overdue) {
      other.passed = 0;
    } else if (other.arrival < served.arrival) {
      other.passed += served.cost;
    }
  }
  ForgetIdleClients();
}

void FairOrder::Leave(Id id) {
  const auto found = places_.find(id);
  if (found == places_.end()) return;
  // Its client's later requests move up.
  double& clock = clocks_.at(found->second.client);
  clock = std::max(now_, clock - found->second.cost);
  for (auto& [other_id, other] : places_) {
    if (other.client != found->second.client || other.arrival < found->second.arrival) continue;
    if (other_id != id) other.start -= found->second.cost;
  }
  places_.erase(found);
  ForgetIdleClients();
}

bool FairOrder::Before(Id a, Id b) const { return KeyOf(places_.at(a)) < KeyOf(places_.at(b)); }

void FairOrder::Sort(std::vector<Id>* ids) const {
  std::vector<std::pair<Key, Id>> keyed;
  keyed.reserve(ids->size());
  for (Id id : *ids) keyed.emplace_back(KeyOf(places_.at(id)), id);
  std::sort(keyed.begin(), keyed.end());
  for (size_t i = 0; i < keyed.size(); ++i) (*ids)[i] = keyed[i].second;
}

FairOrder::Key FairOrder::KeyOf(const Place& place) const {
  if (IsOverdue(place)) return {0, 0.0, 0.0, place.arrival};
  return {1, place.start, place.cost, place.arrival};
}

bool FairOrder::IsOverdue(const Place& place) const {
  return place.passed >= std::max(bounds_.passing_factor * place.cost, bounds_.passing_seconds);
}

// With nobody waiting all are equal again. While somebody waits, one whose clock stands behind
// the common one is no different from one who never asked; and of very many, those with the
// earliest clocks lose least by being forgotten.
void FairOrder::ForgetIdleClients() {
  if (places_.empty()) return clocks_.clear();
  std::set<absl::string_view> waiting;
  for (const auto& [id, place] : places_) waiting.insert(place.client);
  auto earliest = clocks_.end();
  for (auto clock = clocks_.begin(); clock != clocks_.end();) {
    if (waiting.count(clock->first) > 0) {
      ++clock;
    } else if (clock->second <= now_) {
      clock = clocks_.erase(clock);
    } else {
      if (earliest == clocks_.end() || clock->second < earliest->second) earliest = clock;
      ++clock;
    }
  }
  if (clocks_.size() > kMaxClients && earliest != clocks_.end()) clocks_.erase(earliest);
}

}  // namespace ringattn::server
