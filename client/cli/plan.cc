#include <algorithm>
#include <cstdio>
#include <memory>

#include "absl/strings/str_format.h"
#include "client/cli/command.h"
#include "client/cli/flags.h"
#include "client/cli/report.h"
#include "common/plan/planner.h"
#include "common/plan/schedule.h"

namespace ringattn::client::cli {
namespace {

struct Flags {
  ShapeFlags shape;
  OptionFlags options;
  bool backward = false;
  bool with_forward_result = false;
  int workers = 4;
  double device_flops_per_s = PlannerInputs().device_flops_per_s;
  double link_bytes_per_s = PlannerInputs().link_bytes_per_s;
  bool json = false;
};

struct Planned {
  AttentionSpec spec;
  Plan plan;
  Schedule schedule;
};

absl::StatusOr<Planned> MakePlan(const Flags& flags) {
  Problem problem;
  if (absl::Status status = flags.shape.Apply(&problem); !status.ok()) return status;
  if (absl::Status status = flags.options.Apply(&problem); !status.ok()) return status;
  const Direction direction = flags.backward ? Direction::kBackward : Direction::kForward;
  auto valid = ValidateLocally(problem, direction, flags.with_forward_result);
  if (!valid.ok()) return valid.status();
  const PlannerInputs inputs{
      // As many as asked for: there is no server that could have fewer.
      .ready_workers = std::max(flags.workers, valid->choice.world_size.value_or(0)),
      .device_flops_per_s = flags.device_flops_per_s,
      .link_bytes_per_s = flags.link_bytes_per_s};
  auto plan = PlanRequest(valid->spec, direction, valid->choice, inputs);
  if (!plan.ok()) return plan.status();
  Schedule schedule =
      MakeSchedule(valid->spec, plan->shards, plan->schedule, direction, valid->recompute_forward);
  return Planned{std::move(valid->spec), *std::move(plan), std::move(schedule)};
}

Json SpansJson(const Shard& shard) {
  Json spans = Json::array();
  for (const Span& span : shard) {
    spans.push_back({{"begin", span.begin}, {"length", span.length}, {"stride", span.stride}});
  }
  return spans;
}

Json StepJson(const Program& program, const Step& step) {
  Json transfers = Json::array();
  for (const Transfer& transfer : step.transfers) {
    transfers.push_back({{"kind", transfer.kind == Transfer::Kind::kSend ? "send" : "receive"},
                         {"peer", transfer.peer},
                         {"buffer", program.buffers[transfer.range.buffer].name},
                         {"bytes", transfer.range.bytes}});
  }
  int64_t tiles = 0;
  for (const ComputeCall& call : step.calls) tiles += call.tiles;
  return {{"transfers", transfers}, {"calls", step.calls.size()}, {"tiles", tiles}};
}

Json ToJson(const Flags& flags, const Planned& planned) {
  const Plan& plan = planned.plan;
  Json ranks = Json::array();
  for (const Program& program : planned.schedule.programs) {
    const int rank = program.rank;
    Json steps = Json::array();
    for (const Step& step : program.steps) steps.push_back(StepJson(program, step));
    ranks.push_back({{"rank", rank},
                     {"spans_q", SpansJson(plan.shards.q[rank])},
                     {"spans_kv", SpansJson(plan.shards.kv[rank])},
                     {"buffer_bytes", plan.buffer_bytes[rank]},
                     {"sent_bytes", plan.sent_bytes[rank]},
                     {"tiles", plan.tiles[rank]},
                     {"steps", steps}});
  }
  return {{"command", "plan"},
          {"direction", flags.backward ? "backward" : "forward"},
          {"plan",
           {{"schedule", ScheduleKindName(plan.schedule)},
            {"layout", LayoutName(plan.shards.layout)},
            {"world_size", plan.shards.world_size},
            {"stripe", plan.shards.stripe},
            {"reason", plan.reason},
            {"predicted_compute_seconds", plan.predicted_compute_seconds},
            {"exchanged_bytes", plan.exchanged_bytes},
            {"flops", plan.flops},
            {"ranks", ranks}}}};
}

int RunPlan(const Flags& flags) {
  const auto planned = MakePlan(flags);
  if (!planned.ok()) return Fail(planned.status(), flags.json);
  if (flags.json) {
    Print(ToJson(flags, *planned));
    return kSuccess;
  }
  const Plan& plan = planned->plan;
  std::printf("%s, %s: %s\n", ScheduleKindName(plan.schedule), LayoutName(plan.shards.layout),
              plan.reason.c_str());
  std::printf("%sFLOP, %s exchanged, predicted %.4g s\n\n", HumanRate(plan.flops).c_str(),
              HumanBytes(plan.exchanged_bytes).c_str(), plan.predicted_compute_seconds);
  std::printf("%s\n%s", ToString(plan.shards).c_str(),
              ToString(planned->schedule, planned->spec).c_str());
  return kSuccess;
}

}  // namespace

void AddPlan(CLI::App& app, Run& run) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand(
      "plan",
      "Shards and schedule of a request, computed here without a server: spans, transfers "
      "with their bytes, tiles per rank and step");
  flags->shape.AddTo(command);
  flags->options.AddTo(command);
  command->add_flag("--backward", flags->backward, "Plan the backward pass");
  command->add_flag("--with_forward_result", flags->with_forward_result,
                    "Backward: out and lse are sent, not computed again");
  command->add_option("--workers", flags->workers, "Workers that are ready")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->add_option("--device_flops_per_s", flags->device_flops_per_s, "For the prediction")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--link_bytes_per_s", flags->link_bytes_per_s, "For the prediction")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_flag("--json", flags->json, "Print one JSON object (docs/cli-json.md)");
  command->callback([flags, &run] { run = [flags] { return RunPlan(*flags); }; });
}

}  // namespace ringattn::client::cli
