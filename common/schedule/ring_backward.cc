#include "common/schedule/ring_backward.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace ringattn {
namespace {

// Rows of this rank's block whose gradients arrive at a program step.
struct Landing {
  int64_t at = 0;
  RowRange rows;
};

// Returns the ranges of `all` that are in no landing. Landings are disjoint.
std::vector<RowRange> Gaps(std::vector<Landing> landings, const RowRange& all) {
  std::sort(landings.begin(), landings.end(),
            [](const Landing& a, const Landing& b) { return a.rows.begin < b.rows.begin; });
  std::vector<RowRange> gaps;
  int64_t begin = all.begin;
  for (const Landing& landing : landings) {
    if (landing.rows.end <= begin || landing.rows.begin >= all.end) continue;
    if (landing.rows.begin > begin) gaps.push_back({begin, landing.rows.begin});
    begin = landing.rows.end;
  }
  if (all.end > begin) gaps.push_back({begin, all.end});
  return gaps;
}

// Returns whether the holder at the step adds up an outer round (ring_visits.h).
bool IsCollector(const KvRoute& route, int step) {
  return !route.direct && route.visits[step].is_outer_hop();
}

// Returns whether gradients from others are added to the owner's accumulators. Otherwise they
// arrive there.
bool AddsAtHome(const KvRoute& route) {
  return route.direct || route.group_size < route.world_size;
}

RowRange NextHeld(const KvRoute& route, int source, int step, int part) {
  const int next = route.visits[step].chain_next;
  return next == RingVisit::kNone ? RowRange{} : route.Held(next, source)[part];
}

// Returns the rows of a part that no later rank of the chain sees. The holder sends them to the
// collector.
std::vector<RowRange> Complete(const KvRoute& route, int source, int step, int part) {
  const RowRange& rows = route.Held(step, source)[part];
  const RowRange next = NextHeld(route, source, step, part);
  std::vector<RowRange> complete;
  if (rows.empty()) return complete;
  if (next.empty()) return {rows};
  if (rows.begin < next.begin) complete.push_back({rows.begin, next.begin});
  if (next.end < rows.end) complete.push_back({next.end, rows.end});
  return complete;
}

// Returns where gradients of the chain of `source`'s block in a round arrive at its collector.
std::vector<Landing> LandingsOf(const KvRoute& route, const BackwardSteps& steps, int source,
                                int outer) {
  std::vector<Landing> landings;
  for (int part = 0; part < route.parts; ++part) {
    bool travelling = false;
    for (int step = route.chain_begins[outer]; step != RingVisit::kNone;
         step = route.visits[step].chain_next) {
      travelling = travelling || route.Sees(step, source, part);
      if (!travelling) continue;
      for (const RowRange& rows : Complete(route, source, step, part)) {
        landings.push_back({steps.Of(step, part) + 1, rows});
      }
    }
  }
  return landings;
}

// Returns the rows that arrive last, as one range. Empty if the rank computes on others' blocks in
// the meantime.
RowRange LandsLast(const KvRoute& route, const BackwardSteps& steps, int rank,
                   const std::vector<Landing>& landings) {
  int64_t others_until = -1;  // the rank's last step with a call on another rank's block
  for (int step = 1; step < route.steps(); ++step) {
    for (int part = 0; part < route.parts; ++part) {
      if (route.Sees(step, route.SourceOf(rank, step), part)) {
        others_until = std::max(others_until, steps.Of(step, part));
      }
    }
  }
  int64_t last = -1;
  for (const Landing& landing : landings) last = std::max(last, landing.at);
  RowRange late;
  if (last <= others_until) return late;
  for (const Landing& landing : landings) {
    if (landing.at != last) continue;
    late = late.empty() ? landing.rows
                        : RowRange{std::min(late.begin, landing.rows.begin),
                                   std::max(late.end, landing.rows.end)};
  }
  return late;
}

class RingBackward {
 public:
  RingBackward(RingRank& ring, const std::vector<char>& fetches, int64_t first_step)
      : ring_(ring),
        route_(ring.route),
        builder_(ring.builder),
        fetches_(fetches),
        first_step_(first_step),
        steps_(route_, first_step),
        own_step_(steps_.own()),
        adds_at_home_(AddsAtHome(route_)) {}

  void Add(const RingPart& part) {
    const OwnBlockOrder own =
        part.begins || part.ends ? OwnBlockOrderOf(route_, ring_.rank()) : OwnBlockOrder();
    if (part.begins) Start(own.zeroed);
    VisitAll(part.backward);
    if (!part.ends) return;
    OwnBlock(own.last);
    AddUpSinkGradients(std::max(own_step_, first_step_ + 1), route_.q_rows, ring_.shard, builder_);
    FinishBackward(own_step_, ring_.shard, builder_);
  }

  // Records the steps in which some rank has a transfer or a call.
  void Use() {
    UseFirstAndOwn();
    VisitAll(route_.AllVisits());
  }

 private:
  int64_t StepOf(int step, int part) const { return steps_.Of(step, part); }
  // Returns the program step that zeroes accumulators for all parts of a step: once its slot is
  // free, together and early, because calls of a device overlap only if no other call is between
  // them.
  int64_t ZerosAt(int step) const {
    return step == 1 ? first_step_ : StepOf(step, route_.first_parts[step]);
  }
  bool IsCollector(int step) const { return ringattn::IsCollector(route_, step); }
  void Start(const std::vector<RowRange>& zeroed);
  void UseFirstAndOwn();
  void VisitAll(const Visits& visits);
  void FetchKv(int source, int step, int part);
  void Visit(int source, int step, int part);
  void Collect(int source, int step, int part);
  void Contribute(int source, int step, int part);
  void SendOnAndHome(int source, int step, int part);
  // Sends gradients to the collector, whose accumulators are empty at these rows.
  void SendToCollector(int64_t at, int source, int step, const RowRange& part,
                       const RowRange& rows);
  // Sends gradients to the owner, who adds them to others' contributions to the same rows.
  void SendToLanding(int64_t at, int source, int step, const RowRange& part, const RowRange& rows);
  void OwnBlock(const RowRange& last);
  // REQUIRES: one range of all rows, or a batch of one.
  void AddOwnCall(const std::vector<RowRange>& ranges);

  RingRank& ring_;
  const KvRoute& route_;
  ProgramBuilder& builder_;
  const std::vector<char>& fetches_;
  const int64_t first_step_;
  const BackwardSteps steps_;
  const int64_t own_step_;
  const bool adds_at_home_;
};

void RingBackward::Start(const std::vector<RowRange>& zeroed) {
  StartBackward(first_step_, ring_.shard, builder_);
  // Where no gradients arrive, the own block starts from zero.
  for (const RowRange& rows : zeroed) {
    builder_.AddZeroRows(first_step_, ring_.gradients, ring_.slots.HomeGradients(ring_.rank()),
                         rows);
  }
}

void RingBackward::UseFirstAndOwn() {
  for (int rank = 0; rank < route_.world_size; ++rank) {
    const bool has_rows = route_.q_rows[rank] > 0 || route_.kv_rows[rank] > 0;
    if (has_rows) builder_.Use(first_step_);
    if ((has_rows && builder_.spec().result_dtype() != DType::kFloat32) ||
        route_.SeesAny(0, rank)) {
      builder_.Use(own_step_);  // conversions, or a call
    }
  }
  if (builder_.spec().options.sinks) builder_.Use(first_step_);  // rank 0 has dsinks
}

void RingBackward::VisitAll(const Visits& visits) {
  std::vector<int> others;
  for (int step : visits) {
    if (step == 0) continue;  // the own block
    const RingVisit& visit = route_.visits[step];
    others.clear();
    if (visit.chain_next != RingVisit::kNone) others.push_back(visit.chain_next);
    if (visit.collector > 0) others.push_back(visit.collector);
    const std::vector<int> sources = ring_.SourcesAt(step, others);
    for (int part = 0; part < route_.parts; ++part) {
      if (fetches_[step]) {
        for (int source : sources) FetchKv(source, step, part);
      }
      for (int source : sources) {
        if (IsCollector(step)) {
          Collect(source, step, part);
        } else {
          Visit(source, step, part);
        }
      }
    }
  }
}

void RingBackward::FetchKv(int source, int step, int part) {
  const RingVisit& visit = route_.visits[step];
  const int64_t at = StepOf(visit.fetch_begin, part);
  // All parts of an outer hop end before the next visit begins, so that its slot is free then.
  const int64_t end = IsCollector(step) ? StepOf(visit.fetch_end + 1, route_.parts - 1) : at + 1;
  ring_.FetchKv(at, end, source, step, route_.Held(step, source)[part]);
}

void RingBackward::Visit(int source, int step, int part) {
  // On a direct route every rank sends its own accumulator.
  bool travels = route_.Travels(step, source, part);
  if (route_.Sees(step, source, part)) {
    if (route_.HolderOf(source, step) == ring_.rank() && !travels) {
      const RowRange& rows = route_.Held(step, source)[part];
      builder_.AddZeroRows(ZerosAt(step), ring_.gradients,
                           ring_.slots.Gradients(source, step, rows), rows);
    }
    Contribute(source, step, part);
    travels = true;
  }
  if (travels) SendOnAndHome(source, step, part);
}

void RingBackward::Collect(int source, int step, int part) {
  const RowRange& rows = route_.Held(step, source)[part];
  const bool sees = route_.Sees(step, source, part);
  if (rows.empty() || (!sees && !route_.Travels(step, source, part))) return;
  const int64_t computed = StepOf(step, part);
  builder_.Use(computed);
  const int collector = route_.HolderOf(source, step);
  if (collector == ring_.rank()) {
    const std::vector<Landing> landings =
        LandingsOf(route_, steps_, source, route_.visits[step].outer);
    for (const RowRange& gap : Gaps(landings, rows)) {
      builder_.AddZeroRows(computed, ring_.gradients, ring_.slots.Gradients(source, step, rows),
                           gap);
    }
  }
  if (sees) Contribute(source, step, part);
  const int arrives = route_.visits[step].sum_arrives;
  const int64_t at = computed + 1;
  const int64_t add_at = arrives < route_.steps() ? StepOf(arrives, part) : own_step_;
  builder_.Use(add_at);
  const BlockLocation landing = ring_.slots.OuterLanding(source, step, rows);
  builder_.Move(at, ring_.gradients, collector, ring_.slots.Gradients(source, step, rows), source,
                landing, rows, add_at - at + 1);
  if (source != ring_.rank()) return;
  builder_.AddRowsLate(add_at, ring_.gradients, landing, ring_.slots.HomeGradients(source), rows);
}

void RingBackward::Contribute(int source, int step, int part) {
  const int64_t at = StepOf(step, part);
  builder_.Use(at);
  if (route_.HolderOf(source, step) != ring_.rank()) return;
  const RowRange& rows = route_.Held(step, source)[part];
  const BlockLocation place = ring_.slots.Gradients(source, step, rows);
  KvOperand operand = ring_.Keys(step, rows);
  operand.dk = builder_.Range(ring_.gradients, TensorId::kDk, place);
  operand.dv = builder_.Range(ring_.gradients, TensorId::kDv, place);
  ComputeCall call = BackwardCallOf(ring_.shard, builder_);
  AddOperand(call, operand, ring_.WorkAt(step, rows));
  AddBackwardCall(at, std::move(call), ring_.shard, builder_);
}

void RingBackward::SendOnAndHome(int source, int step, int part) {
  const int64_t at = StepOf(step, part) + 1;
  const RowRange& rows = route_.Held(step, source)[part];
  if (rows.empty()) return;  // all rows have arrived
  builder_.Use(at);
  if (route_.direct) {
    SendToLanding(at, source, step, rows, rows);
    return;
  }
  const RowRange next = NextHeld(route_, source, step, part);
  if (!next.empty()) {
    const int to = route_.visits[step].chain_next;
    builder_.Move(at, ring_.gradients, route_.HolderOf(source, step),
                  ring_.slots.Gradients(source, step, rows), route_.HolderOf(source, to),
                  ring_.slots.Gradients(source, to, next), next);
  }
  const bool lands = adds_at_home_ && route_.visits[step].collector == 0;
  for (const RowRange& complete : Complete(route_, source, step, part)) {
    if (lands) {
      SendToLanding(at, source, step, rows, complete);
    } else {
      SendToCollector(at, source, step, rows, complete);
    }
  }
}

void RingBackward::SendToCollector(int64_t at, int source, int step, const RowRange& part,
                                   const RowRange& rows) {
  const int collector = route_.visits[step].collector;
  BlockLocation target = ring_.slots.HomeGradients(source);
  if (collector > 0) target = ring_.slots.Gradients(source, collector, rows);
  builder_.Move(at, ring_.gradients, route_.HolderOf(source, step),
                ring_.slots.Gradients(source, step, part), route_.HolderOf(source, collector),
                target, rows);
}

void RingBackward::SendToLanding(int64_t at, int source, int step, const RowRange& part,
                                 const RowRange& rows) {
  // Added one step later, so that calls do not queue behind an addition that still waits.
  const int64_t add_at = std::min(at + 1, own_step_);
  builder_.Use(add_at);
  const BlockLocation landing = BlockSlots::Landing(at, part, rows);
  builder_.Move(at, ring_.gradients, route_.HolderOf(source, step),
                ring_.slots.Gradients(source, step, part), source, landing, rows);
  if (source != ring_.rank()) return;
  builder_.AddRowsLate(add_at, ring_.gradients, landing, ring_.slots.HomeGradients(source), rows);
}

void RingBackward::OwnBlock(const RowRange& last) {
  std::vector<RowRange> ranges = OwnCallRanges(builder_.spec(), route_, ring_.rank(), last);
  if (ranges.size() == 1) return AddOwnCall(ranges);
  const RowRange arrives_last = ranges.back();
  ranges.pop_back();
  AddOwnCall(ranges);
  AddOwnCall({arrives_last});
}

void RingBackward::AddOwnCall(const std::vector<RowRange>& ranges) {
  ComputeCall call = BackwardCallOf(ring_.shard, builder_);
  const int rank = ring_.rank();
  for (const RowRange& rows : ranges) {
    if (rows.empty()) continue;
    const bool is_all = rows.size() == builder_.kv_rows();
    const WorkCount work = is_all ? ring_.WorkAt(0, rows) : ring_.Work(rank, rows);
    if (work.pairs == 0) continue;
    KvOperand keys = ring_.Keys(rank, rows, {BlockSlots::kHome, rows.begin, rows});
    const BlockLocation home{BlockSlots::kGradientHome, rows.begin, rows};
    keys.dk = builder_.Range(ring_.gradients, TensorId::kDk, home);
    keys.dv = builder_.Range(ring_.gradients, TensorId::kDv, home);
    AddOperand(call, keys, work);
  }
  if (!call.kv.empty()) AddBackwardCall(own_step_, std::move(call), ring_.shard, builder_);
}

}  // namespace

OwnBlockOrder OwnBlockOrderOf(const KvRoute& route, int rank) {
  const BackwardSteps steps(route, 0);
  std::vector<Landing> landings;
  if (!AddsAtHome(route)) landings = LandingsOf(route, steps, rank, 0);
  return {Gaps(landings, {0, route.kv_rows[rank]}), LandsLast(route, steps, rank, landings)};
}

std::vector<RowRange> OwnCallRanges(const AttentionSpec& spec, const KvRoute& route, int rank,
                                    const RowRange& last) {
  const RowRange all{0, route.kv_rows[rank]};
  // With one batch row, rows are one range of bytes, so the rows that arrive last can wait while
  // the others compute.
  const bool in_two = spec.shape.batch == 1 && !last.empty() && last.size() < all.size();
  if (!in_two) return {all};
  return {{0, last.begin}, {last.end, all.end}, last};
}

void AddRingBackward(RingRank& ring, const std::vector<char>& fetches, int64_t first_step,
                     const RingPart& part) {
  RingBackward(ring, fetches, first_step).Add(part);
}

void UseRingBackward(RingRank& ring, const std::vector<char>& fetches, int64_t first_step) {
  RingBackward(ring, fetches, first_step).Use();
}

}  // namespace ringattn
