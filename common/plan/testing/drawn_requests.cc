#include "common/plan/testing/drawn_requests.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "absl/strings/str_format.h"
#include "common/schedule/testing/schedule_cases.h"

namespace ringattn {
namespace {

// Returns one of the values.
template <typename Value>
Value OneOf(std::mt19937& random, const std::vector<Value>& values) {
  return values[random() % values.size()];
}

// Hosts of equally many workers or of one to four.
std::vector<int> DrawHosts(std::mt19937& random, int workers) {
  std::vector<int> hosts;
  const int each = random() % 2 == 0 ? OneOf<int>(random, {2, 4, 5}) : 0;
  for (int left = workers; left > 0; left -= hosts.back()) {
    const int size = each > 0 ? each : static_cast<int>(1 + random() % 4);
    hosts.push_back(std::min(left, size));
  }
  return hosts;
}

PlannerInputs DrawInputs(std::mt19937& random, int workers) {
  PlannerInputs inputs;
  inputs.ready_workers = workers;
  inputs.single_device_threshold_tokens = 16;
  inputs.device_flops_per_s = OneOf<double>(random, {3e10, 1e12, 6e14});
  inputs.link_bytes_per_s = OneOf<double>(random, {1e7, 1e9, 3e11});
  inputs.step_overhead_s = OneOf<double>(random, {1e-4, 5e-6});
  inputs.exchange_overhead_s = OneOf<double>(random, {0, 3e-5});
  inputs.host_link_bytes_per_s = OneOf<double>(random, {1e7, 1.25e9});
  inputs.host_total_bytes_per_s = OneOf<double>(random, {0, 2e9});
  if (random() % 2 == 0) return inputs;
  for (int size : DrawHosts(random, workers)) {
    const double slower = random() % 4 == 0 ? 0.3 : 1.0;
    inputs.hosts.push_back({size, slower * inputs.device_flops_per_s, inputs.link_bytes_per_s,
                            inputs.step_overhead_s, inputs.exchange_overhead_s});
  }
  return inputs;
}

// Returns a divisor of the ring size.
int64_t DrawGroupSize(std::mt19937& random, int world_size) {
  std::vector<int64_t> divisors;
  for (int size = 1; size <= world_size; ++size) {
    if (world_size % size == 0) divisors.push_back(size);
  }
  return OneOf(random, divisors);
}

}  // namespace

DrawnRequest DrawRequest(int number) {
  std::mt19937 random(40000000 + number);
  // Shards of 1,024 rows and more travel in four parts.
  const ScheduleCase drawn =
      DrawScheduleCase(random, OneOf<int64_t>(random, {60, 400, 6000, 40000}));
  DrawnRequest request;
  request.spec = drawn.spec;
  request.direction = drawn.recipe.direction;
  PlanChoice& forced = request.forced;
  forced.layout = drawn.recipe.layout;
  forced.schedule = drawn.recipe.schedule;
  forced.stripe = drawn.recipe.stripe;
  forced.heads_per_step = drawn.recipe.heads_per_step;
  forced.recompute_forward = drawn.recipe.recompute_forward;
  forced.keeps_inputs = request.direction == Direction::kForward && random() % 2 == 0;
  int workers = drawn.plan.world_size;
  if (random() % 2 == 0 && forced.schedule != ScheduleKind::kSingle) {
    workers = static_cast<int>(9 + random() % 8);
  }
  forced.world_size = workers;
  if (forced.schedule == ScheduleKind::kDoubleRing) {
    forced.group_size = DrawGroupSize(random, workers);
  }
  AttentionOptions& options = request.spec.options;
  const bool may_dilate = request.spec.probability_rows.empty() && forced.heads_per_step == 0 &&
                          !options.bias.has_value() && !options.mask.has_value() &&
                          !request.spec.has_dlse;
  if (may_dilate && random() % 4 == 0) {
    DilationLevel level;
    level.segment_length = static_cast<int64_t>(16 + random() % 200);
    level.dilation_rate = static_cast<int64_t>(1 + random() % 2);
    options.dilation_levels = {level};
  }
  request.free.recompute_forward = forced.recompute_forward;
  request.free.keeps_inputs = forced.keeps_inputs;
  request.inputs = DrawInputs(random, workers);
  return request;
}

DrawnRequest DrawRing(int number) {
  std::mt19937 random(50000000 + number);
  DrawnRequest request = DrawRequest(number);
  const int workers =
      OneOf<int>(random, {3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16, 18, 20, 21, 24, 27, 28, 30, 32});
  PlanChoice& forced = request.forced;
  forced.schedule = random() % 4 == 0 ? ScheduleKind::kRing : ScheduleKind::kDoubleRing;
  forced.heads_per_step = 0;
  forced.group_size =
      forced.schedule == ScheduleKind::kDoubleRing ? DrawGroupSize(random, workers) : 0;
  forced.world_size = workers;
  AttentionOptions& options = request.spec.options;
  options.dilation_levels.clear();
  options.sinks = options.sinks && request.direction == Direction::kForward;
  if (random() % 2 == 0) {
    // Ranks that need different rows of others' blocks, in two batch rows as often as in one.
    AttentionShape& shape = request.spec.shape;
    shape.packed = false;
    shape.batch = 1 + random() % 2;
    const int64_t tokens = 1 + random() % (workers * OneOf<int64_t>(random, {4, 40, 400, 1500}));
    shape.seq_len_q = shape.seq_len_kv = tokens;
    shape.cu_seqlens_q = shape.cu_seqlens_k = {0, tokens};
    options.window_left = static_cast<int64_t>(random() % (2 * tokens));
    options.window_right = static_cast<int64_t>(random() % (2 * tokens));
    request.spec.probability_rows.clear();
    forced.layout = OneOf<Layout>(random, {Layout::kContiguous, Layout::kZigzag, Layout::kZigzag});
  }
  request.inputs = DrawInputs(random, workers);
  return request;
}

std::string FiguresOf(const Plan& plan) {
  uint64_t hash = 1469598103934665603U;  // FNV-1a
  std::string sums;
  for (const auto* by_rank : {&plan.buffer_bytes, &plan.tiles, &plan.sent_bytes}) {
    for (int64_t value : *by_rank) {
      hash = (hash ^ static_cast<uint64_t>(value)) * 1099511628211U;
    }
    absl::StrAppendFormat(&sums, " %d %d",
                          std::accumulate(by_rank->begin(), by_rank->end(), int64_t{0}),
                          *std::max_element(by_rank->begin(), by_rank->end()));
  }
  return absl::StrFormat("%s %s %d %d %d%s %016x %.17g %.17g %.17g %.17g",
                         ScheduleKindName(plan.recipe.schedule), LayoutName(plan.recipe.layout),
                         plan.shards.world_size, plan.step_count, plan.exchanged_bytes, sums, hash,
                         plan.predicted_compute_seconds, plan.predicted_step_seconds,
                         plan.busiest_rank_seconds, plan.flops);
}

std::vector<std::string> FiguresOfRequest(int number) {
  const DrawnRequest request = DrawRequest(number);
  std::vector<std::string> figures;
  for (const PlanChoice* choice : {&request.forced, &request.free}) {
    const absl::StatusOr<Plan> plan =
        PlanRequest(request.spec, request.direction, *choice, request.inputs);
    figures.push_back(plan.ok() ? FiguresOf(*plan) : "error");
  }
  return figures;
}

}  // namespace ringattn
