#include "common/schedule/all_gather.h"

#include <algorithm>
#include <utility>

#include "common/schedule/bundle.h"
#include "common/schedule/head_groups.h"
#include "common/schedule/program_builder.h"
#include "common/schedule/shard_buffers.h"

namespace ringattn {
namespace {

// Slots of both bundles: the rank's own shard, then others' rows one after another by source. The
// gradient bundle also has a slot for others' contributions to the own shard, one after another by
// sender.
constexpr int kHome = 0;
constexpr int kGathered = 1;
constexpr int kLanding = 2;

class AllGather {
 public:
  AllGather(const GatherRoute& route, ShardBuffers& shard, ProgramBuilder& builder)
      : route_(route),
        shard_(shard),
        builder_(builder),
        world_size_(static_cast<int>(route.seen.size())),
        kv_(KvBundle(builder.spec(), {"home", "gathered"})),
        gradients_(KvGradientBundle(builder.spec(), {"home", "gathered", "landing"})) {
    kv_.Of(TensorId::kK).slots[kHome] = shard.k;
    kv_.Of(TensorId::kV).slots[kHome] = shard.v;
    if (shard.kv_segment_ids != kNoBuffer) {
      kv_.Of(TensorId::kKvSegmentIds).slots[kHome] = shard.kv_segment_ids;
    }
    gradients_.Of(TensorId::kDk).slots[kHome] = shard.dk_acc;
    gradients_.Of(TensorId::kDv).slots[kHome] = shard.dv_acc;
  }

  void Gather(int64_t step) {
    if (!route_.gathered.empty()) builder_.Use(step);
    ForEachSeen([&](int rank, int source, const RowRange& rows, int64_t before, int64_t) {
      builder_.Move(step, kv_, source, Home(source), rank, {kGathered, before, rows}, rows);
    });
  }

  void Forward(int64_t step) {
    if (std::any_of(route_.q_rows.begin(), route_.q_rows.end(), [](int64_t n) { return n > 0; })) {
      builder_.Use(step);  // a rank that sees no key still has a call
    }
    CallsAt calls;
    ComputeCall call;
    for (const auto& [keys, work] : Operands(/*gradients=*/false)) AddOperand(call, keys, work);
    if (!call.kv.empty()) calls.emplace_back(step, std::move(call));
    AddForwardCalls(std::move(calls), step, shard_, builder_);
  }

  // Computes in `step`. Gradients go to their owners in the following step.
  void Backward(int64_t step) {
    UseBackwardSteps(step);
    StartBackward(step, shard_, builder_);
    builder_.AddZeroRows(step, gradients_, Home(builder_.rank()), {0, builder_.kv_rows()});
    ComputeCall call = BackwardCallOf(shard_, builder_);
    for (const auto& [keys, work] : Operands(/*gradients=*/true)) {
      if (keys.source_rank != builder_.rank()) {
        builder_.AddZero(step, keys.dk);
        builder_.AddZero(step, keys.dv);
      }
      AddOperand(call, keys, work);
    }
    if (!call.kv.empty()) AddBackwardCall(step, std::move(call), shard_, builder_);
    if (!route_.gathered.empty()) builder_.Use(step + 1);
    // By contributing rank: the order in which the owner adds.
    ForEachSeen([&](int rank, int source, const RowRange& rows, int64_t before, int64_t landing) {
      const BlockLocation landed{kLanding, landing, rows};
      builder_.Move(step + 1, gradients_, rank, {kGathered, before, rows}, source, landed, rows);
      if (source == builder_.rank()) {
        builder_.AddRowsLate(step + 1, gradients_, landed, Home(source), rows);
      }
    });
    AddUpSinkGradients(step + 1, route_.q_rows, shard_, builder_);
    FinishBackward(step + 1, shard_, builder_);
  }

 private:
  BlockLocation Home(int source) const { return {kHome, 0, {0, route_.kv_rows[source]}}; }

  template <typename Do>
  void ForEachSeen(const Do& action) const {
    ForEachGathered(route_, builder_.rank(), action);
  }

  // Returns the keys that this rank's queries see, by source.
  std::vector<std::pair<KvOperand, WorkCount>> Operands(bool gradients) {
    std::vector<std::pair<KvOperand, WorkCount>> operands;
    const auto add = [&](int source, const RowRange& rows, const BlockLocation& place) {
      const WorkCount work = route_.pieces.Work(builder_.rank(), source, rows);
      if (work.pairs == 0 && source == builder_.rank()) return;
      KvOperand keys{source, rows.begin, rows.end, builder_.Range(kv_, TensorId::kK, place),
                     builder_.Range(kv_, TensorId::kV, place)};
      if (builder_.spec().options.segment_ids) {
        keys.segment_ids = builder_.Range(kv_, TensorId::kKvSegmentIds, place);
      }
      if (gradients) {
        keys.dk = builder_.Range(gradients_, TensorId::kDk, place);
        keys.dv = builder_.Range(gradients_, TensorId::kDv, place);
      }
      operands.emplace_back(std::move(keys), work);
    };
    int64_t gathered = 0;
    for (int source = 0; source < world_size_; ++source) {
      if (source == builder_.rank()) {
        const RowRange all{0, builder_.kv_rows()};
        add(source, all, {kHome, 0, all});
        continue;
      }
      for (const RowRange& rows : route_.seen[builder_.rank()][source]) {
        add(source, rows, {kGathered, gathered, rows});
        gathered += rows.size();
      }
    }
    return operands;
  }

  void UseBackwardSteps(int64_t step) {
    for (int rank = 0; rank < world_size_; ++rank) {
      if (route_.q_rows[rank] == 0 && route_.kv_rows[rank] == 0) continue;
      builder_.Use(step);
      // kConvert calls
      if (builder_.spec().result_dtype() != DType::kFloat32) builder_.Use(step + 1);
    }
    if (builder_.spec().options.sinks) builder_.Use(step);  // rank 0 has dsinks
  }

  const GatherRoute& route_;
  ShardBuffers& shard_;
  ProgramBuilder& builder_;
  const int world_size_;
  Bundle kv_;
  Bundle gradients_;
};

// Sets the route's `gathered` and `of_rank`.
void AddGatheredRows(GatherRoute& route) {
  const int world_size = static_cast<int>(route.seen.size());
  std::vector<int64_t> landing(world_size, 0);
  route.of_rank.resize(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    int64_t gathered = 0;
    for (int source = 0; source < world_size; ++source) {
      if (source == rank) continue;
      for (const RowRange& rows : route.seen[rank][source]) {
        const auto index = static_cast<int32_t>(route.gathered.size());
        route.gathered.push_back({rank, source, rows, gathered, landing[source]});
        for (int own_rank : {rank, source}) route.of_rank[own_rank].push_back(index);
        gathered += rows.size();
        landing[source] += rows.size();
      }
    }
  }
}

}  // namespace

GatherRoute MakeGatherRoute(const ScheduleContext& context) {
  const ShardPlan& plan = context.plan;
  GatherRoute route{RingSpans(context.spec, plan, context.latch), {}, {}, {}, {}, {}};
  route.seen = SeenRows(plan, route.pieces);
  for (int rank = 0; rank < plan.world_size; ++rank) {
    route.q_rows.push_back(RowsIn(plan.q[rank]));
    route.kv_rows.push_back(RowsIn(plan.kv[rank]));
  }
  AddGatheredRows(route);
  return route;
}

Program MakeAllGatherProgram(const ScheduleContext& context, const GatherRoute& route, int rank) {
  const ProgramRecipe& recipe = context.recipe;
  if (recipe.heads_per_step != 0 && recipe.heads_per_step < context.spec.shape.num_kv_heads) {
    return MakeHeadGroupsProgram(context, route, rank);
  }
  const bool backward = recipe.direction == Direction::kBackward;
  ProgramBuilder builder(context.spec, context.plan, rank);
  ShardBuffers shard = AddShardBuffers(recipe.direction, recipe.recompute_forward, builder);
  AllGather gather(route, shard, builder);
  int64_t step = 0;
  gather.Gather(step++);
  if (!backward || recipe.recompute_forward) gather.Forward(step++);
  if (backward) gather.Backward(step);
  return builder.Finish();
}

}  // namespace ringattn
