#include "worker/service/slowdown.h"

#include <algorithm>
#include <optional>

namespace ringattn::worker {
namespace {

// Returns the direction of calls whose kernels have rates.
std::optional<Direction> DirectionOf(ComputeCall::Op op) {
  switch (op) {
    case ComputeCall::Op::kForward:
      return Direction::kForward;
    case ComputeCall::Op::kBackward:
    case ComputeCall::Op::kBiasGradient:
      return Direction::kBackward;
    default:
      return std::nullopt;
  }
}

}  // namespace

double SlowdownOfCall(const AttentionSpec& spec, Direction direction, std::string_view family,
                      const std::vector<KernelRate>& rates) {
  const KernelRate* const expected = RateOf(rates, spec, direction);
  if (expected == nullptr || expected->family == family) return 1;
  double slowest = expected->flops_per_second;
  for (const KernelRate& rate : rates) {
    if (rate.family != family || rate.direction != direction) continue;
    if (rate.kind.score_terms != expected->kind.score_terms) continue;
    slowest = std::min(slowest, rate.flops_per_second);
  }
  return expected->flops_per_second / slowest;
}

double SlowdownOf(const Operation& operation, const std::vector<KernelRate>& rates) {
  double slowdown = 1;
  const std::vector<Step>& steps = operation.program().steps;
  for (size_t step = 0; step < steps.size(); ++step) {
    const std::vector<ReadyCall>& ready = operation.ReadyCalls(static_cast<int64_t>(step));
    for (size_t i = 0; i < ready.size(); ++i) {
      const std::optional<Direction> direction = DirectionOf(steps[step].calls[i].op);
      if (!direction.has_value()) continue;
      const std::string_view family = ready[i].call->kernel().family;
      slowdown = std::max(slowdown, SlowdownOfCall(operation.spec(), *direction, family, rates));
    }
  }
  return slowdown;
}

}  // namespace ringattn::worker
