#include "common/schedule/ring_step_keys.h"

#include <algorithm>

#include "common/program/lane.h"

namespace ringattn {

RingStepKeys::RingStepKeys(const ScheduleContext& context, const RingRoute& route,
                           const RingWork& work, const std::vector<int>& host_of_rank)
    : route_(*route.kv),
      slots_(route.slots),
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
  for (char used : route.passes.used_steps) used_until_.push_back(used_until_.back() + used);
}

int RingStepKeys::width() const {
  size_t fetches = 0, sums = 0;
  for (const VisitLinks& links : links_) {
    fetches = std::max(fetches, links.fetches.size());
    sums = std::max(sums, links.sums.size());
  }
  return static_cast<int>(6 + 4 * fetches + sums + 9);
}

int32_t RingStepKeys::FormOf(bool backward, int visit) {
  if (visit == route_.steps()) return lists_.NumberOf({});  // a pass has one such step
  const RingVisit& own = route_.visits[visit];
  // In a backward pass only the first visit's block is in the home slot, so the slot separates this
  // visit from the others. In a forward pass only the first visit has no visit before. Slots, used
  // steps and lengths of transfers mostly follow from one another, because most visits of a pass
  // alternate between two forms.
  std::vector<int64_t> form = {slots_.KvSlot(visit)};
  if (backward) {
    // Separates a collector's visit from all others: each round has another distance.
    form.push_back(Collects(visit) ? own.outer : 0);
    form.push_back(slots_.GradientSlot(visit));
    for (int part = 0; part < route_.parts; ++part) {
      form.push_back(UsedSteps(backward_steps_.Of(visit, part), 1));
    }
    form.push_back(visit == 1 ? -1 : route_.first_parts[visit]);  // gradients start from zero
    // Landings alternate (BlockSlots::Landing).
    form.push_back(backward_steps_.Of(visit, 0) % 2);
    const bool passes_on = own.chain_next != RingVisit::kNone;
    form.push_back(passes_on ? slots_.GradientSlot(own.chain_next) : -1);
    form.push_back(own.collector > 0 ? slots_.GradientSlot(own.collector) : -1);
  }
  for (int fetched : links_[visit].fetches) AddFetchTo(backward, fetched, form);
  // The passes give their lists other meanings. Lists of different passes are rarely equal.
  form.push_back(backward);
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
    // The block of visit 1 determines the rows of the own block that start from zero: gradients of
    // all rows that it has arrive there.
    if (visit == route_.steps() || route_.steps() == 1) key.Add(OwnCallsOf(rank));
    for (int collector : links_[visit].sums) key.Add(route_.BlockId(collector, rank));
  }
  if (visit == route_.steps()) return;
  const int source = route_.SourceOf(rank, visit);
  key.Add(route_.BlockId(visit, source));
  key.Add(work_.Id(visit, source));
  for (int fetched : links_[visit].fetches) SetFetch(visit, fetched, key);
  if (backward) {
    if (visit > 0) SetGradients(visit, source, key);
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

void RingStepKeys::AddFetchTo(bool backward, int fetched, std::vector<int64_t>& form) const {
  const RingVisit& next = route_.visits[fetched];
  const int sender = route_.SenderStep(fetched);
  // The sender's distance in the group is 0 for an outer hop. The block's slot also determines
  // whether the forward pass has left the block in it: it has if no other visit uses the slot.
  form.insert(form.end(), {slots_.KvSlot(fetched), slots_.KvSlot(sender),
                           next.inner - route_.visits[sender].inner});
  if (!next.is_outer_hop()) return;  // takes one step
  if (!backward) {
    form.push_back(next.fetch_end - next.fetch_begin);
    return;
  }
  for (int part = 0; part < route_.parts; ++part) {
    // As in RingBackward::FetchKv.
    const int64_t begin = backward_steps_.Of(next.fetch_begin, part);
    const int64_t end = backward_steps_.Of(next.fetch_end + 1, route_.parts - 1);
    form.push_back(UsedSteps(begin, end - begin));
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
  AddLane(route_.SenderTo(arriving, fetched));
  AddLane(route_.HolderOf(leaving, fetched));
}

void RingStepKeys::SetGradients(int visit, int source, StepKey& key) {
  const RingVisit& own = route_.visits[visit];
  const int next = own.chain_next;
  // If the next holder gets the keys from here too, SetFetch has added these blocks. Gradients use
  // the lanes of this visit's keys, which travelled between the same ranks in the visit before.
  if (next != RingVisit::kNone && !route_.direct && route_.SenderStep(next) != visit) {
    const int arriving = route_.SourceOf(rank_, next);
    key.Add(route_.BlockId(next, source));
    key.Add(route_.BlockId(visit, arriving));
    key.Add(route_.BlockId(next, arriving));
  }
  if (Collects(visit)) {
    key.Add(route_.BlockId(visit, rank_));
    // Gradients arrive at the rows that the chain's first rank holds: it holds what it or a later
    // rank of the chain sees. Other rows start from zero.
    const int first = route_.chain_begins[own.outer];
    key.Add(first == RingVisit::kNone ? TupleNumbers::kNone : route_.BlockId(first, source));
    AddLane(source);
    AddLane(route_.HolderOf(rank_, visit));
    return;
  }
  // Gradients of rows that the next rank of the chain does not hold go to the collector, which is
  // the owner in round 0.
  const int collector = own.collector;
  const int collected = route_.SourceOf(rank_, collector);
  key.Add(route_.BlockId(visit, collected));
  if (collector > 0) {
    key.Add(route_.BlockId(collector, source));
    key.Add(route_.BlockId(collector, collected));
  }
  bool sends = true, receives = true;
  if (next != RingVisit::kNone && !route_.direct) {
    key.Add(route_.BlockId(next, collected));
    sends = !SameRanges(route_.BlockId(visit, source), route_.BlockId(next, source));
    receives = !SameRanges(route_.BlockId(visit, collected), route_.BlockId(next, collected));
  }
  if (sends) {
    key.Add(static_cast<int32_t>(route_.kv_rows[source]));
    AddLane(route_.HolderOf(source, collector));
  }
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

int32_t RingStepKeys::OwnCallsOf(int rank) {
  std::vector<int64_t> calls = {work_.Id(0, rank)};
  const RowRange last = OwnBlockOrderOf(route_, rank).last;
  for (const RowRange& rows : OwnCallRanges(spec_, route_, rank, last)) {
    const bool is_all = rows.size() == route_.kv_rows[rank];  // as in work_
    const WorkCount count = is_all || rows.empty() ? WorkCount() : pieces_.Work(rank, rank, rows);
    calls.insert(calls.end(), {rows.begin, rows.end, count.tiles, count.pairs});
  }
  return lists_.NumberOf(calls);
}

}  // namespace ringattn
