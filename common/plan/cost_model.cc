#include "common/plan/cost_model.h"

#include <algorithm>
#include <cassert>
#include <unordered_map>
#include <utility>

#include "common/program/access.h"
#include "common/schedule/work_count.h"

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

// Indexed by buffer, because a step of a dilated problem has thousands of calls and of buffers.
class CostSum::CallAccesses {
 public:
  CallAccesses() = default;
  explicit CallAccesses(const Step& step) {
    for (const ComputeCall& call : step.calls) {
      for (const Access& access : AccessesOf(call))
        by_buffer_[access.range.buffer].push_back(access);
    }
  }

  bool ConflictWith(const Access& access) const {
    const auto found = by_buffer_.find(access.range.buffer);
    return found != by_buffer_.end() &&
           std::any_of(found->second.begin(), found->second.end(),
                       [&](const Access& other) { return Conflict(access, other); });
  }

 private:
  std::unordered_map<BufferId, std::vector<Access>> by_buffer_;
};

CostSum::RankStep CostSum::CostOf(const Step& step, const CallAccesses& calls,
                                  const CallAccesses& last_calls) const {
  double flops = 0;
  for (const ComputeCall& call : step.calls) flops += FlopsOfCall(spec_, call);
  RankStep cost;
  double sent = 0, received = 0, between = 0;
  for (const Transfer& transfer : step.transfers) {
    const bool sends = transfer.kind == Transfer::Kind::kSend;
    const double bytes = static_cast<double>(transfer.range.bytes);
    const Access own = AccessOf(transfer);
    cost.after_last_calls = cost.after_last_calls || last_calls.ConflictWith(own);
    // Calls of a later step are not looked up: they wait for the transfer anyway.
    const bool before_calls = transfer.steps == 1 && calls.ConflictWith(own);
    if (transfer.lane == Lane::kInside) {
      (sends ? sent : received) += bytes;
      AddIfAbsent(cost.peers, transfer.peer);
      cost.exchange_before_calls = cost.exchange_before_calls || before_calls;
      continue;
    }
    if (before_calls) AddIfAbsent(cost.needed_from, transfer.peer);
    between += bytes / inputs_.host_link_bytes_per_s / transfer.steps;
    if (!sends) continue;
    auto to_peer = std::find_if(cost.sent.begin(), cost.sent.end(), [&](const Sent& flow) {
      return flow.to == transfer.peer && flow.steps == transfer.steps;
    });
    if (to_peer == cost.sent.end()) {
      to_peer = cost.sent.insert(to_peer, {.to = transfer.peer, .steps = transfer.steps});
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

void CostSum::Add(const Program& program) {
  assert(program.rank == static_cast<int>(ranks_.size()));
  plan_.buffer_bytes.push_back(program.BufferBytes());
  plan_.tiles.push_back(program.TileCount());
  plan_.sent_bytes.push_back(program.SentBytes());
  plan_.exchanged_bytes += plan_.sent_bytes.back();
  std::vector<RankStep>& steps = ranks_.emplace_back();
  double rank_seconds = 0;
  CallAccesses last_calls;
  for (const Step& step : program.steps) {
    CallAccesses calls(step);
    steps.push_back(CostOf(step, calls, last_calls));
    last_calls = std::move(calls);
    const RankStep& cost = steps.back();
    const double seconds =
        std::max({cost.compute_seconds, cost.exchange_seconds, cost.between_seconds});
    rank_seconds += seconds;
    plan_.predicted_step_seconds = std::max(plan_.predicted_step_seconds, seconds);
    for (const ComputeCall& call : step.calls) {
      plan_.flops += FlopsPerPair(spec_, call.op) * HeadRows(spec_) * call.share_of_heads() *
                     static_cast<double>(call.pairs);
    }
  }
  plan_.busiest_rank_seconds = std::max(plan_.busiest_rank_seconds, rank_seconds);
}

double CostSum::ReadyToExchange(int rank, size_t step, const Progress& before,
                                const Progress& earlier) const {
  const double calls =
      ranks_[rank][step].after_last_calls ? before.calls[rank] : earlier.calls[rank];
  return std::max(calls, before.arrivals[rank]);
}

double CostSum::Links::Occupy(int from, int to, double ready, double seconds) {
  out[from] = in[to] = std::max({ready, out[from], in[to]}) + seconds;
  return out[from];
}

void CostSum::ExchangeBetweenHosts(size_t step, const std::vector<double>& ready) {
  struct Flow {
    int from;
    const Sent* sent;
    double ready;
  };
  std::vector<Flow> flows;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    for (const Sent& sent : ranks_[rank][step].sent) {
      flows.push_back({static_cast<int>(rank), &sent, std::max(ready[rank], ready[sent.to])});
    }
  }
  std::stable_sort(flows.begin(), flows.end(),
                   [](const Flow& a, const Flow& b) { return a.ready < b.ready; });
  for (const Flow& flow : flows) {
    const int to = flow.sent->to;
    const double bytes = flow.sent->bytes;
    const double of_ranks =
        rank_links_.Occupy(flow.from, to, flow.ready, bytes / inputs_.host_link_bytes_per_s);
    const double of_hosts = host_links_.Occupy(host_of_rank_[flow.from], host_of_rank_[to],
                                               flow.ready, bytes / inputs_.HostBytesPerSecond());
    rank_links_.out[flow.from] = rank_links_.in[to] = std::max(of_ranks, of_hosts);
    const double ends = rank_links_.out[flow.from] + inputs_.host_exchange_overhead_s;
    for (int rank : {flow.from, to}) {
      const std::vector<int>& needed = ranks_[rank][step].needed_from;
      const int peer = rank == flow.from ? to : flow.from;
      Arrivals& arrivals = arrivals_[rank][step + flow.sent->steps - 1];
      arrivals.all = std::max(arrivals.all, ends);
      if (std::find(needed.begin(), needed.end(), peer) != needed.end()) {
        arrivals.before_calls = std::max(arrivals.before_calls, ends);
      }
    }
  }
}

void CostSum::Exchange(size_t step, const Progress& before, const Progress& earlier,
                       Progress& now) {
  std::vector<double> ready;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    ready.push_back(ReadyToExchange(static_cast<int>(rank), step, before, earlier));
  }
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const RankStep& cost = ranks_[rank][step];
    if (cost.peers.empty()) continue;
    double begins = std::max(ready[rank], before.exchanges[rank]);
    for (int peer : cost.peers) {
      begins = std::max({begins, ready[peer], before.exchanges[peer]});
    }
    now.exchanges[rank] = begins + cost.exchange_seconds;
  }
  ExchangeBetweenHosts(step, ready);
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    now.arrivals[rank] = std::max(now.arrivals[rank], arrivals_[rank][step].all);
  }
}

Plan CostSum::Finish(const ProgramRecipe& recipe, ShardPlan shards) && {
  plan_.recipe = recipe;
  plan_.shards = std::move(shards);
  const size_t steps = ranks_.empty() ? 0 : ranks_.front().size();
  plan_.step_count = static_cast<int64_t>(steps);
  arrivals_.assign(ranks_.size(), std::vector<Arrivals>(steps));
  const std::vector<double> zeros(ranks_.size(), 0);
  rank_links_ = {zeros, zeros};
  host_links_.out.assign(hosts_, 0);
  host_links_.in.assign(hosts_, 0);
  Progress earlier{zeros, zeros, zeros};
  Progress before = earlier;
  for (size_t step = 0; step < steps; ++step) {
    Progress now = before;
    Exchange(step, before, earlier, now);
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      const RankStep& cost = ranks_[rank][step];
      double begins = std::max({before.calls[rank], before.exchanges[rank], before.arrivals[rank],
                                arrivals_[rank][step].before_calls});
      if (cost.exchange_before_calls) begins = std::max(begins, now.exchanges[rank]);
      now.calls[rank] = begins + cost.compute_seconds;
    }
    earlier = std::exchange(before, std::move(now));
  }
  for (const std::vector<double>* ends : {&before.calls, &before.exchanges, &before.arrivals}) {
    for (double seconds : *ends) {
      plan_.predicted_compute_seconds = std::max(plan_.predicted_compute_seconds, seconds);
    }
  }
  return std::move(plan_);
}

}  // namespace ringattn
