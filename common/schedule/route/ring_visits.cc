#include "common/schedule/route/ring_visits.h"

#include <algorithm>
#include <map>
#include <utility>

namespace ringattn {
namespace {

using Distance = std::pair<int, int>;  // outer, inner

// Returns the number of inner hops of round 0 that precede the other rounds. Keys of 16 bits have a
// third of all bytes between groups, so they get a third of round 0.
int FirstVisits(int group_size) { return std::max(1, (group_size + 1) / 3); }

std::vector<Distance> DistancesInOrder(int groups, int group_size, VisitOrder order) {
  std::vector<Distance> distances = {{0, 0}};
  const auto add_inner = [&](int outer, int begin, int end) {
    for (int inner = begin; inner < end; ++inner) distances.emplace_back(outer, inner);
  };
  const bool collectors_last = order == VisitOrder::kCollectorsLast;
  const int split = collectors_last && groups > 1
                        ? std::min(group_size, FirstVisits(group_size) + 1)
                        : group_size;
  add_inner(0, 1, split);
  for (int outer = 1; outer < groups; ++outer) {
    if (!collectors_last) distances.emplace_back(outer, 0);
    add_inner(outer, 1, group_size);
    if (collectors_last) distances.emplace_back(outer, 0);
  }
  add_inner(0, split, group_size);
  return distances;
}

class VisitTimes {
 public:
  explicit VisitTimes(std::vector<RingVisit>& visits) : visits_(visits) {
    for (size_t k = 0; k < visits.size(); ++k) {
      index_[{visits[k].outer, visits[k].inner}] = static_cast<int>(k);
    }
  }

  // Inner hops travel during the visit before their own. A chain that resumes after other rounds
  // gets the block from its owner, because its last holder has dropped it.
  void SetInnerHops() {
    for (int k = 1; k < static_cast<int>(visits_.size()); ++k) {
      RingVisit& visit = visits_[k];
      if (visit.is_outer_hop()) continue;
      visit.fetch_begin = visit.fetch_end = k - 1;
      const auto before = index_.find({visit.outer, visit.inner - 1});
      const bool follows = visit.inner == 1 || (before != index_.end() && before->second == k - 1);
      visit.sender = follows ? before->second : index_.at({visit.outer, 0});
    }
  }

  // Every outer hop ends in time for the first inner hop of its round, for its own visit and for
  // the next outer hop, and begins when the one before has ended.
  void SetOuterHops() {
    std::vector<int> hops;  // in the order of rounds
    for (int outer = 1; index_.count({outer, 0}) > 0; ++outer) hops.push_back(index_[{outer, 0}]);
    for (size_t i = hops.size(); i-- > 0;) {
      RingVisit& hop = visits_[hops[i]];
      hop.fetch_end = hops[i] - 1;
      const auto inner = index_.find({hop.outer, 1});
      if (inner != index_.end()) {
        hop.fetch_end = std::min(hop.fetch_end, visits_[inner->second].fetch_begin - 1);
      }
      if (i + 1 < hops.size()) {
        hop.fetch_end = std::min(hop.fetch_end, visits_[hops[i + 1]].fetch_end - 1);
      }
    }
    for (size_t i = 0; i < hops.size(); ++i) {
      RingVisit& hop = visits_[hops[i]];
      hop.sender = i == 0 ? 0 : hops[i - 1];
      hop.fetch_begin = i == 0 ? 0 : visits_[hops[i - 1]].fetch_end + 1;
    }
  }

  void SetChains() {
    int arrives = static_cast<int>(visits_.size());
    for (size_t k = visits_.size(); k-- > 0;) {
      if (!visits_[k].is_outer_hop()) continue;
      visits_[k].sum_arrives = std::exchange(arrives, static_cast<int>(k));
    }
    for (RingVisit& visit : visits_) {
      if (visit.outer > 0) visit.collector = index_.at({visit.outer, 0});
      if (visit.inner == 0) continue;
      const auto next = index_.find({visit.outer, visit.inner + 1});
      if (next != index_.end()) visit.chain_next = next->second;
    }
  }

 private:
  std::vector<RingVisit>& visits_;
  std::map<Distance, int> index_;
};

}  // namespace

std::vector<RingVisit> OrderVisits(int groups, int group_size, VisitOrder order,
                                   const std::function<bool(int outer, int inner)>& is_used) {
  std::vector<RingVisit> visits;
  for (const auto& [outer, inner] : DistancesInOrder(groups, group_size, order)) {
    // The first inner hop of round 0 stays even if no rank uses it: the first outer hop needs a
    // visit during which it travels.
    const bool holds_place = groups > 1 && outer == 0 && inner == 1;
    if (inner + outer > 0 && !holds_place && !is_used(outer, inner)) continue;
    RingVisit visit;
    visit.outer = outer;
    visit.inner = inner;
    visits.push_back(visit);
  }
  VisitTimes times(visits);
  times.SetInnerHops();
  times.SetOuterHops();
  times.SetChains();
  return visits;
}

}  // namespace ringattn
