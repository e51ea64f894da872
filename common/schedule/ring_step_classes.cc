#include "common/schedule/ring_step_classes.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "common/schedule/program_builder.h"
#include "common/schedule/ring_step_keys.h"
#include "common/schedule/route/tuple_numbers.h"
#include "common/schedule/shard_buffers.h"

namespace ringattn {
namespace {

// Entries before its own on which an entry of the forward pass depends: transfers may have to wait
// for the last calls.
constexpr int kForwardWindow = 1;
// Steps before its own on which a step of the backward pass depends: two from which gradients are
// sent and added in it, and one more for the additions in the step before, for which transfers may
// have to wait.
constexpr int kBackwardSteps = kMostVisitsBefore;

}  // namespace

// The steps of a visit.
struct RingStepClasses::Entry {
  bool backward = false;
  int visit = 0;      // the number of visits: the step of the own blocks, at the end of a backward
  int64_t begin = 0;  // program steps, with those that no rank uses
  int64_t end = 0;
};

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
  RingStepKeys keys(context_, route_, work_, host_of_rank_);
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
  backward_window_ = all_used ? (kBackwardSteps + parts - 1) / parts : kMostVisitsBefore;

  TupleNumbers visits(keys.width());
  TupleNumbers windows(kMostVisitsBefore + 1);
  std::vector<int32_t> numbers(entries_.size());
  std::array<int32_t, kMostVisitsBefore + 1> window;
  StepKey key(keys.width());
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

// Here, because Entry is complete here.
RingStepClasses::~RingStepClasses() = default;

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
