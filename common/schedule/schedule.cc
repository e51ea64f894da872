#include "common/schedule/schedule.h"

#include <cassert>
#include <utility>

#include "common/schedule/route/cancel_latch.h"
#include "common/schedule/schedule_table.h"

namespace ringattn {

Axis PairAxisOf(ScheduleKind kind, const AttentionOptions& options) {
  const bool has_pairs = options.bias.has_value() || options.mask.has_value();
  return KeepsKeysInPlace(kind) && has_pairs ? Axis::kKv : Axis::kQ;
}

const char* UnshardableByKeys(const AttentionSpec& spec) {
  const bool has_bias = spec.options.bias.has_value();
  if (!has_bias && !spec.options.mask.has_value()) return nullptr;
  if (spec.shape.packed) return has_bias ? "bias of packed documents" : "mask of packed documents";
  if (!spec.options.dilation_levels.empty()) {
    return has_bias ? "bias of dilated levels" : "mask of dilated levels";
  }
  const bool has_bits = spec.options.mask.has_value() && spec.options.mask->bits;
  return has_bits ? "mask of bits" : nullptr;
}

ShardPlan MakeShardPlan(const AttentionSpec& spec, const ProgramRecipe& recipe, int world_size) {
  ShardPlan plan = MakeShardPlan(spec, recipe.layout, world_size, recipe.stripe);
  plan.pair_axis = PairAxisOf(recipe.schedule, spec.options);
  return plan;
}

struct ScheduleBuilder::Shared {
  Shared(Cancelled cancelled, const ScheduleEntry& schedule)
      : latch(std::move(cancelled)), entry(schedule) {}

  CancelLatch latch;
  const ScheduleEntry& entry;
  std::unique_ptr<const ScheduleRoute> route;
};

namespace {

// Returns the table's row for the spec and the kind.
const ScheduleEntry& EntryFor(const AttentionSpec& spec, ScheduleKind kind) {
  if (!spec.options.dilation_levels.empty()) return DilatedSchedule();
  const ScheduleEntry* entry = FindSchedule(kind);
  assert(entry != nullptr);
  return *entry;
}

}  // namespace

ScheduleBuilder::ScheduleBuilder(const AttentionSpec& spec, const ShardPlan& plan,
                                 const ProgramRecipe& recipe, Cancelled cancelled)
    : spec_(spec),
      plan_(plan),
      recipe_(recipe),
      shared_(std::make_unique<Shared>(std::move(cancelled), EntryFor(spec, recipe.schedule))) {
  assert(plan.world_size >= 1);
  assert(plan.layout == recipe.layout && plan.stripe == recipe.stripe);
  assert(recipe.schedule != ScheduleKind::kSingle || plan.world_size == 1);
  assert(recipe.direction == Direction::kBackward || !recipe.recompute_forward);
  assert(plan.pair_axis == PairAxisOf(recipe.schedule, spec.options) || plan.world_size == 1);
  assert(recipe.heads_per_step == 0 || (recipe.schedule == ScheduleKind::kAllGather &&
                                        spec.shape.num_kv_heads % recipe.heads_per_step == 0));
  assert(recipe.schedule == ScheduleKind::kDoubleRing
             ? recipe.group_size >= 1 && plan.world_size % recipe.group_size == 0
             : recipe.group_size == 0);
  shared_->route = shared_->entry.make_route({spec_, plan_, recipe_, &shared_->latch});
}

ScheduleBuilder::~ScheduleBuilder() = default;

std::vector<int> ScheduleBuilder::GroupOfEachRank() const {
  std::vector<int> groups;
  for (int rank = 0; rank < plan_.world_size; ++rank) {
    groups.push_back(rank / static_cast<int>(recipe_.group_size));
  }
  return groups;
}

bool ScheduleBuilder::direct() const { return shared_->route->direct(); }
bool ScheduleBuilder::cancelled() const { return shared_->latch.cancelled(); }

Program ScheduleBuilder::MakeProgram(int rank) {
  Program program =
      shared_->entry.make_program({spec_, plan_, recipe_, &shared_->latch}, *shared_->route, rank);
  program.tuning = recipe_.tuning;
  if (recipe_.schedule == ScheduleKind::kDoubleRing) AssignLanes(GroupOfEachRank(), program);
  return program;
}

std::unique_ptr<const ClassedPrograms> ScheduleBuilder::FindStepClasses(
    const std::vector<int>& host_of_rank) {
  if (shared_->entry.find_classes == nullptr) return nullptr;
  return shared_->entry.find_classes({spec_, plan_, recipe_, &shared_->latch}, *shared_->route,
                                     host_of_rank);
}

Program MakeProgram(const AttentionSpec& spec, const ShardPlan& plan, const ProgramRecipe& recipe,
                    int rank) {
  return ScheduleBuilder(spec, plan, recipe).MakeProgram(rank);
}

Schedule MakeSchedule(const AttentionSpec& spec, const ShardPlan& plan,
                      const ProgramRecipe& recipe) {
  ScheduleBuilder builder(spec, plan, recipe);
  Schedule schedule{recipe, builder.direct(), {}};
  for (int rank = 0; rank < plan.world_size; ++rank) {
    schedule.programs.push_back(builder.MakeProgram(rank));
  }
  return schedule;
}

}  // namespace ringattn
