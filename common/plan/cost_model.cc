#include "common/plan/cost_model.h"

#include <algorithm>
#include <utility>

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

}  // namespace

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

std::vector<CostSum::BetweenHosts> CostSum::BetweenHostsByStep(const Program& program) const {
  std::vector<BetweenHosts> by_step(program.steps.size());
  for (size_t begin = 0; begin < program.steps.size(); ++begin) {
    for (const Transfer& transfer : program.steps[begin].transfers) {
      if (transfer.lane != Lane::kBetween) continue;
      const double share = 1.0 / transfer.steps;
      for (size_t step = begin; step < begin + transfer.steps; ++step) {
        HostBytes& bytes = by_step[step].bytes;
        (transfer.kind == Transfer::Kind::kSend ? bytes.sent : bytes.received) +=
            share * static_cast<double>(transfer.range.bytes);
        by_step[step].overhead_seconds =
            std::max(by_step[step].overhead_seconds, share * inputs_.host_exchange_overhead_s);
      }
    }
  }
  return by_step;
}

double CostSum::SecondsOfStep(int rank, const Step& step, const BetweenHosts& between,
                              StepCost* cost) const {
  double flops = 0;
  for (const ComputeCall& call : step.calls) {
    flops += FlopsPerPair(spec_, call.op) * HeadRows(spec_) * call.share_of_heads() *
             static_cast<double>(call.tiles * kTileRows * kTileRows);
    if (call.op == ComputeCall::Op::kProbabilities) flops += ProbabilityFlops(spec_, call);
  }
  HostBytes inside;
  bool exchanges_inside = false;
  for (const Transfer& transfer : step.transfers) {
    if (transfer.lane == Lane::kBetween) continue;
    exchanges_inside = true;
    (transfer.kind == Transfer::Kind::kSend ? inside.sent : inside.received) +=
        static_cast<double>(transfer.range.bytes);
  }
  double exchange = 0;
  if (exchanges_inside) {
    exchange = std::max(inside.sent, inside.received) / inputs_.link_bytes_per_s +
               inputs_.exchange_overhead_s;
  }
  if (between.overhead_seconds > 0 || between.bytes.sent + between.bytes.received > 0) {
    exchange = std::max(exchange, std::max(between.bytes.sent, between.bytes.received) /
                                          inputs_.host_link_bytes_per_s +
                                      between.overhead_seconds);
    cost->hosts.resize(hosts_);
    cost->hosts[host_of_rank_[rank]].sent += between.bytes.sent;
    cost->hosts[host_of_rank_[rank]].received += between.bytes.received;
    cost->overhead = std::max(cost->overhead, between.overhead_seconds);
  }
  const double launches =
      inputs_.step_overhead_s * static_cast<double>(std::max<size_t>(step.calls.size(), 1));
  const double seconds = std::max(flops / inputs_.device_flops_per_s, exchange) + launches;
  cost->seconds = std::max(cost->seconds, seconds);
  cost->launches = std::max(cost->launches, launches);
  return seconds;
}

void CostSum::Add(const Program& program) {
  plan_.buffer_bytes.push_back(program.BufferBytes());
  plan_.tiles.push_back(program.TileCount());
  plan_.sent_bytes.push_back(program.SentBytes());
  plan_.exchanged_bytes += plan_.sent_bytes.back();
  steps_.resize(program.steps.size());
  double rank_seconds = 0;
  const std::vector<BetweenHosts> between = BetweenHostsByStep(program);
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const Step& step = program.steps[i];
    rank_seconds += SecondsOfStep(program.rank, step, between[i], &steps_[i]);
    for (const ComputeCall& call : step.calls) {
      plan_.flops += FlopsPerPair(spec_, call.op) * HeadRows(spec_) * call.share_of_heads() *
                     static_cast<double>(call.pairs);
    }
  }
  plan_.busiest_rank_seconds = std::max(plan_.busiest_rank_seconds, rank_seconds);
}

Plan CostSum::Finish(const ProgramRecipe& recipe, ShardPlan shards) && {
  plan_.recipe = recipe;
  plan_.shards = std::move(shards);
  plan_.step_count = static_cast<int64_t>(steps_.size());
  for (const StepCost& step : steps_) {
    double seconds = step.seconds;
    for (const HostBytes& host : step.hosts) {
      if (host.sent == 0 && host.received == 0) continue;
      seconds =
          std::max(seconds, std::max(host.sent, host.received) / inputs_.host_link_bytes_per_s +
                                step.overhead + step.launches);
    }
    plan_.predicted_compute_seconds += seconds;
    plan_.predicted_step_seconds = std::max(plan_.predicted_step_seconds, seconds);
  }
  return std::move(plan_);
}

}  // namespace ringattn
