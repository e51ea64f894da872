#include "common/schedule/ring/ring_step_classes.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <map>
#include <utility>

#include "common/schedule/program_builder.h"
#include "common/schedule/ring_backward.h"
#include "common/schedule/ring_forward.h"
#include "common/schedule/shard_buffers.h"
#include "common/schedule/tuple_numbers.h"

namespace ringattn {
namespace {

// Entries before its own on which an entry of the forward pass depends: transfers may have to wait
// for the last calls.
constexpr int kForwardWindow = 1;
// Steps before its own on which a step of the backward pass depends: two from which gradients are
// sent and added in it, and one more for the additions in the step before, for which transfers may
// have to wait.
constexpr int kBackwardSteps = 3;
// Most entries before its own on which an entry depends.
constexpr int kMostWindow = kBackwardSteps;

// Numbers lists of integers.
class ListNumbers {
 public:
  int32_t NumberOf(const std::vector<int64_t>& list) {
    return numbers_.try_emplace(list, static_cast<int32_t>(numbers_.size())).first->second;
  }

 private:
  std::map<std::vector<int64_t>, int32_t> numbers_;
};

}  // namespace

// The steps of a visit.
struct RingStepClasses::Entry {
  bool backward = false;
  int visit = 0;      // the number of visits: the step of the own blocks, at the end of a backward
  int64_t begin = 0;  // program steps, with those that no rank uses
  int64_t end = 0;
};

namespace {

// A tuple under construction. What the numbers mean follows from the first one, the form.
class Key {
 public:
  explicit Key(int width) : values_(width, TupleNumbers::kNone) {}

  void Clear() {
    std::fill(values_.begin(), values_.begin() + count_, TupleNumbers::kNone);
    count_ = 0;
  }
  void Add(int32_t value) { values_[count_++] = value; }
  const int32_t* data() const { return values_.data(); }

 private:
  std::vector<int32_t> values_;
  int count_ = 0;
};

// What begins and ends in a visit.
struct VisitLinks {
  std::vector<int> fetches;  // the visits whose blocks start to travel
  std::vector<int> sums;     // the collectors whose sums have arrived at the owners
};

// Computes the keys of one rank after the other.
class KeyMaker {
 public:
  KeyMaker(const ScheduleContext& context, const RingRoute& route, const RingWork& work,
           const std::vector<int>& host_of_rank)
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

  // Returns an upper bound of the numbers in a key.
  int width() const {
    size_t fetches = 0, sums = 0;
    for (const VisitLinks& links : links_) {
      fetches = std::max(fetches, links.fetches.size());
      sums = std::max(sums, links.sums.size());
    }
    return static_cast<int>(6 + 5 * fetches + sums + 12);
  }

  // Returns the number of what is the same on every rank in a visit.
  int32_t FormOf(bool backward, int visit) {
    const int last = route_.steps() - 1;
    std::vector<int64_t> form = {backward, visit > last, visit == 0,
                                 std::min(std::max(last - visit, 0), kMostWindow)};
    for (int collector : links_[visit].sums) {
      if (backward) form.insert(form.end(), {-1, slots_.OuterLandingSlot(collector)});
    }
    if (visit > last) return lists_.NumberOf(form);
    const RingVisit& own = route_.visits[visit];
    form.insert(form.end(), {-2, slots_.KvSlot(visit), slots_.GradientSlot(visit),
                             own.is_outer_hop(), route_.direct ? own.inner : 0});
    if (backward) {
      const int parts = visit == 0 ? 1 : route_.parts;
      for (int part = 0; part < parts; ++part) {
        form.push_back(UsedSteps(backward_steps_.Of(visit, part), 1));
      }
      // Landings alternate (BlockSlots::Landing).
      form.push_back(backward_steps_.Of(visit, 0) % 2);
      AddChainTo(visit, form);
    } else {
      form.push_back(UsedSteps(visit, 1));
    }
    for (int fetched : links_[visit].fetches) AddFetchTo(backward, visit, fetched, form);
    return lists_.NumberOf(form);
  }

  // Returns the visits with a rank's first and last call of a forward pass; {-1, -1}: none.
  std::pair<int, int> CallsOf(int rank) const {
    std::pair<int, int> calls{-1, -1};
    for (int visit = 0; visit < route_.steps(); ++visit) {
      if (!HasWork(visit, route_.SourceOf(rank, visit))) continue;
      if (calls.first < 0) calls.first = visit;
      calls.second = visit;
    }
    return calls;
  }

  // Sets the key of a rank's visit.
  //   calls  CallsOf the rank
  void Set(int rank, bool backward, int visit, int32_t form, const std::pair<int, int>& calls,
           Key& key) {
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

 private:
  // Returns whether the holder at the visit adds up an outer round.
  bool Collects(int visit) const { return !route_.direct && route_.visits[visit].is_outer_hop(); }

  // Returns how many of `count` steps some rank uses.
  int64_t UsedSteps(int64_t first, int64_t count) const {
    const int64_t steps = static_cast<int64_t>(used_until_.size()) - 1;
    return used_until_[std::min(first + count, steps)] - used_until_[std::min(first, steps)];
  }

  void AddFetchTo(bool backward, int visit, int fetched, std::vector<int64_t>& form) const {
    const RingVisit& next = route_.visits[fetched];
    const int sender = route_.SenderStep(fetched);
    form.insert(form.end(), {-3, slots_.KvSlot(fetched), slots_.KvSlot(sender), sender == visit,
                             next.is_outer_hop(), route_.direct ? next.inner : 0});
    if (!backward) {
      form.push_back(UsedSteps(visit, next.fetch_end + 1 - visit));
      return;
    }
    form.push_back(passes_.backward_fetches[fetched]);
    for (int part = 0; part < route_.parts; ++part) {
      const int64_t begin = backward_steps_.Of(visit, part);
      // As in RingBackward::FetchKv.
      const int64_t end =
          Collects(fetched) ? backward_steps_.Of(next.fetch_end + 1, route_.parts - 1) : begin + 1;
      form.push_back(UsedSteps(begin, end - begin));
    }
  }

  void AddChainTo(int visit, std::vector<int64_t>& form) const {
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

  void AddFlag(bool value) { flags_ |= static_cast<int32_t>(value) << flag_++; }
  // Adds the lane of transfers to or from a peer.
  void AddLane(int peer) { AddFlag(LaneBetween(host_of_rank_, rank_, peer) == Lane::kBetween); }

  // Adds the block that arrives at the rank, the one that leaves it, and where they were before.
  void SetFetch(int visit, int fetched, Key& key) {
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

  // Adds the blocks whose gradients the rank receives or sends.
  void SetGradients(int visit, int source, Key& key) {
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

  bool HasWork(int visit, int source) const {
    const std::vector<WorkCount>& counts = work_.Of(visit, source);
    return std::any_of(counts.begin(), counts.end(),
                       [](const WorkCount& count) { return count.pairs > 0; });
  }
  bool SameRanges(int32_t a, int32_t b) const {
    const std::vector<RowRange>& x = route_.blocks[a].ranges;
    const std::vector<RowRange>& y = route_.blocks[b].ranges;
    return a == b || std::equal(x.begin(), x.end(), y.begin(), y.end(),
                                [](const RowRange& p, const RowRange& q) {
                                  return p.begin == q.begin && p.end == q.end;
                                });
  }

  // Returns the number of the rows whose gradients arrive at the collector of a round.
  int32_t LandingsAtCollector(int source, int outer) {
    std::vector<int64_t> list = {-1};
    for (const RowRange& rows : RowsLandingAtCollector(route_, source, outer)) {
      list.insert(list.end(), {rows.begin, rows.end});
    }
    return lists_.NumberOf(list);
  }

  // Returns the number of what the rank does with its own block at the beginning and the end.
  int32_t OrderOf(bool begins, bool ends) {
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

  const KvRoute& route_;
  const BlockSlots& slots_;
  const RingPasses& passes_;
  const RingSpans& pieces_;
  const RingWork& work_;
  const AttentionSpec& spec_;
  const std::vector<int>& host_of_rank_;
  const BackwardSteps backward_steps_;
  std::vector<VisitLinks> links_;  // by visit; the last is the step of the own blocks
  std::vector<int64_t> used_until_;
  ListNumbers lists_;
  std::vector<int32_t> rows_;  // by rank

  // Of the key that is being set.
  int rank_ = 0;
  OwnBlockOrder order_;
  int32_t flags_ = 0;
  int flag_ = 0;
};

}  // namespace

std::unique_ptr<const ClassedPrograms> FindRingStepClasses(const ScheduleContext& context,
                                                           const RingRoute& route,
                                                           const std::vector<int>& host_of_rank) {
  if (context.spec.options.sinks && HasBackward(context.recipe)) return nullptr;
  auto classes = std::make_unique<const RingStepClasses>(context, route, host_of_rank);
  if (!classes->AllEntriesUsed()) return nullptr;
  return classes;
}

RingStepClasses::RingStepClasses(const ScheduleContext& context, const RingRoute& route,
                                 const std::vector<int>& host_of_rank)
    : context_(context),
      route_(route),
      host_of_rank_(host_of_rank),
      work_(*route.kv, route.pieces) {
  AddEntries();
  KeyMaker keys(context_, route_, work_, host_of_rank_);
  std::vector<int32_t> forms;
  classes_.group_size = route_.kv->group_size;
  classes_.first_step = {0};
  for (const Entry& entry : entries_) {
    forms.push_back(keys.FormOf(entry.backward, entry.visit));
    classes_.first_step.push_back(classes_.first_step.back() + UsedSteps(entry));
  }
  // Without steps that no rank uses, earlier steps are as far away as they seem.
  const bool all_used = std::all_of(entries_.begin(), entries_.end(), [this](const Entry& entry) {
    return UsedSteps(entry) == entry.end - entry.begin;
  });
  const int parts = route_.kv->parts;
  backward_window_ = all_used ? (kBackwardSteps + parts - 1) / parts : kMostWindow;

  TupleNumbers visits(keys.width());
  TupleNumbers windows(kMostWindow + 1);
  std::vector<int32_t> numbers(entries_.size());
  std::array<int32_t, kMostWindow + 1> window;
  Key key(keys.width());
  for (int rank = 0; rank < context.plan.world_size; ++rank) {
    const std::pair<int, int> calls =
        HasForward(context.recipe) ? keys.CallsOf(rank) : std::pair{-1, -1};
    forward_calls_.push_back(calls);
    for (size_t e = 0; e < entries_.size(); ++e) {
      const Entry& entry = entries_[e];
      keys.Set(rank, entry.backward, entry.visit, forms[e], calls, key);
      // Slots alternate, so that the visit before the last one mostly has the same key.
      numbers[e] = e >= 2 && visits.Is(numbers[e - 2], key.data()) ? numbers[e - 2]
                                                                   : visits.NumberOf(key.data());
      window.fill(TupleNumbers::kNone);
      const size_t before = entry.backward ? backward_window_ : kForwardWindow;
      for (size_t i = 0; i <= std::min(before, e); ++i) window[i] = numbers[e - i];
      const int32_t known = windows.size();
      const std::vector<int32_t>& found = classes_.class_of;
      const int32_t guess = e >= 2 ? found[found.size() - 2] : TupleNumbers::kNone;
      const int32_t number =
          windows.Is(guess, window.data()) ? guess : windows.NumberOf(window.data());
      if (number == known) classes_.representatives.push_back({rank, static_cast<int>(e)});
      classes_.class_of.push_back(number);
    }
  }
  AddShardBuffers();
}

int RingStepClasses::UsedSteps(const Entry& entry) const {
  const std::vector<char>& used = route_.passes.used_steps;
  int steps = 0;
  for (int64_t step = entry.begin; step < entry.end; ++step) {
    steps += step < static_cast<int64_t>(used.size()) && used[step];
  }
  return steps;
}

void RingStepClasses::AddEntries() {
  const KvRoute& route = *route_.kv;
  int64_t first_step = 0;
  if (HasForward(context_.recipe)) {
    for (int visit = 0; visit < route.steps(); ++visit) {
      entries_.push_back({false, visit, visit, visit + 1});
    }
    first_step = route.steps();
  }
  if (!HasBackward(context_.recipe)) return;
  const BackwardSteps steps(route, first_step);
  for (int visit = 0; visit < route.steps(); ++visit) {
    const int64_t begin = steps.Of(visit, route.parts - 1);
    entries_.push_back({true, visit, begin, begin + (visit == 0 ? 1 : route.parts)});
  }
  if (route.steps() > 1) {
    entries_.push_back({true, route.steps(), steps.own(), steps.own() + 1});
  }
}

bool RingStepClasses::AllEntriesUsed() const {
  return std::all_of(entries_.begin(), entries_.end(),
                     [this](const Entry& entry) { return UsedSteps(entry) > 0; });
}

void RingStepClasses::AddShardBuffers() {
  const ShardPlan& plan = context_.plan;
  std::map<std::array<int64_t, 3>, int32_t> known;
  for (int rank = 0; rank < plan.world_size; ++rank) {
    const std::array<int64_t, 3> rows = {RowsIn(plan.q[rank]), RowsIn(plan.kv[rank]),
                                         RowsIn(plan.chosen[rank])};
    const auto [found, is_new] =
        known.try_emplace(rows, static_cast<int32_t>(classes_.shard_buffers.size()));
    if (is_new) {
      ProgramBuilder builder(context_.spec, plan, rank);
      ringattn::AddShardBuffers(context_.recipe.direction, context_.recipe.recompute_forward,
                                builder);
      classes_.shard_buffers.push_back(builder.buffers());
    }
    classes_.shard_buffers_of.push_back(found->second);
  }
}

Program RingStepClasses::MakePart(int rank, int begin, int end) const {
  RingPart part;
  part.begins = part.ends = false;
  const int first = std::max(begin - std::max(kForwardWindow, backward_window_), 0);
  const auto has = [&](bool backward, int visit) {
    // The entries of a pass are its visits in order.
    const int entry = visit + (backward && HasForward(context_.recipe) ? route_.kv->steps() : 0);
    return first <= entry && entry <= end;
  };
  const std::vector<RingVisit>& visits = route_.kv->visits;
  const bool collects = !route_.direct();
  for (int visit = 0; visit < route_.kv->steps(); ++visit) {
    const RingVisit& own = visits[visit];
    const bool sums = collects && own.is_outer_hop();
    const auto needs = [&](bool backward) {
      return has(backward, visit) || has(backward, own.fetch_begin) ||
             (backward && sums && has(backward, own.sum_arrives));
    };
    if (HasForward(context_.recipe)) {
      if (has(false, visit)) part.forward_calls.push_back(visit);
      if (needs(false)) part.forward_fetches.push_back(visit);
    }
    if (HasBackward(context_.recipe) && needs(true)) part.backward.push_back(visit);
  }
  if (HasBackward(context_.recipe)) {
    part.begins = has(true, 0);
    part.ends = has(true, route_.kv->steps()) || route_.kv->steps() == 1;
  }
  const auto& [first_call, last_call] = forward_calls_[rank];
  const bool has_calls = first_call >= 0;
  const bool none = part.forward_calls.empty();
  part.other_calls = {has_calls && (none || first_call < part.forward_calls.front()),
                      has_calls && (none || last_call > part.forward_calls.back())};
  return MakeRingPart(context_, route_, rank, part, &work_);
}

}  // namespace ringattn
