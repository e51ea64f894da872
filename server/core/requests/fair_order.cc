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
  const auto [place, is_new] = clients_.try_emplace(client_name);
  Client& client = place->second;
  if (is_new) client.name = client_name;
  if (client.entries == 0) {
    idle_.erase({client.clock, client.name});
    client.clock = std::max(client.clock, now_);
  }
  ++client.entries;
  Entry& entry = entries_[id];
  entry.id = id;
  entry.client = &client;
  entry.cost = expected_cost;
  entry.weight = weight;
  entry.not_before = now_;
  entry.arrival = ++last_arrival_;
  AddWaiting(entry);
  SetPlace(client);
}

void FairOrder::Start(Id id) {
  if (!Waits(id)) return;
  Entry& entry = entries_.at(id);
  Client& client = *entry.client;
  now_ = std::max(now_, StartOf(entry));
  entry.was_overdue = IsOverdue(entry);
  RemoveWaiting(entry);
  client.clock = std::max(client.clock, entry.not_before) + entry.cost / entry.weight;
  SetPlace(client);
  if (!entry.was_overdue) return;
  // After an overdue request, the counts of all others restart. Otherwise many overdue requests
  // would block everyone else.
  for (auto& [other_id, other] : entries_) other.passed = 0;
  overdue_.clear();
}

void FairOrder::Return(Id id) {
  if (!Has(id) || Waits(id)) return;
  Entry& entry = entries_.at(id);
  entry.client->clock -= entry.cost / entry.weight;
  entry.was_overdue = false;
  AddWaiting(entry);
  SetPlace(*entry.client);
}

void FairOrder::Finish(Id id, double used) {
  assert(used >= 0);
  const auto found = entries_.find(id);
  if (found == entries_.end()) return;
  Entry& ended = found->second;
  Client& client = *ended.client;
  if (ended.waits) {
    RemoveWaiting(ended);
    if (used > 0) client.clock = std::max(client.clock, ended.not_before) + used / ended.weight;
  } else {
    client.clock += (used - ended.cost) / ended.weight;
    CountPassing(ended, used);
  }
  SetPlace(client);
  entries_.erase(found);
  if (--client.entries == 0) idle_.emplace(client.clock, client.name);
  ForgetIdleClients();
}

bool FairOrder::Waits(Id id) const {
  const auto found = entries_.find(id);
  return found != entries_.end() && found->second.waits;
}

bool FairOrder::Before(Id a, Id b) const {
  std::vector<Id> both = {a, b};
  Sort(&both);
  return a != b && both.front() == a;
}

void FairOrder::Sort(std::vector<Id>* ids) const {
  if (ids->size() < 2) return;
  std::map<const Client*, std::set<Id>> by_client;
  for (Id id : *ids) {
    const Entry& entry = entries_.at(id);
    assert(entry.waits);
    by_client[entry.client].insert(id);
  }
  std::vector<std::pair<Key, Id>> keyed;
  keyed.reserve(ids->size());
  for (auto& [client, wanted] : by_client) {
    double finish = client->clock;
    for (auto next = client->waiting.begin(); !wanted.empty(); ++next, ++steps_) {
      assert(next != client->waiting.end());
      const Entry& entry = *next->second;
      const FinishKey key = FinishAfter(finish, entry);
      finish = std::get<0>(key);
      if (wanted.erase(entry.id) == 0) continue;
      keyed.push_back(
          {IsOverdue(entry) ? Key{0, {0.0, 0.0, entry.arrival}} : Key{1, key}, entry.id});
    }
  }
  std::sort(keyed.begin(), keyed.end());
  for (size_t i = 0; i < keyed.size(); ++i) (*ids)[i] = keyed[i].second;
}

void FairOrder::VisitWaiting(
    absl::FunctionRef<Visit(Id id, const std::string& client)> visit) const {
  std::set<const Client*> skipped;
  for (const auto& [arrival, entry] : overdue_) {
    ++steps_;
    if (skipped.count(entry->client) > 0) continue;
    const Visit then = visit(entry->id, entry->client->name);
    if (then == Visit::kStop) return;
    if (then == Visit::kSkipClient) skipped.insert(entry->client);
  }
  // The next request of every client of which one was passed. The next ones of all others are in
  // heads_, from `head` on.
  struct Position {
    FinishKey key;
    const Client* client = nullptr;
    OwnOrder::const_iterator next;
  };
  const auto later = [](const Position& a, const Position& b) { return a.key > b.key; };
  std::vector<Position> passed;  // a heap
  auto head = heads_.begin();
  while (head != heads_.end() || !passed.empty()) {
    Position at;
    if (passed.empty() || (head != heads_.end() && head->first < passed.front().key)) {
      at = {head->first, head->second, head->second->waiting.begin()};
      ++head;
    } else {
      std::pop_heap(passed.begin(), passed.end(), later);
      at = passed.back();
      passed.pop_back();
    }
    ++steps_;
    if (!skipped.empty() && skipped.count(at.client) > 0) continue;
    const Entry& entry = *at.next->second;
    if (!IsOverdue(entry)) {
      const Visit then = visit(entry.id, at.client->name);
      if (then == Visit::kStop) return;
      if (then == Visit::kSkipClient) continue;
    }
    if (++at.next == at.client->waiting.end()) continue;
    at.key = FinishAfter(std::get<0>(at.key), *at.next->second);
    passed.push_back(at);
    std::push_heap(passed.begin(), passed.end(), later);
  }
}

FairOrder::OwnKey FairOrder::OwnKeyOf(const Entry& entry) {
  return {CostClass(entry.cost), entry.arrival};
}

double FairOrder::StartAfter(double earliest, const Entry& entry) {
  return std::max(earliest, entry.not_before);
}

FairOrder::FinishKey FairOrder::FinishAfter(double earliest, const Entry& entry) {
  return {StartAfter(earliest, entry) + entry.cost / entry.weight, entry.cost, entry.arrival};
}

double FairOrder::StartOf(const Entry& entry) const {
  double finish = entry.client->clock;
  for (const auto& [key, other] : entry.client->waiting) {
    ++steps_;
    if (other == &entry) break;
    finish = std::get<0>(FinishAfter(finish, *other));
  }
  return StartAfter(finish, entry);
}

bool FairOrder::IsOverdue(const Entry& entry) const {
  return entry.passed >= std::max(bounds_.passing_factor * entry.cost, bounds_.passing_seconds);
}

void FairOrder::AddWaiting(Entry& entry) {
  entry.waits = true;
  entry.client->waiting.emplace(OwnKeyOf(entry), &entry);
  entry.client->by_arrival.emplace(entry.arrival, &entry);
  if (IsOverdue(entry)) overdue_.emplace(entry.arrival, &entry);
}

void FairOrder::RemoveWaiting(Entry& entry) {
  entry.waits = false;
  entry.client->waiting.erase(OwnKeyOf(entry));
  entry.client->by_arrival.erase(entry.arrival);
  overdue_.erase(entry.arrival);
}

void FairOrder::SetPlace(Client& client) {
  std::optional<FinishKey> head;
  std::optional<uint64_t> oldest;
  if (!client.waiting.empty()) {
    head = FinishAfter(client.clock, *client.waiting.begin()->second);
    oldest = client.by_arrival.begin()->first;
  }
  if (head != client.head) {
    if (client.head) heads_.erase(*client.head);
    if (head) heads_.emplace(*head, &client);
    client.head = head;
  }
  if (oldest != client.oldest) {
    if (client.oldest) oldest_.erase(*client.oldest);
    if (oldest) oldest_.emplace(*oldest, &client);
    client.oldest = oldest;
  }
}

// Only the oldest request of each client counts, because the others wait for their own client.
// Overdue requests were served by right and count for none.
void FairOrder::CountPassing(const Entry& ended, double used) {
  if (ended.was_overdue) return;
  for (const auto& [arrival, client] : oldest_) {
    if (arrival >= ended.arrival) return;
    ++steps_;
    Entry& oldest = *client->by_arrival.begin()->second;
    oldest.passed += used;
    if (IsOverdue(oldest)) overdue_.emplace(arrival, &oldest);
  }
}

// If no request waits or runs, all clients are equal and forgotten. Otherwise a client whose clock
// is not ahead of the common clock equals a new client and is forgotten. Beyond kMaxClients, the
// client with the earliest clock loses the least.
void FairOrder::ForgetIdleClients() {
  if (entries_.empty()) {
    idle_.clear();
    return clients_.clear();
  }
  const auto forget_first = [this] {
    ++steps_;
    clients_.erase(idle_.begin()->second);
    idle_.erase(idle_.begin());
  };
  while (!idle_.empty() && idle_.begin()->first <= now_) forget_first();
  if (!idle_.empty() && clients_.size() > kMaxClients) forget_first();
}

}  // namespace ringattn::server
