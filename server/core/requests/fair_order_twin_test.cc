// Compares FairOrder with a simple twin that sorts all requests after every change.
#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/core/requests/fair_order.h"

namespace ringattn::server {
namespace {

using Id = FairOrder::Id;
using Ids = std::vector<Id>;

// The rules of fair_order.h, without memory of clients that are idle for good.
class SimpleOrder {
 public:
  explicit SimpleOrder(const FairOrder::Bounds& bounds) : bounds_(bounds) {}

  void Enter(Id id, const std::string& client, double cost, double weight) {
    const bool is_idle = std::none_of(entries_.begin(), entries_.end(), [&](const auto& other) {
      return other.second.client == client;
    });
    double& clock = clocks_[client];
    if (is_idle) clock = std::max(clock, now_);
    entries_[id] = {client, cost, weight, now_, ++last_arrival_};
  }
  void Start(Id id) {
    now_ = std::max(now_, Starts().at(id));
    Entry& entry = entries_.at(id);
    entry.was_overdue = IsOverdue(entry);
    entry.waits = false;
    double& clock = clocks_[entry.client];
    clock = std::max(clock, entry.not_before) + entry.cost / entry.weight;
    if (!entry.was_overdue) return;
    for (auto& [other_id, other] : entries_) other.passed = 0;
  }
  void Return(Id id) {
    Entry& entry = entries_.at(id);
    clocks_[entry.client] -= entry.cost / entry.weight;
    entry.waits = true;
    entry.was_overdue = false;
  }
  void Finish(Id id, double used) {
    const Entry ended = entries_.at(id);
    entries_.erase(id);
    double& clock = clocks_[ended.client];
    if (ended.waits) {
      if (used > 0) clock = std::max(clock, ended.not_before) + used / ended.weight;
    } else {
      clock += (used - ended.cost) / ended.weight;
      if (!ended.was_overdue) CountPassing(ended, used);
    }
    if (entries_.empty()) clocks_.clear();
  }

  // All waiting requests in order of service.
  Ids Sorted() const {
    std::vector<std::pair<std::tuple<int, double, double, uint64_t>, Id>> keyed;
    const std::map<Id, double> starts = Starts();
    for (const auto& [id, entry] : entries_) {
      if (!entry.waits) continue;
      const double finish = starts.at(id) + entry.cost / entry.weight;
      keyed.push_back({IsOverdue(entry) ? std::make_tuple(0, 0.0, 0.0, entry.arrival)
                                        : std::make_tuple(1, finish, entry.cost, entry.arrival),
                       id});
    }
    std::sort(keyed.begin(), keyed.end());
    Ids ids;
    for (const auto& [key, id] : keyed) ids.push_back(id);
    return ids;
  }
  int64_t overdue() const {
    return std::count_if(entries_.begin(), entries_.end(), [this](const auto& entry) {
      return entry.second.waits && IsOverdue(entry.second);
    });
  }

 private:
  struct Entry {
    std::string client;
    double cost = 0, weight = 1, not_before = 0;
    uint64_t arrival = 0;
    double passed = 0;
    bool waits = true, was_overdue = false;
  };

  bool IsOverdue(const Entry& entry) const {
    return entry.passed >= std::max(bounds_.passing_factor * entry.cost, bounds_.passing_seconds);
  }
  // The waiting requests of each client, in its own order: cost classes from 10 ms, then arrival.
  std::map<std::string, Ids> Own() const {
    std::map<std::string, std::map<std::pair<int, uint64_t>, Id>> sorted;
    for (const auto& [id, entry] : entries_) {
      const int cost_class =
          static_cast<int>(std::floor(std::ilogb(std::max(entry.cost, 0.01)) / 3.0));
      if (entry.waits) sorted[entry.client][{cost_class, entry.arrival}] = id;
    }
    std::map<std::string, Ids> own;
    for (const auto& [client, requests] : sorted) {
      for (const auto& [key, id] : requests) own[client].push_back(id);
    }
    return own;
  }
  std::map<Id, double> Starts() const {
    std::map<Id, double> starts;
    for (const auto& [client, ids] : Own()) {
      double start = clocks_.at(client);
      for (Id id : ids) {
        const Entry& entry = entries_.at(id);
        starts[id] = start = std::max(start, entry.not_before);
        start += entry.cost / entry.weight;
      }
    }
    return starts;
  }
  void CountPassing(const Entry& ended, double used) {
    for (const auto& [client, ids] : Own()) {
      Entry* oldest = nullptr;
      for (Id id : ids) {
        Entry& entry = entries_.at(id);
        if (oldest == nullptr || entry.arrival < oldest->arrival) oldest = &entry;
      }
      if (oldest->arrival < ended.arrival) oldest->passed += used;
    }
  }

  const FairOrder::Bounds bounds_;
  std::map<Id, Entry> entries_;
  std::map<std::string, double> clocks_;
  double now_ = 0;
  uint64_t last_arrival_ = 0;
};

Ids Visited(const FairOrder& order) {
  Ids ids;
  order.VisitWaiting([&](Id id, const std::string&) {
    ids.push_back(id);
    return FairOrder::Visit::kNext;
  });
  return ids;
}

TEST(FairOrderTwin, RandomChangesGiveTheSameOrder) {
  std::mt19937 random(1);
  const auto below = [&](int limit) { return static_cast<int>(random() % limit); };
  int64_t overdue = 0;
  for (int round = 0; round < 100; ++round) {
    const FairOrder::Bounds bounds{/*passing_factor=*/2, /*passing_seconds=*/0.5};
    FairOrder order(bounds);
    SimpleOrder twin(bounds);
    Ids waiting, running;
    const auto take = [&](Ids* from) {
      std::swap((*from)[below(static_cast<int>(from->size()))], from->back());
      const Id id = from->back();
      from->pop_back();
      return id;
    };
    const auto seconds = [&] { return std::ldexp(1 + below(7), below(12) - 8); };
    const auto finish = [&](Id id, double used) {
      order.Finish(id, used);
      twin.Finish(id, used);
    };
    for (Id next = 1; next < 300; ++next) {
      const int what = below(8);
      if (what < 3) {
        const std::string client = absl::StrCat("client-", below(6));
        const double cost = seconds(), weight = 1 + below(3);
        order.Enter(next, client, cost, weight);
        twin.Enter(next, client, cost, weight);
        waiting.push_back(next);
      } else if (what < 5 && !waiting.empty()) {
        running.push_back(take(&waiting));
        order.Start(running.back());
        twin.Start(running.back());
      } else if (what < 7 && !running.empty()) {
        finish(take(&running), seconds());
      } else if (below(2) == 0 && !running.empty()) {
        waiting.push_back(take(&running));
        order.Return(waiting.back());
        twin.Return(waiting.back());
      } else if (!waiting.empty()) {
        finish(take(&waiting), below(2));
      }
      const Ids sorted = twin.Sorted();
      ASSERT_EQ(Visited(order), sorted) << "round " << round << ", change " << next;
      order.Sort(&waiting);
      ASSERT_EQ(waiting, sorted) << "round " << round << ", change " << next;
      overdue += twin.overdue();
    }
  }
  EXPECT_GT(overdue, 1000);
}

}  // namespace
}  // namespace ringattn::server
