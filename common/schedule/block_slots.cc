#include "common/schedule/block_slots.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn {
namespace {

// Assigns numbered slots to uses in the order of their beginnings. Times are steps of the pass.
class SlotPool {
 public:
  // Returns a slot for data that arrives during `begin` and is last used during `end`: `preferred`,
  // or else the lowest, whose earlier data were last used before `begin`.
  int Take(int begin, int end, int preferred) {
    int slot = preferred;
    if (!IsFree(preferred, begin)) {
      for (slot = 0; !IsFree(slot, begin); ++slot) {
      }
    }
    if (slot >= size()) used_until_.resize(slot + 1, -1);
    used_until_[slot] = end;
    return slot;
  }

  int size() const { return static_cast<int>(used_until_.size()); }

 private:
  bool IsFree(int slot, int begin) const { return slot >= size() || used_until_[slot] < begin; }

  std::vector<int> used_until_;
};

// Data that need a slot.
struct SlotUse {
  int begin = 0;
  int end = 0;
  int preferred = 0;
  int* slot = nullptr;  // the result
};

// Returns the number of slots.
int AssignSlots(std::vector<SlotUse> uses) {
  SlotPool pool;
  std::stable_sort(uses.begin(), uses.end(),
                   [](const SlotUse& a, const SlotUse& b) { return a.begin < b.begin; });
  for (const SlotUse& use : uses) *use.slot = pool.Take(use.begin, use.end, use.preferred);
  return pool.size();
}

// Returns by step the last step during which its K/V block is in use: its own computation, or a
// transfer to the visits that get it from there.
std::vector<int> LastUses(const KvRoute& route, bool keeps_home) {
  std::vector<int> last;
  for (int step = 0; step < route.steps(); ++step) last.push_back(step);
  for (int step = 1; step < route.steps(); ++step) {
    int& sender = last[route.SenderStep(step)];
    sender = std::max(sender, route.visits[step].fetch_end);
  }
  if (keeps_home) last[0] = route.steps();
  return last;
}

}  // namespace

BlockSlots::BlockSlots(const KvRoute& route, bool keeps_home)
    : route_(route),
      kv_slots_(route.steps(), kHome),
      gradient_slots_(route.steps(), kVisits),
      outer_landings_(route.steps(), kVisits) {
  const std::vector<int> last_uses = LastUses(route, keeps_home);
  std::vector<SlotUse> keys, gradients;
  for (int step = 0; step < route.steps(); ++step) {
    const RingVisit& visit = route.visits[step];
    // The own block is there before all transfers.
    keys.push_back({step == 0 ? -1 : visit.fetch_begin, last_uses[step], kHome, &kv_slots_[step]});
    if (step > 0) fetch_order_.push_back(step);
  }
  std::stable_sort(fetch_order_.begin(), fetch_order_.end(), [&](int a, int b) {
    return route.visits[a].fetch_begin < route.visits[b].fetch_begin;
  });
  claimed_by_.assign(AssignSlots(std::move(keys)), -1);
  claimed_by_[kHome] = 0;

  // By step: when gradients arrive from the chain's visit before; without one, accumulators of
  // zeros are needed when the visit computes.
  std::vector<int> arrivals;
  for (int step = 0; step < route.steps(); ++step) arrivals.push_back(step - 1);
  for (int step = 1; step < route.steps() && !route.direct; ++step) {
    const RingVisit& visit = route.visits[step];
    if (visit.chain_next != RingVisit::kNone) arrivals[visit.chain_next] = step;
    if (visit.collector > 0) {
      arrivals[visit.collector] = std::min(arrivals[visit.collector], step);
    }
  }
  for (int step = 1; step < route.steps(); ++step) {
    const bool collects = !route.direct && route.visits[step].is_outer_hop();
    const int last = collects ? route.visits[step].sum_arrives : std::max(step, arrivals[step]);
    gradients.push_back({arrivals[step], last, step % 2, &gradient_slots_[step]});
    if (collects) gradients.push_back({step, last, 0, &outer_landings_[step]});
  }
  AssignSlots(std::move(gradients));
  for (int step = 1; step < route.steps(); ++step) {
    gradient_slots_[step] += kVisits;
    outer_landings_[step] += kVisits;
  }
}

std::vector<std::string> BlockSlots::KvNames() const {
  std::vector<std::string> names = {"home"};
  while (names.size() < claimed_by_.size()) names.push_back(absl::StrCat("kv_slot", names.size()));
  return names;
}

std::vector<std::string> BlockSlots::GradientNames() const {
  std::vector<std::string> names = {"home", "landing0", "landing1"};
  int last = kVisits;
  for (const std::vector<int>* slots : {&gradient_slots_, &outer_landings_}) {
    last = std::max(last, *std::max_element(slots->begin(), slots->end()));
  }
  for (int slot = kVisits; slot <= last; ++slot) {
    names.push_back(absl::StrCat("dkv_slot", slot - kVisits));
  }
  return names;
}

std::vector<char> BlockSlots::ClaimAll() {
  std::vector<char> fetch(route_.steps(), 0);
  for (int step : fetch_order_) {
    fetch[step] = std::exchange(claimed_by_[kv_slots_[step]], step) != step;
  }
  return fetch;
}

BlockLocation BlockSlots::InBlock(int slot, int source, int step, const RowRange& rows) const {
  int64_t rows_before = 0;
  for (const RowRange& range : route_.Held(step, source)) {
    if (range.begin <= rows.begin && rows.end <= range.end) return {slot, rows_before, range};
    rows_before += range.size();
  }
  assert(false && "rows are not part of the block");
  return {};
}

BlockLocation BlockSlots::Kv(int source, int step, const RowRange& rows) const {
  return InBlock(kv_slots_[step], source, step, rows);
}

BlockLocation BlockSlots::Gradients(int source, int step, const RowRange& rows) const {
  return InBlock(gradient_slots_[step], source, step, rows);
}

BlockLocation BlockSlots::HomeGradients(int source) const {
  return {kGradientHome, 0, {0, route_.kv_rows[source]}};
}

BlockLocation BlockSlots::Landing(int64_t at, const RowRange& part, const RowRange& rows) {
  return {kLanding + static_cast<int>(at % 2), rows.begin - part.begin, rows};
}

BlockLocation BlockSlots::OuterLanding(int source, int step, const RowRange& rows) const {
  return InBlock(outer_landings_[step], source, step, rows);
}

}  // namespace ringattn
