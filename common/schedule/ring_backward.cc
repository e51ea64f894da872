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

// Returns the ranges of [0, end) that are in no landing. Landings are disjoint.
std::vector<RowRange> Gaps(std::vector<Landing> landings, int64_t end) {
  std::sort(landings.begin(), landings.end(),
            [](const Landing& a, const Landing& b) { return a.rows.begin < b.rows.begin; });
  std::vector<RowRange> gaps;
  int64_t begin = 0;
  for (const Landing& landing : landings) {
    if (landing.rows.begin > begin) gaps.push_back({begin, landing.rows.begin});
    begin = landing.rows.end;
  }
  if (end > begin) gaps.push_back({begin, end});
  return gaps;
}

class RingBackward {
 public:
  RingBackward(RingRank& ring, int64_t first_step)
      : ring_(ring),
        route_(ring.route),
        builder_(ring.builder),
        first_step_(first_step),
        own_step_(StepOf(route_.steps() - 1, 0) + (route_.steps() > 1 ? 1 : 0)) {}

  void Add() {
    FindLandings();
    Start();
    // By source and part: some rank has contributed to the accumulator that travels.
    std::vector<std::vector<char>> travels(route_.world_size, std::vector<char>(route_.parts, 0));
    for (int step = 1; step < route_.steps(); ++step) {
      const bool fetch = ring_.slots.Claim(step);
      for (int part = 0; part < route_.parts; ++part) {
        for (int source = 0; source < route_.world_size && fetch; ++source) {
          ring_.FetchKv(StepOf(step - 1, part), source, step, route_.held[step][source][part]);
        }
        for (int source = 0; source < route_.world_size; ++source) {
          char& travelling = travels[source][part];
          if (route_.direct) travelling = 0;  // every rank sends its own accumulator
          if (route_.Sees(step, source, part)) {
            Contribute(source, step, part, /*first=*/!travelling);
            travelling = 1;
          }
          if (travelling) SendOnAndHome(source, step, part);
        }
      }
    }
    OwnBlock();
    AddUpSinkGradients(std::max(own_step_, first_step_ + 1), route_.q_rows, ring_.shard, builder_);
    FinishBackward(own_step_, ring_.shard, builder_);
  }

 private:
  // Returns the program step that computes on a part of the step's block.
  int64_t StepOf(int step, int part) const {
    if (step == 0) return first_step_;  // before any part, while the first keys arrive
    return first_step_ + 1 + int64_t{step - 1} * route_.parts + (route_.parts - 1 - part);
  }

  void FindLandings();
  void Start();
  void Contribute(int source, int step, int part, bool first);
  void SendOnAndHome(int source, int step, int part);
  // Sends gradients to the owner's accumulators, which are empty at these rows.
  void SendHome(int64_t at, int source, int step, const RowRange& part, const RowRange& rows);
  // Sends gradients to the owner, who adds them to others' contributions to the same rows.
  void SendToLanding(int64_t at, int source, int step, const RowRange& rows);
  void OwnBlock();
  // Returns the rows that arrive last, as one range. Empty if the rank computes on others' blocks
  // in the meantime.
  RowRange LandsLast() const;
  // REQUIRES: one range of all rows, or a batch of one.
  void AddOwnCall(const std::vector<RowRange>& ranges);

  RingRank& ring_;
  const KvRoute& route_;
  ProgramBuilder& builder_;
  const int64_t first_step_;
  const int64_t own_step_;         // when ranks compute on their own blocks
  std::vector<Landing> landings_;  // of this rank's block, directly into its accumulators
  int64_t others_until_ = -1;      // this rank's last step with a call on another rank's block
};

RowRange NextHeld(const KvRoute& route, int source, int step, int part) {
  return step + 1 < route.steps() ? route.held[step + 1][source][part] : RowRange{};
}

// Returns the rows of a part that no rank after the step's holder sees. The holder sends them to
// the owner.
std::vector<RowRange> Complete(const KvRoute& route, int source, int step, int part) {
  const RowRange& rows = route.held[step][source][part];
  const RowRange next = NextHeld(route, source, step, part);
  std::vector<RowRange> complete;
  if (rows.empty()) return complete;
  if (next.empty()) return {rows};
  if (rows.begin < next.begin) complete.push_back({rows.begin, next.begin});
  if (next.end < rows.end) complete.push_back({next.end, rows.end});
  return complete;
}

void RingBackward::FindLandings() {
  for (int part = 0; part < route_.parts && !route_.direct; ++part) {
    bool travelling = false;
    for (int step = 1; step < route_.steps(); ++step) {
      travelling = travelling || route_.Sees(step, ring_.rank(), part);
      if (!travelling) continue;
      for (const RowRange& rows : Complete(route_, ring_.rank(), step, part)) {
        landings_.push_back({StepOf(step, part) + 1, rows});
      }
    }
  }
}

void RingBackward::Start() {
  StartBackward(first_step_, ring_.shard, builder_);
  // Where no gradients arrive, the own block starts from zero.
  for (const RowRange& rows : Gaps(landings_, builder_.kv_rows())) {
    builder_.AddZeroRows(first_step_, ring_.gradients, ring_.slots.HomeGradients(ring_.rank()),
                         rows);
  }
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

void RingBackward::Contribute(int source, int step, int part, bool first) {
  const int64_t at = StepOf(step, part);
  builder_.Use(at);
  if (route_.HolderOf(source, step) != ring_.rank()) return;
  const RowRange& rows = route_.held[step][source][part];
  const BlockLocation place = ring_.slots.Gradients(source, step, rows);
  KvOperand operand = ring_.Keys(step, rows);
  operand.dk = builder_.Range(ring_.gradients, TensorId::kDk, place);
  operand.dv = builder_.Range(ring_.gradients, TensorId::kDv, place);
  if (first) {
    builder_.AddZero(at, operand.dk);
    builder_.AddZero(at, operand.dv);
  }
  others_until_ = std::max(others_until_, at);
  ComputeCall call = BackwardCallOf(ring_.shard, builder_);
  AddOperand(call, operand, ring_.Work(source, rows));
  AddBackwardCall(at, std::move(call), ring_.shard, builder_);
}

void RingBackward::SendOnAndHome(int source, int step, int part) {
  const int64_t at = StepOf(step, part) + 1;
  const RowRange& rows = route_.held[step][source][part];
  if (rows.empty()) return;  // all rows have arrived
  builder_.Use(at);
  if (route_.direct) {
    SendToLanding(at, source, step, rows);
    return;
  }
  const RowRange next = NextHeld(route_, source, step, part);
  const int from = route_.HolderOf(source, step);
  const int to = next.empty() ? source : route_.HolderOf(source, step + 1);
  const int rank = ring_.rank();
  if (rank != from && rank != to && rank != source) return;
  if (!next.empty()) {
    builder_.Move(at, ring_.gradients, from, ring_.slots.Gradients(source, step, rows), to,
                  ring_.slots.Gradients(source, step + 1, next), next);
  }
  for (const RowRange& complete : Complete(route_, source, step, part)) {
    SendHome(at, source, step, rows, complete);
  }
}

void RingBackward::SendHome(int64_t at, int source, int step, const RowRange& part,
                            const RowRange& rows) {
  builder_.Move(at, ring_.gradients, route_.HolderOf(source, step),
                ring_.slots.Gradients(source, step, part), source,
                ring_.slots.HomeGradients(source), rows);
}

void RingBackward::SendToLanding(int64_t at, int source, int step, const RowRange& rows) {
  // Added one step later, so that calls do not queue behind an addition that still waits.
  const int64_t add_at = std::min(at + 1, own_step_);
  builder_.Use(add_at);
  const BlockLocation landing = BlockSlots::Landing(at, rows);
  builder_.Move(at, ring_.gradients, route_.HolderOf(source, step),
                ring_.slots.Gradients(source, step, rows), source, landing, rows);
  if (source != ring_.rank()) return;
  builder_.AddRowsLate(add_at, ring_.gradients, landing, ring_.slots.HomeGradients(source), rows);
}

RowRange RingBackward::LandsLast() const {
  int64_t last = -1;
  for (const Landing& landing : landings_) last = std::max(last, landing.at);
  RowRange late;
  if (last <= others_until_) return late;
  for (const Landing& landing : landings_) {
    if (landing.at != last) continue;
    late = late.empty() ? landing.rows
                        : RowRange{std::min(late.begin, landing.rows.begin),
                                   std::max(late.end, landing.rows.end)};
  }
  return late;
}

void RingBackward::OwnBlock() {
  const RowRange all{0, builder_.kv_rows()};
  const RowRange late = LandsLast();
  // With one batch row, rows are one range of bytes, so the rows that arrive last can wait while
  // the others compute.
  const bool in_two = builder_.spec().shape.batch == 1 && !late.empty() && late.size() < all.size();
  if (in_two) {
    AddOwnCall({{0, late.begin}, {late.end, all.end}});
    AddOwnCall({late});
  } else {
    AddOwnCall({all});
  }
}

void RingBackward::AddOwnCall(const std::vector<RowRange>& ranges) {
  ComputeCall call = BackwardCallOf(ring_.shard, builder_);
  const int rank = ring_.rank();
  for (const RowRange& rows : ranges) {
    const WorkCount& work = ring_.Work(rank, rows);
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

void AddRingBackward(RingRank& ring, int64_t first_step) { RingBackward(ring, first_step).Add(); }

}  // namespace ringattn
