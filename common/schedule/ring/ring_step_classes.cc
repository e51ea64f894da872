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

// Entries before its own on which an entry's steps depend.
constexpr int kForwardWindow = 1;
constexpr int kBackwardWindow = 3;

bool HasForward(const ProgramRecipe& recipe) {
  return recipe.direction == Direction::kForward || recipe.recompute_forward;
}

bool HasBackward(const ProgramRecipe& recipe) { return recipe.direction == Direction::kBackward; }

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

// What enters the key of an entry, in the order of the tuple.
enum Field : int {
  kForm,            // what is the same on every rank
  kBlock,           // that the rank computes on
  kWork,            // with it
  kBlockNext,       // the same block at the next visit, at another rank
  kArriving,        // the block of the next visit
  kArrivingBefore,  // the same block at this visit, at another rank
  kOwn,             // the rank's own block at this visit, at another rank
  kOwnNext,         // and at the next visit
  kRows,            // of the rank's shards
  kRowsOfSource,    // of the block's source
  kRowsOfArriving,  // of the arriving block's source
  kFlags,           // first call, last call, lanes
  kHomeDistance,    // of the ranks with which gradients are exchanged directly
  kOrder,           // of the gradients of the own block
  kFields,
};
using Key = std::array<int32_t, kFields>;

// Computes the keys of one rank after the other.
class KeyMaker {
 public:
  KeyMaker(const ScheduleContext& context, const RingRoute& route, const RingWork& work,
           const std::vector<int>& host_of_rank)
      : context_(context),
        route_(*route.kv),
        slots_(route.slots),
        passes_(route.passes),
        pieces_(route.pieces),
        work_(work),
        host_of_rank_(host_of_rank) {
    for (int rank = 0; rank < route_.world_size; ++rank) {
      rows_.push_back(lists_.NumberOf(
          {route_.q_rows[rank], route_.kv_rows[rank], RowsIn(context.plan.chosen[rank])}));
    }
  }

  int32_t rows(int rank) const { return rows_[rank]; }

  // Returns the number of what is the same on every rank in a visit.
  //   used  by program step of the entry
  int32_t FormOf(bool backward, int visit, const std::vector<char>& used) {
    const int last = route_.steps() - 1;
    std::vector<int64_t> form = {backward, visit > last, visit == 0,
                                 std::min(std::max(last - visit, 0), kBackwardWindow)};
    form.insert(form.end(), used.begin(), used.end());
    if (visit > last) return lists_.NumberOf(form);
    form.push_back(slots_.KvSlot(visit));
    form.push_back(slots_.GradientSlot(visit));
    form.push_back(SignedDistance(route_.visits[visit].chain_next, visit));
    if (route_.direct) form.push_back(route_.visits[visit].inner);
    // Alternating landings (BlockSlots::Landing).
    if (backward) form.push_back((FirstStep() + int64_t{visit} * route_.parts) % 2);
    if (visit == last) return lists_.NumberOf(form);
    const RingVisit& next = route_.visits[visit + 1];
    form.push_back(slots_.KvSlot(visit + 1));
    form.push_back(slots_.GradientSlot(visit + 1));
    form.push_back(slots_.KvSlot(route_.SenderStep(visit + 1)));
    form.push_back(next.fetch_begin - visit);
    form.push_back(next.fetch_end - visit);
    if (route_.direct) form.push_back(next.inner);
    if (backward) form.push_back(passes_.backward_fetches[visit + 1]);
    return lists_.NumberOf(form);
  }

  // Returns the visits with a rank's first and last call of a forward pass; {-1, -1}: none.
  VisitRange CallsOf(int rank) const {
    VisitRange calls{-1, -1};
    for (int visit = 0; visit < route_.steps(); ++visit) {
      if (!HasWork(visit, route_.SourceOf(rank, visit))) continue;
      if (calls.begin < 0) calls.begin = visit;
      calls.end = visit;
    }
    return calls;
  }

  // Sets the key of a rank's visit.
  void Set(int rank, bool backward, int visit, int32_t form, const VisitRange& calls, Key& key) {
    key.fill(TupleNumbers::kNone);
    key[kForm] = form;
    key[kRows] = rows_[rank];
    if (backward && visit == 0) order_ = OwnBlockOrderOf(route_, rank);
    const bool own = backward && (visit == route_.steps() || route_.steps() == 1);
    if (backward && (visit == 0 || own)) key[kOrder] = OrderOf(rank, visit == 0, own);
    if (visit == route_.steps()) return;
    const int source = route_.SourceOf(rank, visit);
    const bool is_last = visit + 1 == route_.steps();
    int flags = 0;
    if (!backward) {
      flags =
          (calls.begin == visit ? 1 : 0) | (calls.end == visit ? 2 : 0) | (calls.begin < 0 ? 4 : 0);
    }
    key[kBlock] = route_.BlockId(visit, source);
    key[kWork] = work_.Id(visit, source);
    if (!is_last) {
      const int arriving = route_.SourceOf(rank, visit + 1);
      key[kBlockNext] = route_.BlockId(visit + 1, source);
      key[kArriving] = route_.BlockId(visit + 1, arriving);
      key[kArrivingBefore] = route_.BlockId(visit, arriving);
      if (route_.direct) {
        key[kRowsOfArriving] = rows_[arriving];
        flags |= LaneBit(rank, arriving, 3) | LaneBit(rank, route_.HolderOf(rank, visit + 1), 4);
      }
    }
    flags |= LaneBit(rank, Neighbour(rank, -1), 5) | LaneBit(rank, Neighbour(rank, 1), 6);
    if (backward || route_.direct) {
      key[kOwn] = route_.BlockId(visit, rank);
      if (!is_last) key[kOwnNext] = route_.BlockId(visit + 1, rank);
      key[kRowsOfSource] = rows_[source];
    }
    if (backward) {
      // Gradients of rows that the next rank does not hold go to the block's owner.
      const bool sends = is_last || route_.direct || !SameRanges(key[kBlock], key[kBlockNext]);
      const bool receives = is_last || route_.direct || !SameRanges(key[kOwn], key[kOwnNext]);
      if (sends) flags |= 1 << 7 | LaneBit(rank, source, 8);
      if (receives) flags |= 1 << 9 | LaneBit(rank, route_.HolderOf(rank, visit), 10);
      if (sends || receives) key[kHomeDistance] = route_.visits[visit].inner;
    }
    key[kFlags] = flags;
  }

 private:
  static int64_t SignedDistance(int to, int from) { return to == RingVisit::kNone ? 0 : to - from; }
  int64_t FirstStep() const { return context_.recipe.recompute_forward ? route_.steps() : 0; }
  int Neighbour(int rank, int by) const {
    return (rank + by + route_.world_size) % route_.world_size;
  }
  int LaneBit(int rank, int peer, int bit) const {
    return static_cast<int>(IndexOf(LaneBetween(host_of_rank_, rank, peer))) << bit;
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

  // Returns the number of what the rank does with its own block at the beginning and the end.
  int32_t OrderOf(int rank, bool begins, bool ends) {
    std::vector<int64_t> order;
    if (begins) {
      for (const RowRange& rows : order_.zeroed) order.insert(order.end(), {rows.begin, rows.end});
    }
    if (ends) {
      order.insert(order.end(), {-1, order_.last.begin, order_.last.end, work_.Id(0, rank)});
      for (const RowRange& rows : OwnCallRanges(context_.spec, route_, rank, order_.last)) {
        const bool is_all = rows.size() == route_.kv_rows[rank];  // as in work_
        const WorkCount count =
            is_all || rows.empty() ? WorkCount() : pieces_.Work(rank, rank, rows);
        order.insert(order.end(), {rows.begin, rows.end, count.tiles, count.pairs});
      }
    }
    return lists_.NumberOf(order);
  }

  const ScheduleContext& context_;
  const KvRoute& route_;
  const BlockSlots& slots_;
  const RingPasses& passes_;
  const RingSpans& pieces_;
  const RingWork& work_;
  const std::vector<int>& host_of_rank_;
  ListNumbers lists_;
  std::vector<int32_t> rows_;  // by rank
  OwnBlockOrder order_;        // of the rank whose keys are being computed
};

}  // namespace

std::unique_ptr<const ClassedPrograms> FindRingStepClasses(const ScheduleContext& context,
                                                           const RingRoute& route,
                                                           const std::vector<int>& host_of_rank) {
  const bool is_flat = route.kv->group_size == context.plan.world_size;
  const bool sums_sinks = context.spec.options.sinks && HasBackward(context.recipe);
  if (!is_flat || sums_sinks) return nullptr;
  return std::make_unique<const RingStepClasses>(context, route, host_of_rank);
}

RingStepClasses::RingStepClasses(const ScheduleContext& context, const RingRoute& route,
                                 const std::vector<int>& host_of_rank)
    : context_(context),
      route_(route),
      host_of_rank_(host_of_rank),
      work_(*route.kv, route.pieces) {
  AddEntries();
  KeyMaker keys(context_, route_, work_, host_of_rank_);
  const std::vector<char>& used = route_.passes.used_steps;
  std::vector<int32_t> forms;
  classes_.first_step = {0};
  for (const Entry& entry : entries_) {
    const std::vector<char> used_here(used.begin() + std::min<int64_t>(entry.begin, used.size()),
                                      used.begin() + std::min<int64_t>(entry.end, used.size()));
    forms.push_back(keys.FormOf(entry.backward, entry.visit, used_here));
    classes_.first_step.push_back(
        classes_.first_step.back() +
        static_cast<int>(std::count(used_here.begin(), used_here.end(), 1)));
  }

  TupleNumbers visits(kFields);
  TupleNumbers windows(kBackwardWindow + 1);
  std::vector<int32_t> numbers(entries_.size());
  std::array<int32_t, kBackwardWindow + 1> window;
  Key key;
  for (int rank = 0; rank < context.plan.world_size; ++rank) {
    const VisitRange calls = HasForward(context.recipe) ? keys.CallsOf(rank) : VisitRange{-1, -1};
    forward_calls_.push_back(calls);
    for (size_t e = 0; e < entries_.size(); ++e) {
      const Entry& entry = entries_[e];
      keys.Set(rank, entry.backward, entry.visit, forms[e], calls, key);
      // Slots alternate, so that the visit before the last one mostly has the same key.
      numbers[e] = e >= 2 && visits.Is(numbers[e - 2], key.data()) ? numbers[e - 2]
                                                                   : visits.NumberOf(key.data());
      window.fill(TupleNumbers::kNone);
      const size_t before = entry.backward ? kBackwardWindow : kForwardWindow;
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
  part.forward = part.backward = {0, 0};
  part.begins = part.ends = false;
  // Transfers of a visit's block belong to the entry before.
  const int last = std::min<int>(end + 1, entries_.size());
  for (int e = std::max(begin - kBackwardWindow, 0); e < last; ++e) {
    const Entry& entry = entries_[e];
    VisitRange& visits = entry.backward ? part.backward : part.forward;
    if (visits.end == 0) visits.begin = entry.visit;
    visits.end = entry.visit + 1;
    part.begins = part.begins || (entry.backward && entry.visit == 0);
  }
  part.ends = HasBackward(context_.recipe) && last == static_cast<int>(entries_.size());
  const VisitRange& calls = forward_calls_[rank];
  part.other_calls = {calls.begin >= 0 && calls.begin < part.forward.begin,
                      calls.begin >= 0 && calls.end >= part.forward.end};
  return MakeRingPart(context_, route_, rank, part, &work_);
}

}  // namespace ringattn
