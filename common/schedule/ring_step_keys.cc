#include "common/schedule/ring_step_keys.h"

#include <algorithm>

#include "common/program/lane.h"

namespace ringattn {

RingStepKeys::RingStepKeys(const ScheduleContext& context, const RingRoute& route,
                           const RingWork& work, const std::vector<int>& host_of_rank)
    : route_(*route.kv),
      slots_(route.slots),
      passes_(route.passes),
      pieces_(route.pieces),
      work_(work),
      spec_(context.spec),
      host_of_rank_(host_of_rank),
      backward_steps_(route_, HasForward(context.recipe) ? route_.steps() : 0),
      links_(route_.steps() + 1) {
  for (int rank = 0; rank < route_.world_size; ++rank) {
    rows_.push_back(lists_.NumberOf(
        {route_.q_rows[rank], route_.kv_rows[rank], RowsIn(context.plan.chosen[rank])}));
  }
  for (int visit = 1; visit < route_.steps(); ++visit) {
    links_[route_.visits[visit].fetch_begin].fetches.push_back(visit);
    if (Collects(visit)) links_[route_.visits[visit].sum_arrives].sums.push_back(visit);
  }
  used_until_ = {0};
  for (char used : passes_.used_steps) used_until_.push_back(used_until_.back() + used);
}

int RingStepKeys::width() const {
  size_t fetches = 0, sums = 0;
  for (const VisitLinks& links : links_) {
    fetches = std::max(fetches, links.fetches.size());
    sums = std::max(sums, links.sums.size());
  }
  return static_cast<int>(6 + 5 * fetches + sums + 12);
}

int32_t RingStepKeys::FormOf(bool backward, int visit) {
  const int last = route_.steps() - 1;
  std::vector<int64_t> form = {backward, visit > last, visit == 0,
                               std::min(std::max(last - visit, 0), kMostVisitsBefore)};
  for (int collector : links_[visit].sums) {
    if (backward) form.insert(form.end(), {-1, slots_.OuterLandingSlot(collector)});
  }
  if (visit > last) return lists_.NumberOf(form);
  const RingVisit& own = route_.visits[visit];
  form.insert(form.end(), {-2, slots_.KvSlot(visit), slots_.GradientSlot(visit), own.is_outer_hop(),
                           route_.direct ? own.inner : 0});
  if (backward) {
    const int parts = visit == 0 ? 1 : route_.parts;
    for (int part = 0; part < parts; ++part) {
      form.push_back(UsedSteps(backward_steps_.Of(visit, part), 1));
    }
    form.push_back(visit == 1 ? -1 : route_.first_parts[visit]);  // gradients start from zero
    // Landings alternate (BlockSlots::Landing).
    form.push_back(backward_steps_.Of(visit, 0) % 2);
    AddChainTo(visit, form);
  } else {
    form.push_back(UsedSteps(visit, 1));
  }
  for (int fetched : links_[visit].fetches) AddFetchTo(backward, visit, fetched, form);
  return lists_.NumberOf(form);
}

std::pair<int, int> RingStepKeys::CallsOf(int rank) const {
  std::pair<int, int> calls{-1, -1};
  for (int visit = 0; visit < route_.steps(); ++visit) {
    if (!HasWork(visit, route_.SourceOf(rank, visit))) continue;
    if (calls.first < 0) calls.first = visit;
    calls.second = visit;
  }
  return calls;
}

void RingStepKeys::Set(int rank, bool backward, int visit, int32_t form,
                       const std::pair<int, int>& calls, StepKey& key) {
  rank_ = rank;
  flags_ = flag_ = 0;
  key.Clear();
  key.Add(form);
  key.Add(rows_[rank]);
  if (backward) {
    if (visit == 0) order_ = OwnBlockOrderOf(route_, rank);
    const bool ends = visit == route_.steps() || route_.steps() == 1;
    if (visit == 0 || ends) key.Add(OrderOf(visit == 0, ends));
    for (int collector : links_[visit].sums) key.Add(route_.BlockId(collector, rank));
  }
  if (visit == route_.steps()) return;
  const int source = route_.SourceOf(rank, visit);
  key.Add(route_.BlockId(visit, source));
  key.Add(work_.Id(visit, source));
  for (int fetched : links_[visit].fetches) SetFetch(visit, fetched, key);
  if (backward) {
    SetGradients(visit, source, key);
  } else {
    AddFlag(calls.first == visit);
    AddFlag(calls.second == visit);
    AddFlag(calls.first < 0);
  }
  key.Add(flags_);
}

bool RingStepKeys::Collects(int visit) const {
  return !route_.direct && route_.visits[visit].is_outer_hop();
}

int64_t RingStepKeys::UsedSteps(int64_t first, int64_t count) const {
  const int64_t steps = static_cast<int64_t>(used_until_.size()) - 1;
  return used_until_[std::min(first + count, steps)] - used_until_[std::min(first, steps)];
}

void RingStepKeys::AddFetchTo(bool backward, int visit, int fetched,
                              std::vector<int64_t>& form) const {
  const RingVisit& next = route_.visits[fetched];
  const int sender = route_.SenderStep(fetched);
  form.insert(form.end(), {-3, slots_.KvSlot(fetched), slots_.KvSlot(sender), sender == visit,
                           next.is_outer_hop(), route_.direct ? next.inner : 0});
  if (!backward) {
    form.push_back(UsedSteps(visit, next.fetch_end + 1 - visit));
    return;
  }
  form.push_back(passes_.backward_fetches[fetched]);
  // The first visit's gradients start from zero in the step before it.
  form.push_back(fetched == 1 ? slots_.GradientSlot(fetched) : -1);
  for (int part = 0; part < route_.parts; ++part) {
    const int64_t begin = backward_steps_.Of(visit, part);
    // As in RingBackward::FetchKv.
    const int64_t end =
        Collects(fetched) ? backward_steps_.Of(next.fetch_end + 1, route_.parts - 1) : begin + 1;
    form.push_back(UsedSteps(begin, end - begin));
  }
}

void RingStepKeys::AddChainTo(int visit, std::vector<int64_t>& form) const {
  const RingVisit& own = route_.visits[visit];
  form.insert(form.end(), {-4, own.chain_next != RingVisit::kNone, own.collector > 0});
  if (own.chain_next != RingVisit::kNone) form.push_back(slots_.GradientSlot(own.chain_next));
  if (own.collector > 0) form.push_back(slots_.GradientSlot(own.collector));
  if (!Collects(visit)) return;
  form.push_back(slots_.OuterLandingSlot(visit));
  for (int part = 0; part < route_.parts; ++part) {
    // As in RingBackward::Collect.
    const int64_t at = backward_steps_.Of(visit, part) + 1;
    const int64_t add_at = own.sum_arrives < route_.steps()
                               ? backward_steps_.Of(own.sum_arrives, part)
                               : backward_steps_.own();
    form.push_back(UsedSteps(at, add_at - at + 1));
  }
}

void RingStepKeys::AddFlag(bool value) { flags_ |= static_cast<int32_t>(value) << flag_++; }

void RingStepKeys::AddLane(int peer) {
  AddFlag(LaneBetween(host_of_rank_, rank_, peer) == Lane::kBetween);
}

void RingStepKeys::SetFetch(int visit, int fetched, StepKey& key) {
  const int sender = route_.SenderStep(fetched);
  const int arriving = route_.SourceOf(rank_, fetched);
  const int leaving = route_.SourceOf(rank_, sender);
  key.Add(route_.BlockId(fetched, arriving));
  key.Add(route_.BlockId(sender, arriving));
  key.Add(route_.BlockId(fetched, leaving));
  if (sender != visit) key.Add(route_.BlockId(sender, leaving));
  if (route_.direct) key.Add(rows_[arriving]);
  AddLane(route_.SenderTo(arriving, fetched));
  AddLane(route_.HolderOf(leaving, fetched));
}

void RingStepKeys::SetGradients(int visit, int source, StepKey& key) {
  const RingVisit& own = route_.visits[visit];
  const int next = own.chain_next;
  key.Add(rows_[source]);
  key.Add(route_.BlockId(visit, rank_));
  if (next != RingVisit::kNone) {
    const int arriving = route_.SourceOf(rank_, next);
    key.Add(route_.BlockId(next, source));
    key.Add(route_.BlockId(visit, arriving));
    key.Add(route_.BlockId(next, arriving));
    AddLane(route_.HolderOf(source, next));
    AddLane(route_.HolderOf(arriving, visit));
  }
  if (Collects(visit)) {
    key.Add(own.outer);  // the distance of the owner
    key.Add(LandingsAtCollector(source, own.outer));
    AddLane(source);
    AddLane(route_.HolderOf(rank_, visit));
    return;
  }
  // Gradients of rows that the next rank of the chain does not hold go to the collector, which is
  // the owner in round 0.
  const int collector = own.collector;
  const int collected = route_.SourceOf(rank_, collector);
  if (collector > 0) {
    key.Add(route_.BlockId(collector, source));
    key.Add(route_.BlockId(visit, collected));
    key.Add(route_.BlockId(collector, collected));
  }
  bool sends = true, receives = true;
  if (next != RingVisit::kNone && !route_.direct) {
    key.Add(route_.BlockId(next, collected));
    sends = !SameRanges(route_.BlockId(visit, source), route_.BlockId(next, source));
    receives = !SameRanges(route_.BlockId(visit, collected), route_.BlockId(next, collected));
  }
  AddFlag(sends);
  AddFlag(receives);
  if (sends) AddLane(route_.HolderOf(source, collector));
  if (receives) AddLane(route_.HolderOf(collected, visit));
  // The distance of these ranks.
  key.Add(sends || receives ? own.inner : TupleNumbers::kNone);
}

bool RingStepKeys::HasWork(int visit, int source) const {
  const std::vector<WorkCount>& counts = work_.Of(visit, source);
  return std::any_of(counts.begin(), counts.end(),
                     [](const WorkCount& count) { return count.pairs > 0; });
}

bool RingStepKeys::SameRanges(int32_t a, int32_t b) const {
  const std::vector<RowRange>& x = route_.blocks[a].ranges;
  const std::vector<RowRange>& y = route_.blocks[b].ranges;
  return a == b || std::equal(x.begin(), x.end(), y.begin(), y.end(),
                              [](const RowRange& p, const RowRange& q) {
                                return p.begin == q.begin && p.end == q.end;
                              });
}

int32_t RingStepKeys::LandingsAtCollector(int source, int outer) {
  std::vector<int64_t> list = {-1};
  for (const RowRange& rows : RowsLandingAtCollector(route_, source, outer)) {
    list.insert(list.end(), {rows.begin, rows.end});
  }
  return lists_.NumberOf(list);
}

int32_t RingStepKeys::OrderOf(bool begins, bool ends) {
  std::vector<int64_t> order = {-2};
  if (begins) {
    for (const RowRange& rows : order_.zeroed) order.insert(order.end(), {rows.begin, rows.end});
  }
  if (ends) {
    order.insert(order.end(), {-1, order_.last.begin, order_.last.end, work_.Id(0, rank_)});
    for (const RowRange& rows : OwnCallRanges(spec_, route_, rank_, order_.last)) {
      const bool is_all = rows.size() == route_.kv_rows[rank_];  // as in work_
      const WorkCount count =
          is_all || rows.empty() ? WorkCount() : pieces_.Work(rank_, rank_, rows);
      order.insert(order.end(), {rows.begin, rows.end, count.tiles, count.pairs});
    }
  }
  return lists_.NumberOf(order);
}

}  // namespace ringattn
