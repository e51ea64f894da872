#include "common/schedule/schedule.h"

#include <cassert>
#include <utility>

#include "common/schedule/all_gather.h"
#include "common/schedule/cancel_latch.h"
#include "common/schedule/dilated.h"
#include "common/schedule/head_groups.h"
#include "common/schedule/kv_route.h"
#include "common/schedule/program_builder.h"
#include "common/schedule/q_route.h"
#include "common/schedule/resident_keys.h"
#include "common/schedule/ring_backward.h"
#include "common/schedule/ring_forward.h"
#include "common/schedule/ring_rank.h"
#include "common/schedule/shard_buffers.h"
#include "common/schedule/single.h"

namespace ringattn {

struct ScheduleBuilder::Shared {
  explicit Shared(Cancelled cancelled) : latch(std::move(cancelled)) {}

  CancelLatch latch;
  // What the ranks have in common, of all but kSingle.
  std::unique_ptr<const RingSpans> pieces;
  KvRoute route;       // kRing
  GatherRoute gather;  // kAllGather
  QRoute queries;      // KeepsKeysInPlace
  // Of a dilated problem, instead of them all.
  std::unique_ptr<const DilatedRoute> dilated;
};

bool CutsPairsByKeys(ScheduleKind kind, const AttentionOptions& options) {
  return KeepsKeysInPlace(kind) && (options.bias.has_value() || options.mask.has_value());
}

const char* NotCutByKeys(const AttentionSpec& spec) {
  const bool has_bias = spec.options.bias.has_value();
  if (spec.shape.packed) return has_bias ? "bias of packed documents" : "mask of packed documents";
  if (!spec.options.dilation_levels.empty()) {
    return has_bias ? "bias of dilated levels" : "mask of dilated levels";
  }
  const bool has_bits = spec.options.mask.has_value() && spec.options.mask->bits;
  return has_bits ? "mask of bits" : nullptr;
}

ScheduleBuilder::ScheduleBuilder(const AttentionSpec& spec, const ShardPlan& plan,
                                 ScheduleKind kind, Direction direction, bool recompute_forward,
                                 Cancelled cancelled, bool keeps_inputs, int64_t heads_per_step)
    : spec_(spec),
      plan_(plan),
      kind_(kind),
      direction_(direction),
      recompute_forward_(recompute_forward),
      keeps_inputs_(keeps_inputs),
      heads_per_step_(heads_per_step == spec.shape.num_kv_heads ? 0 : heads_per_step),
      shared_(std::make_unique<Shared>(std::move(cancelled))) {
  assert(plan.world_size >= 1);
  assert(kind != ScheduleKind::kSingle || plan.world_size == 1);
  assert(direction == Direction::kBackward || !recompute_forward);
  assert(spec.pairs_by_keys == CutsPairsByKeys(kind, spec.options) || plan.world_size == 1);
  assert(heads_per_step == 0 ||
         (kind == ScheduleKind::kAllGather && spec.shape.num_kv_heads % heads_per_step == 0));
  if (!spec.options.dilation_levels.empty()) {
    assert(heads_per_step_ == 0);
    shared_->dilated = std::make_unique<DilatedRoute>(
        MakeDilatedRoute(spec, plan, kind, direction, recompute_forward, &shared_->latch));
    return;
  }
  if (kind == ScheduleKind::kSingle) return;
  shared_->pieces = std::make_unique<RingSpans>(spec, plan, &shared_->latch);
  if (kind == ScheduleKind::kAllGather) {
    shared_->gather = MakeGatherRoute(plan, *shared_->pieces);
    return;
  }
  if (KeepsKeysInPlace(kind)) {
    shared_->queries =
        MakeQRoute(plan, *shared_->pieces, /*gathered=*/kind == ScheduleKind::kReplicatedQ);
    return;
  }
  shared_->route =
      MakeKvRoute(plan, *shared_->pieces,
                  direction == Direction::kForward ? PartRule::kSlices : PartRule::kPipeline);
}

ScheduleBuilder::~ScheduleBuilder() = default;

bool ScheduleBuilder::direct() const {
  if (shared_->dilated != nullptr) return shared_->dilated->direct();
  return KeepsKeysInPlace(kind_) ? shared_->queries.direct : shared_->route.direct;
}
bool ScheduleBuilder::cancelled() const { return shared_->latch.cancelled(); }

Program ScheduleBuilder::MakeProgram(int rank) {
  if (shared_->dilated != nullptr) {
    return MakeDilatedProgram(spec_, plan_, direction_, recompute_forward_, *shared_->dilated,
                              rank);
  }
  if (kind_ == ScheduleKind::kSingle) {
    return MakeSingleProgram(spec_, plan_, direction_, recompute_forward_, shared_->latch);
  }
  if (KeepsKeysInPlace(kind_)) {
    return MakeResidentKeysProgram(spec_, plan_, direction_, recompute_forward_, shared_->queries,
                                   rank);
  }
  if (heads_per_step_ != 0) {
    return MakeHeadGroupsProgram(spec_, plan_, direction_, recompute_forward_, shared_->gather,
                                 *shared_->pieces, heads_per_step_, rank);
  }
  if (kind_ == ScheduleKind::kAllGather) {
    return MakeAllGatherProgram(spec_, plan_, direction_, recompute_forward_, shared_->gather,
                                *shared_->pieces, rank);
  }
  ProgramBuilder builder(spec_, plan_, rank);
  const ShardBuffers shard = AddShardBuffers(direction_, recompute_forward_, builder);
  // The own block is needed twice for direct exchange, and backward, where it comes last.
  const bool keeps_home = keeps_inputs_ || direct() || direction_ == Direction::kBackward;
  RingRank ring(shared_->route, *shared_->pieces, keeps_home, shard, builder);
  int64_t steps = 0;
  if (direction_ == Direction::kForward || recompute_forward_) steps = AddRingForward(ring, 0);
  if (direction_ == Direction::kBackward) AddRingBackward(ring, steps);
  return builder.Finish();
}

Program MakeProgram(const AttentionSpec& spec, const ShardPlan& plan, ScheduleKind kind,
                    Direction direction, bool recompute_forward, int rank, bool keeps_inputs,
                    int64_t heads_per_step) {
  return ScheduleBuilder(spec, plan, kind, direction, recompute_forward, {}, keeps_inputs,
                         heads_per_step)
      .MakeProgram(rank);
}

Schedule MakeSchedule(const AttentionSpec& spec, const ShardPlan& plan, ScheduleKind kind,
                      Direction direction, bool recompute_forward, int64_t heads_per_step) {
  ScheduleBuilder builder(spec, plan, kind, direction, recompute_forward, {}, false,
                          heads_per_step);
  Schedule schedule{kind, direction, recompute_forward, builder.direct(), {}};
  for (int rank = 0; rank < plan.world_size; ++rank) {
    schedule.programs.push_back(builder.MakeProgram(rank));
  }
  return schedule;
}

}  // namespace ringattn
