#include "common/plan/cost_model.h"

#include <algorithm>
#include <cassert>
#include <numeric>
#include <utility>

#include "common/program/access.h"
#include "common/schedule/route/work_count.h"

namespace ringattn {
namespace {

// Matrix products per pair: forward q k, p v; backward q k again, dout v, and the products for dv,
// dk, dq. A multiply-add counts as two operations.
double FlopsPerPair(const AttentionSpec& spec, ComputeCall::Op op) {
  const double dim = static_cast<double>(spec.shape.head_dim);
  const double dim_v = static_cast<double>(spec.shape.head_dim_v);
  switch (op) {
    case ComputeCall::Op::kForward:
      return 2.0 * (dim + dim_v);
    case ComputeCall::Op::kBackward:
      return 2.0 * (3.0 * dim + 2.0 * dim_v);
    case ComputeCall::Op::kBiasGradient:
      return 2.0 * (dim + dim_v);
    default:
      return 0.0;
  }
}

// One product per chosen row and key. Kernels for single rows are slower than those for tiles by
// this factor.
constexpr double kChosenRowSlowness = 32.0;
double ProbabilityFlops(const AttentionSpec& spec, const ComputeCall& call) {
  const double row_bytes =
      4.0 *
      static_cast<double>(spec.shape.num_heads * std::max<int64_t>(ProbabilityColumns(spec), 1));
  double keys = 0;
  for (const KvOperand& operand : call.kv) keys += static_cast<double>(operand.rows());
  return static_cast<double>(call.target.bytes) / row_bytes * keys *
         static_cast<double>(spec.shape.num_heads) * 2.0 *
         static_cast<double>(spec.shape.head_dim) * kChosenRowSlowness;
}

double HeadRows(const AttentionSpec& spec) {
  return static_cast<double>(spec.shape.batch) * static_cast<double>(spec.shape.num_heads);
}

// Representatives of one rank are built together if their entries are at most this far apart: a
// part also has the entries around those that it is made for.
constexpr int kJoinedEntries = 4;

void AddIfAbsent(std::vector<int>& ranks, int rank) {
  if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) ranks.push_back(rank);
}

}  // namespace

double FlopsOfCall(const AttentionSpec& spec, const ComputeCall& call) {
  double flops = FlopsPerPair(spec, call.op) * HeadRows(spec) * call.share_of_heads() *
                 static_cast<double>(call.tiles * kTileRows * kTileRows);
  if (call.op == ComputeCall::Op::kProbabilities) flops += ProbabilityFlops(spec, call);
  return flops;
}

double FlopsOfPairs(const AttentionSpec& spec, Direction direction, bool recompute_forward,
                    double pairs) {
  double per_pair = 0;
  if (direction == Direction::kForward || recompute_forward) {
    per_pair += FlopsPerPair(spec, ComputeCall::Op::kForward);
  }
  if (direction == Direction::kBackward) per_pair += FlopsPerPair(spec, ComputeCall::Op::kBackward);
  return per_pair * pairs * HeadRows(spec);
}

CostSum::CostSum(const AttentionSpec& spec, const PlannerInputs& inputs,
                 std::vector<int> host_of_rank)
    : spec_(spec), inputs_(inputs), host_of_rank_(std::move(host_of_rank)) {
  for (int host : host_of_rank_) hosts_ = std::max(hosts_, host + 1);
}

// Sorted by buffer, because a step of a dilated problem has thousands of calls and of buffers.
class CostSum::CallAccesses {
 public:
  CallAccesses() = default;
  explicit CallAccesses(const Step& step) {
    for (const ComputeCall& call : step.calls) {
      const std::vector<Access> accesses = AccessesOf(call);
      accesses_.insert(accesses_.end(), accesses.begin(), accesses.end());
    }
    std::sort(accesses_.begin(), accesses_.end(),
              [](const Access& a, const Access& b) { return a.range.buffer < b.range.buffer; });
  }

  bool ConflictWith(const Access& access) const {
    const BufferId buffer = access.range.buffer;
    auto other =
        std::lower_bound(accesses_.begin(), accesses_.end(), buffer,
                         [](const Access& a, BufferId wanted) { return a.range.buffer < wanted; });
    for (; other != accesses_.end() && other->range.buffer == buffer; ++other) {
      if (Conflict(access, *other)) return true;
    }
    return false;
  }

  const std::vector<Access>& all() const { return accesses_; }

 private:
  std::vector<Access> accesses_;
};

CostSum::RankStep CostSum::CostOf(int rank, const Step& step, const CallAccesses& calls,
                                  const CallAccesses& last_calls) const {
  double flops = 0;
  RankStep cost;
  for (const ComputeCall& call : step.calls) {
    flops += FlopsOfCall(spec_, call);
    const double of_pairs = FlopsPerPair(spec_, call.op) * HeadRows(spec_) * call.share_of_heads() *
                            static_cast<double>(call.pairs);
    if (of_pairs > 0) cost.flops.push_back(of_pairs);
  }
  double sent = 0, received = 0, between = 0;
  for (const Transfer& transfer : step.transfers) {
    const bool sends = transfer.kind == Transfer::Kind::kSend;
    const int peer = Relative(rank, transfer.peer);
    const double bytes = static_cast<double>(transfer.range.bytes);
    const Access own = AccessOf(transfer);
    cost.after_last_calls = cost.after_last_calls || last_calls.ConflictWith(own);
    // Calls of a later step are not looked up: they wait for the transfer anyway.
    const bool before_calls = transfer.steps == 1 && calls.ConflictWith(own);
    if (transfer.lane == Lane::kInside) {
      (sends ? sent : received) += bytes;
      AddIfAbsent(cost.peers, peer);
      cost.exchange_before_calls = cost.exchange_before_calls || before_calls;
      continue;
    }
    if (before_calls) AddIfAbsent(cost.needed_from, peer);
    between += bytes / inputs_.host_link_bytes_per_s / transfer.steps;
    if (!sends) continue;
    auto to_peer = std::find_if(cost.sent.begin(), cost.sent.end(), [&](const Sent& flow) {
      return flow.to == peer && flow.steps == transfer.steps;
    });
    if (to_peer == cost.sent.end()) {
      to_peer = cost.sent.insert(to_peer, {.to = peer, .steps = transfer.steps});
    }
    to_peer->bytes += bytes;
  }
  if (!cost.peers.empty()) {
    cost.exchange_seconds =
        std::max(sent, received) / inputs_.link_bytes_per_s + inputs_.exchange_overhead_s;
  }
  cost.between_seconds = between;
  cost.compute_seconds =
      flops / inputs_.device_flops_per_s +
      inputs_.step_overhead_s * static_cast<double>(std::max<size_t>(step.calls.size(), 1));
  return cost;
}

// In classes, the distance of the groups times their size, and the distance in the group; both to
// the right. Otherwise the difference.
int CostSum::Relative(int rank, int peer) const {
  if (group_size_ == 0) return peer - rank;
  const int groups = world_size_ / group_size_;
  const int outer = peer / group_size_ - rank / group_size_;
  const int inner = peer % group_size_ - rank % group_size_;
  return (outer < 0 ? outer + groups : outer) * group_size_ +
         (inner < 0 ? inner + group_size_ : inner);
}

int CostSum::Peer(int rank, int relative) const {
  if (group_size_ == 0) return rank + relative;
  if (group_size_ == world_size_) {
    const int peer = rank + relative;
    return peer >= world_size_ ? peer - world_size_ : peer;
  }
  const int groups = world_size_ / group_size_;
  const int group = rank / group_size_ + relative / group_size_;
  const int place = rank % group_size_ + relative % group_size_;
  return (group >= groups ? group - groups : group) * group_size_ +
         (place >= group_size_ ? place - group_size_ : place);
}

std::vector<CostSum::NamedBytes> CostSum::Named(const std::vector<BufferSpec>& buffers) {
  std::vector<NamedBytes> named;
  for (const BufferSpec& buffer : buffers) {
    const int name = names_.try_emplace(buffer.name, static_cast<int>(names_.size())).first->second;
    named.push_back({name, buffer.bytes});
  }
  return named;
}

int CostSum::AddRun(const Program& program, int begin, int end) {
  StepRun run;
  run.first = static_cast<int>(steps_.size());
  run.count = end - begin;
  std::vector<NamedBytes> used = Named(program.buffers);
  for (NamedBytes& buffer : used) buffer.bytes = 0;
  const auto use = [&used](const ByteRange& range) {
    int64_t& bytes = used[range.buffer].bytes;
    bytes = std::max(bytes, range.offset + range.bytes);
  };
  CallAccesses last_calls;
  if (begin > 0) last_calls = CallAccesses(program.steps[begin - 1]);
  for (int i = begin; i < end; ++i) {
    const Step& step = program.steps[i];
    CallAccesses calls(step);
    steps_.push_back(CostOf(program.rank, step, calls, last_calls));
    any_sent_ = any_sent_ || !steps_.back().sent.empty();
    for (const Access& access : calls.all()) use(access.range);
    for (const ComputeCall& call : step.calls) run.tiles += call.tiles;
    for (const Transfer& transfer : step.transfers) {
      use(transfer.range);
      if (transfer.kind == Transfer::Kind::kSend) run.sent_bytes += transfer.range.bytes;
    }
    last_calls = std::move(calls);
  }
  for (const NamedBytes& buffer : used) {
    if (buffer.bytes > 0) run.buffers.push_back(buffer);
  }
  runs_.push_back(std::move(run));
  return static_cast<int>(runs_.size()) - 1;
}

void CostSum::AppendRun(const StepRun& run) {
  for (int step = run.first; step < run.first + run.count; ++step) {
    const RankStep& cost = steps_[step];
    step_ids_.push_back(step);
    const double seconds = cost.seconds();
    rank_seconds_ += seconds;
    plan_.predicted_step_seconds = std::max(plan_.predicted_step_seconds, seconds);
    for (double flops : cost.flops) plan_.flops += flops;
  }
  plan_.tiles.back() += run.tiles;
  plan_.sent_bytes.back() += run.sent_bytes;
  plan_.exchanged_bytes += run.sent_bytes;
}

void CostSum::Add(const Program& program) {
  assert(program.rank == world_size_);
  ++world_size_;
  step_count_ = program.steps.size();
  const int run = AddRun(program, 0, static_cast<int>(step_count_));
  plan_.tiles.push_back(0);
  plan_.sent_bytes.push_back(0);
  rank_seconds_ = 0;
  AppendRun(runs_[run]);
  plan_.buffer_bytes.push_back(program.BufferBytes());
  plan_.tiles.back() = program.TileCount();  // a call may have some heads only
  plan_.busiest_rank_seconds = std::max(plan_.busiest_rank_seconds, rank_seconds_);
}

void CostSum::AddAll(const ClassedPrograms& programs) {
  const StepClasses& classes = programs.classes();
  world_size_ = static_cast<int>(classes.shard_buffers_of.size());
  group_size_ = classes.group_size;
  step_count_ = classes.first_step.back();
  // The first representatives have their entries in a row: one part has them all.
  const auto& wanted = classes.representatives;
  for (size_t i = 0; i < wanted.size();) {
    size_t end = i + 1;
    while (end < wanted.size() && wanted[end].rank == wanted[i].rank &&
           wanted[end].entry - wanted[end - 1].entry <= kJoinedEntries) {
      ++end;
    }
    Program part = programs.MakePart(wanted[i].rank, wanted[i].entry, wanted[end - 1].entry + 1);
    AssignLanes(host_of_rank_, part);
    for (; i < end; ++i) {
      AddRun(part, classes.first_step[wanted[i].entry], classes.first_step[wanted[i].entry + 1]);
    }
  }
  std::vector<std::vector<NamedBytes>> shard_buffers;
  for (const auto& buffers : classes.shard_buffers) shard_buffers.push_back(Named(buffers));
  step_ids_.reserve(world_size_ * step_count_);
  std::vector<int64_t> bytes(names_.size());
  std::vector<int> counted_for(runs_.size(), -1);  // by run: the last rank that has it
  for (int rank = 0; rank < world_size_; ++rank) {
    plan_.tiles.push_back(0);
    plan_.sent_bytes.push_back(0);
    rank_seconds_ = 0;
    std::fill(bytes.begin(), bytes.end(), 0);
    const auto count = [&bytes](const std::vector<NamedBytes>& buffers) {
      for (const NamedBytes& buffer : buffers) {
        bytes[buffer.name] = std::max(bytes[buffer.name], buffer.bytes);
      }
    };
    count(shard_buffers[classes.shard_buffers_of[rank]]);
    for (int entry = 0; entry < classes.entries(); ++entry) {
      const int id = classes.class_of[rank * classes.entries() + entry];
      AppendRun(runs_[id]);
      if (std::exchange(counted_for[id], rank) != rank) count(runs_[id].buffers);
    }
    plan_.buffer_bytes.push_back(std::accumulate(bytes.begin(), bytes.end(), int64_t{0}));
    plan_.busiest_rank_seconds = std::max(plan_.busiest_rank_seconds, rank_seconds_);
  }
}

double CostSum::Links::Occupy(int from, int to, double ready, double seconds) {
  out[from] = in[to] = std::max({ready, out[from], in[to]}) + seconds;
  return out[from];
}

void CostSum::ExchangeBetweenHosts(size_t step) {
  struct Flow {
    int from;
    int to;
    const Sent* sent;
    double ready;
  };
  std::vector<Flow> flows;
  for (int rank = 0; rank < world_size_; ++rank) {
    for (const Sent& sent : StepOf(rank, step).sent) {
      const int to = Peer(rank, sent.to);
      flows.push_back({rank, to, &sent, std::max(ready_[rank], ready_[to])});
    }
  }
  std::stable_sort(flows.begin(), flows.end(),
                   [](const Flow& a, const Flow& b) { return a.ready < b.ready; });
  for (const Flow& flow : flows) {
    const int to = flow.to;
    const double bytes = flow.sent->bytes;
    const double of_ranks =
        rank_links_.Occupy(flow.from, to, flow.ready, bytes / inputs_.host_link_bytes_per_s);
    const double of_hosts = host_links_.Occupy(host_of_rank_[flow.from], host_of_rank_[to],
                                               flow.ready, bytes / inputs_.HostBytesPerSecond());
    rank_links_.out[flow.from] = rank_links_.in[to] = std::max(of_ranks, of_hosts);
    const double ends = rank_links_.out[flow.from] + inputs_.host_exchange_overhead_s;
    for (int rank : {flow.from, to}) {
      const std::vector<int>& needed = StepOf(rank, step).needed_from;
      const int peer = rank == flow.from ? to : flow.from;
      const bool is_needed = std::any_of(
          needed.begin(), needed.end(), [&](int relative) { return Peer(rank, relative) == peer; });
      Arrivals& arrivals = arrivals_[rank][step + flow.sent->steps - 1];
      arrivals.all = std::max(arrivals.all, ends);
      if (is_needed) arrivals.before_calls = std::max(arrivals.before_calls, ends);
    }
  }
}

void CostSum::Exchange(size_t step, const Progress& before, const Progress& earlier,
                       Progress& now) {
  for (int rank = 0; rank < world_size_; ++rank) {
    const double calls =
        StepOf(rank, step).after_last_calls ? before.calls[rank] : earlier.calls[rank];
    ready_[rank] = std::max(calls, before.arrivals[rank]);
  }
  for (int rank = 0; rank < world_size_; ++rank) {
    const RankStep& cost = StepOf(rank, step);
    if (cost.peers.empty()) continue;
    double begins = std::max(ready_[rank], before.exchanges[rank]);
    for (int relative : cost.peers) {
      const int peer = Peer(rank, relative);
      begins = std::max({begins, ready_[peer], before.exchanges[peer]});
    }
    now.exchanges[rank] = begins + cost.exchange_seconds;
  }
  if (!any_sent_) return;
  ExchangeBetweenHosts(step);
  for (int rank = 0; rank < world_size_; ++rank) {
    now.arrivals[rank] = std::max(now.arrivals[rank], arrivals_[rank][step].all);
  }
}

Plan CostSum::Finish(const ProgramRecipe& recipe, ShardPlan shards) && {
  plan_.recipe = recipe;
  plan_.shards = std::move(shards);
  plan_.step_count = static_cast<int64_t>(step_count_);
  const std::vector<double> zeros(world_size_, 0);
  ready_ = zeros;
  if (any_sent_) {
    arrivals_.assign(world_size_, std::vector<Arrivals>(step_count_));
    rank_links_ = {zeros, zeros};
    host_links_.out.assign(hosts_, 0);
    host_links_.in.assign(hosts_, 0);
  }
  Progress earlier{zeros, zeros, zeros};
  Progress before = earlier;
  Progress now = earlier;
  for (size_t step = 0; step < step_count_; ++step) {
    now.exchanges = before.exchanges;
    now.arrivals = before.arrivals;
    Exchange(step, before, earlier, now);
    for (int rank = 0; rank < world_size_; ++rank) {
      const RankStep& cost = StepOf(rank, step);
      double begins = std::max({before.calls[rank], before.exchanges[rank], before.arrivals[rank]});
      if (any_sent_) begins = std::max(begins, arrivals_[rank][step].before_calls);
      if (cost.exchange_before_calls) begins = std::max(begins, now.exchanges[rank]);
      now.calls[rank] = begins + cost.compute_seconds;
    }
    std::swap(earlier, before);
    std::swap(before, now);
  }
  for (const std::vector<double>* ends : {&before.calls, &before.exchanges, &before.arrivals}) {
    for (double seconds : *ends) {
      plan_.predicted_compute_seconds = std::max(plan_.predicted_compute_seconds, seconds);
    }
  }
  return std::move(plan_);
}

}  // namespace ringattn
