#include "common/schedule/head_groups.h"

#include <algorithm>
#include <cassert>
#include <utility>
#include <vector>

#include "common/schedule/bundle.h"
#include "common/schedule/head_views.h"
#include "common/schedule/program_builder.h"
#include "common/schedule/shard_buffers.h"

namespace ringattn {
namespace {

// Slots of the bundles of a group's K/V and gradients, one set for even and one for odd groups: the
// own shard, then others' rows one after another by source. The gradient bundle also has a slot for
// others' contributions to the own shard, one after another by sender.
constexpr int kOwn = 0;
constexpr int kGroupGathered = 2;
constexpr int kGroupLanding = 4;
// Slots of the bundle of tensors without heads.
constexpr int kGroupHome = 0;
constexpr int kGatheredIds = 1;

class HeadGroups {
 public:
  HeadGroups(const GatherRoute& route, int64_t heads_per_step, ShardBuffers& shard,
             ProgramBuilder& builder)
      : route_(route),
        heads_(heads_per_step),
        groups_(builder.spec().shape.num_kv_heads / heads_per_step),
        shard_(shard),
        builder_(builder),
        views_(builder),
        kv_(KvBundle(builder.spec(), {"own0", "own1", "gathered0", "gathered1"})),
        gradients_(KvGradientBundle(builder.spec(),
                                    {"own0", "own1", "gathered0", "gathered1", "landing"})),
        ids_{{"home", "gathered"}, {}} {
    for (Bundle* bundle : {&kv_, &gradients_}) {
      for (BundleTensor& tensor : bundle->tensors) {
        if (tensor.id == TensorId::kKvSegmentIds) continue;
        tensor.row_bytes = tensor.row_bytes / builder.spec().shape.num_kv_heads * heads_;
      }
    }
    if (shard.kv_segment_ids == kNoBuffer) return;
    kv_.tensors.pop_back();
    const TensorId id = TensorId::kKvSegmentIds;
    ids_.tensors.push_back(
        {id, LayoutOf(builder.spec(), id).inner_bytes, {shard.kv_segment_ids, kNoBuffer}});
  }

  // Each adds a pass, starting at step `first`, and returns the number of its steps.
  int64_t Forward(int64_t first) {
    if (!ids_.tensors.empty()) {
      UseIfGathered(first);
      ForEachSeen([&](int rank, int source, const RowRange& rows, int64_t before, int64_t) {
        builder_.Move(first, ids_, source, {kGroupHome, 0, {0, route_.kv_rows[source]}}, rank,
                      {kGatheredIds, before, rows}, rows);
      });
    }
    for (int64_t group = 0; group < groups_; ++group) {
      Gather(first, group);
      if (AnyRows(route_.q_rows)) builder_.Use(first + group + 2);
      if (builder_.q_rows() > 0) ForwardOf(first + group + 2, group);
    }
    PackAll(first);
    return groups_ + 2;
  }

  void Backward(int64_t first, bool has_ids) {
    UseBackwardSteps(first);
    StartBackward(first, shard_, builder_);
    if (!ids_.tensors.empty() && !has_ids) {
      UseIfGathered(first);
      ForEachSeen([&](int rank, int source, const RowRange& rows, int64_t before, int64_t) {
        builder_.Move(first, ids_, source, {kGroupHome, 0, {0, route_.kv_rows[source]}}, rank,
                      {kGatheredIds, before, rows}, rows);
      });
    }
    for (int64_t group = 0; group < groups_; ++group) {
      Gather(first, group);
      BackwardOf(first + group + 2, group);
      Return(first + group + 3, group);
    }
    PackAll(first);
    AddUpSinkGradients(first + 1, route_.q_rows, shard_, builder_);
    FinishBackward(LastStep(first), shard_, builder_);
  }

 private:
  int64_t LastStep(int64_t first) const { return first + groups_ + 2; }
  int64_t batch() const { return builder_.spec().shape.batch; }
  static bool AnyRows(const std::vector<int64_t>& rows) {
    return std::any_of(rows.begin(), rows.end(), [](int64_t n) { return n > 0; });
  }
  static int Slot(int first, int64_t group) { return first + static_cast<int>(group % 2); }
  BlockLocation Own(int source, int64_t group) const {
    return {Slot(kOwn, group), 0, {0, route_.kv_rows[source]}};
  }

  // The forms of this rank's shards.
  HeadForm RowsForm(TensorId id, int64_t rows, int64_t element_bytes) const {
    const AttentionShape& shape = builder_.spec().shape;
    const TensorInfo& info = InfoOf(id);
    const bool of_keys = info.heads == HeadsOf::kKeyValue;
    const int64_t dim = info.dim == DimOf::kValue ? shape.head_dim_v : shape.head_dim;
    return {batch() * rows, of_keys ? shape.num_kv_heads : shape.num_heads, dim * element_bytes};
  }
  HeadForm RowsForm(TensorId id, int64_t rows) const {
    return RowsForm(id, rows, ElementBytes(DTypeOf(builder_.spec(), id)));
  }
  HeadForm StatisticsForm() const {
    return {batch(), builder_.spec().shape.num_heads, builder_.q_rows() * 4, /*anywhere=*/true};
  }

  int64_t query_heads() const { return heads_ * builder_.spec().shape.group_size(); }
  int64_t FirstQueryHead(int64_t group) const { return group * query_heads(); }
  ByteRange ReadRows(int64_t step, int64_t group, BufferId buffer, TensorId id) {
    return views_.Read(step, buffer, RowsForm(id, builder_.q_rows()), FirstQueryHead(group),
                       query_heads());
  }
  ByteRange ReadStatistics(int64_t step, int64_t group, BufferId buffer) {
    return views_.Read(step, buffer, StatisticsForm(), FirstQueryHead(group), query_heads());
  }

  // A bias or a mask, which all heads may share.
  struct PairsOfGroup {
    bool per_head = false;
    HeadForm form;
  };
  PairsOfGroup PairsOf(TensorId id) const {
    const AttentionSpec& spec = builder_.spec();
    const bool is_mask = id == TensorId::kMask;
    const bool per_head = is_mask ? spec.options.mask->per_head : spec.options.bias->per_head;
    const bool per_batch = is_mask ? spec.options.mask->per_batch : spec.options.bias->per_batch;
    return {per_head,
            {per_batch ? batch() : 1, spec.shape.num_heads,
             SaturatingProduct({builder_.q_rows(), LayoutOf(spec, id).inner_bytes}),
             /*anywhere=*/true}};
  }

  void AddTerms(int64_t step, int64_t group, QOperand& operand) {
    for (TensorId id : TermOptions()) {
      const BufferId buffer = builder_.InputOf(id);
      if (buffer == kNoBuffer) continue;
      ByteRange range = builder_.Whole(buffer);
      if (InfoOf(id).form == TensorForm::kPairs) {
        const PairsOfGroup pairs = PairsOf(id);
        if (pairs.per_head) {
          range = views_.Read(step, buffer, pairs.form, FirstQueryHead(group), query_heads());
        }
      }
      operand.options.push_back({id, range});
    }
  }

  HeadRange HeadsOfGroup(int64_t group) const {
    return {group * heads_, heads_, builder_.spec().shape.num_kv_heads};
  }

  // Sends the group's K/V to the ranks that see them.
  void Gather(int64_t first, int64_t group) {
    UseIfGathered(first + group + 1);
    ForEachSeen([&](int rank, int source, const RowRange& rows, int64_t before, int64_t) {
      builder_.Move(first + group + 1, kv_, source, Own(source, group), rank,
                    {Slot(kGroupGathered, group), before, rows}, rows);
    });
  }

  // Packs each group's own K/V in the step before they travel, after that step's call, which may
  // still read the slot.
  void PackAll(int64_t first) {
    for (int64_t group = 0; group < groups_; ++group) {
      if (AnyRows(route_.kv_rows)) builder_.Use(first + group);
      if (builder_.kv_rows() == 0) continue;
      for (BundleTensor& tensor : kv_.tensors) {
        const BufferId home = tensor.id == TensorId::kK ? shard_.k : shard_.v;
        const ByteRange packed = builder_.Range(kv_, tensor.id, Own(builder_.rank(), group));
        builder_.AddCall(first + group,
                         CopyOfHeads(RowsForm(tensor.id, builder_.kv_rows()), group * heads_,
                                     heads_, builder_.Whole(home), packed, true));
      }
    }
  }

  void ForwardOf(int64_t step, int64_t group) {
    ComputeCall call;
    call.initial = call.final = true;
    call.heads = HeadsOfGroup(group);
    call.q = AllQueries(builder_);
    call.q.q = ReadRows(step, group, shard_.q, TensorId::kQ);
    call.q.out = views_.Write(shard_.out, RowsForm(TensorId::kOut, builder_.q_rows()),
                              FirstQueryHead(group), query_heads());
    call.q.lse = views_.Write(shard_.lse, StatisticsForm(), FirstQueryHead(group), query_heads());
    AddTerms(step, group, call.q);
    const BufferId sinks = builder_.InputOf(TensorId::kSinks);
    if (sinks != kNoBuffer) {
      call.q.options.push_back(
          {TensorId::kSinks, {sinks, FirstQueryHead(group) * 4, query_heads() * 4}});
    }
    AddOperands(group, /*gradients=*/false, call);
    builder_.AddCall(step, std::move(call));
    views_.WriteBack(step);
  }

  void BackwardOf(int64_t step, int64_t group) {
    if (builder_.kv_rows() > 0) {
      builder_.AddZeroRows(step, gradients_, Own(builder_.rank(), group), {0, builder_.kv_rows()});
    }
    if (builder_.q_rows() == 0) return;
    ComputeCall call;
    call.op = ComputeCall::Op::kBackward;
    call.heads = HeadsOfGroup(group);
    AddOperands(group, /*gradients=*/true, call);
    if (call.kv.empty()) return;
    for (const KvOperand& keys : call.kv) {
      if (keys.source_rank == builder_.rank()) continue;
      builder_.AddZero(step, keys.dk);
      builder_.AddZero(step, keys.dv);
    }
    call.q = AllQueries(builder_);
    call.q.q = ReadRows(step, group, shard_.q, TensorId::kQ);
    call.q.dout = ReadRows(step, group, shard_.dout, TensorId::kDout);
    call.q.lse = ReadStatistics(step, group, shard_.lse);
    call.q.delta = ReadStatistics(step, group, shard_.delta);
    call.q.dq_acc = views_.Write(shard_.dq_acc, RowsForm(TensorId::kDq, builder_.q_rows(), 4),
                                 FirstQueryHead(group), query_heads());
    AddTerms(step, group, call.q);
    builder_.AddZero(step, call.q.dq_acc);
    if (shard_.dbias == kNoBuffer) {
      builder_.AddCall(step, std::move(call));
    } else {
      AddBothGradients(step, group, std::move(call));
    }
    views_.WriteBack(step);
  }

  // Adds the two calls one after the other; some devices compute both at once.
  void AddBothGradients(int64_t step, int64_t group, ComputeCall backward) {
    const PairsOfGroup pairs = PairsOf(TensorId::kDbias);
    assert(pairs.per_head);
    ComputeCall call = backward;
    call.op = ComputeCall::Op::kBiasGradient;
    call.q.dq_acc = kNone;
    for (KvOperand& keys : call.kv) keys.dk = keys.dv = kNone;
    call.target = views_.Write(shard_.dbias, pairs.form, FirstQueryHead(group), query_heads());
    builder_.AddZero(step, call.target);
    builder_.AddCall(step, std::move(backward));
    builder_.AddCall(step, std::move(call));
  }

  // Sends gradients of others' rows to their owners, who add them in rank order.
  void Return(int64_t step, int64_t group) {
    if (AnyRows(route_.kv_rows)) builder_.Use(step);
    UseIfGathered(step);
    ForEachSeen([&](int rank, int source, const RowRange& rows, int64_t before, int64_t landing) {
      const BlockLocation landed{kGroupLanding, landing, rows};
      builder_.Move(step, gradients_, rank, {Slot(kGroupGathered, group), before, rows}, source,
                    landed, rows);
      if (source == builder_.rank()) {
        builder_.AddRowsLate(step, gradients_, landed, Own(source, group), rows);
      }
    });
    if (builder_.kv_rows() == 0) return;
    for (const auto& [id, buffer] :
         {std::pair{TensorId::kDk, shard_.dk_acc}, std::pair{TensorId::kDv, shard_.dv_acc}}) {
      const ByteRange own = builder_.Range(gradients_, id, Own(builder_.rank(), group));
      builder_.AddLateCall(step, CopyOfHeads(RowsForm(id, builder_.kv_rows(), 4), group * heads_,
                                             heads_, builder_.Whole(buffer), own, false));
    }
  }

  // Records that some rank has a transfer in the step, if ranks see others' rows.
  void UseIfGathered(int64_t step) {
    if (!route_.gathered.empty()) builder_.Use(step);
  }

  // Visits the ranges of rows that this rank receives or sends (all_gather.h).
  template <typename Do>
  void ForEachSeen(const Do& action) const {
    ForEachGathered(route_, builder_.rank(), action);
  }

  void AddOperands(int64_t group, bool gradients, ComputeCall& call) {
    const auto add = [&](int source, const RowRange& rows, const BlockLocation& place,
                         const BlockLocation& ids) {
      const WorkCount work = route_.pieces.Work(builder_.rank(), source, rows);
      if (work.pairs == 0 && source == builder_.rank()) return;
      KvOperand keys{source, rows.begin, rows.end, builder_.Range(kv_, TensorId::kK, place),
                     builder_.Range(kv_, TensorId::kV, place)};
      if (!ids_.tensors.empty()) {
        keys.segment_ids = builder_.Range(ids_, TensorId::kKvSegmentIds, ids);
      }
      if (gradients) {
        keys.dk = builder_.Range(gradients_, TensorId::kDk, place);
        keys.dv = builder_.Range(gradients_, TensorId::kDv, place);
      }
      AddOperand(call, keys, work);
    };
    int64_t gathered = 0;
    for (int source = 0; source < static_cast<int>(route_.seen.size()); ++source) {
      if (source == builder_.rank()) {
        const RowRange all{0, builder_.kv_rows()};
        if (!all.empty()) add(source, all, Own(source, group), {kGroupHome, 0, all});
        continue;
      }
      for (const RowRange& rows : route_.seen[builder_.rank()][source]) {
        add(source, rows, {Slot(kGroupGathered, group), gathered, rows},
            {kGatheredIds, gathered, rows});
        gathered += rows.size();
      }
    }
  }

  void UseBackwardSteps(int64_t first) {
    if (AnyRows(route_.q_rows) || AnyRows(route_.kv_rows)) builder_.Use(first);
    if (builder_.spec().options.sinks) builder_.Use(first);  // rank 0 has dsinks
    for (int64_t group = 0; group < groups_; ++group) {
      if (AnyRows(route_.kv_rows)) builder_.Use(first + group + 2);
    }
    const bool converts = builder_.spec().result_dtype() != DType::kFloat32;
    if (converts && (AnyRows(route_.q_rows) || AnyRows(route_.kv_rows))) {
      builder_.Use(LastStep(first));
    }
  }

  const GatherRoute& route_;
  const int64_t heads_;  // kv heads of a group
  const int64_t groups_;
  ShardBuffers& shard_;
  ProgramBuilder& builder_;
  HeadViews views_;
  Bundle kv_;
  Bundle gradients_;
  Bundle ids_;
};

}  // namespace

Program MakeHeadGroupsProgram(const ScheduleContext& context, const GatherRoute& route, int rank) {
  const ProgramRecipe& recipe = context.recipe;
  const bool backward = recipe.direction == Direction::kBackward;
  ProgramBuilder builder(context.spec, context.plan, rank);
  ShardBuffers shard = AddShardBuffers(recipe.direction, recipe.recompute_forward, builder);
  HeadGroups groups(route, recipe.heads_per_step, shard, builder);
  int64_t steps = 0;
  if (!backward || recipe.recompute_forward) steps = groups.Forward(0);
  if (backward) groups.Backward(steps, /*has_ids=*/recipe.recompute_forward);
  return builder.Finish();
}

}  // namespace ringattn
