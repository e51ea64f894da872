#include "common/schedule/resident_keys.h"

#include <algorithm>
#include <cassert>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/schedule/program_builder.h"
#include "common/schedule/shard_buffers.h"

namespace ringattn {
namespace {

// The queries of other ranks' shards, or a tensor that travels with them.
struct Travelling {
  const char* name;
  BufferId home = kNoBuffer;    // the rank's own
  int64_t row_bytes = 0;        // of one row, all batch rows together
  std::vector<BufferId> slots;  // others', by slot; kNoBuffer until used
};

class ResidentKeys {
 public:
  ResidentKeys(const QRoute& route, ShardBuffers& shard, ProgramBuilder& builder)
      : route_(route), shard_(shard), builder_(builder) {
    const AttentionSpec& spec = builder.spec();
    const int64_t batch = spec.shape.batch;
    const int64_t heads = spec.shape.num_heads;
    const int64_t out_bytes = batch * heads * spec.shape.head_dim_v * 4;
    const int64_t dq_bytes = batch * heads * spec.shape.head_dim * 4;
    const int64_t statistic_bytes = batch * heads * 4;
    const auto input_bytes = [&](TensorId id) { return batch * LayoutOf(spec, id).inner_bytes; };
    const auto make = [&](const char* name, BufferId home, int64_t row_bytes) {
      // The own shard is slot 0 of no tensor. Partials have one slot more than there are steps.
      return Travelling{name, home, row_bytes,
                        std::vector<BufferId>(std::max(route.steps(), 2) + 1, kNoBuffer)};
    };
    q_ = make("q", shard.q, input_bytes(TensorId::kQ));
    ids_ = make("q_segment_ids", builder.InputOf(TensorId::kQSegmentIds), batch * 4);
    dout_ = make("dout", shard.dout, input_bytes(TensorId::kDout));
    lse_ = make("lse", shard.lse, statistic_bytes);
    delta_ = make("delta", shard.delta, statistic_bytes);
    part_out_ = make("out", kNoBuffer, out_bytes);
    part_lse_ = make("lse", kNoBuffer, statistic_bytes);
    part_dq_ = make("dq", kNoBuffer, dq_bytes);
  }

  // Adds a pass, starting at step `first`. Returns the number of its steps.
  int64_t Forward(int64_t first) {
    std::vector<Travelling*> queries = {&q_};
    if (ids_.home != kNoBuffer) queries.push_back(&ids_);
    AddFetches(first, queries);
    OwnForward(first);
    for (int step = 1; step < route_.steps(); ++step) {
      const int source = route_.SourceOf(rank(), step);
      UseCompute(first, step);
      if (!route_.Works(step, source)) continue;
      ComputeCall call;
      call.q = OthersQueries(source, step);
      call.q.out_acc = Slot(part_out_, PartSlot(step), source);
      call.q.lse = Slot(part_lse_, PartSlot(step), source);
      call.initial = true;
      AddOperand(call, Keys(), route_.Work(rank(), source));
      builder_.AddCall(first + step, std::move(call));
    }
    AddReturns(first, {&part_out_, &part_lse_});
    AddMerges(first);
    return StepsOfPass();
  }

  //   has_queries  an earlier forward pass has left all queries in their slots
  void Backward(int64_t first, bool has_queries) {
    StartBackward(first, shard_, builder_);
    for (BufferId buffer : {shard_.dk_acc, shard_.dv_acc}) {
      builder_.AddZero(first, builder_.Whole(buffer));
    }
    UseBackwardSteps(first);
    // Deltas must be computed before they are sent.
    const int64_t base = first + (route_.steps() > 1 ? 1 : 0);
    std::vector<Travelling*> fetched = {&dout_, &lse_, &delta_};
    if (!has_queries) {
      fetched.insert(fetched.begin(), &q_);
      if (ids_.home != kNoBuffer) fetched.push_back(&ids_);
    }
    AddFetches(base, fetched);
    OwnBackward(base);
    for (int step = 1; step < route_.steps(); ++step) {
      const int source = route_.SourceOf(rank(), step);
      UseCompute(base, step);
      if (!route_.Works(step, source)) continue;
      ComputeCall call;
      call.op = ComputeCall::Op::kBackward;
      call.q = OthersQueries(source, step);
      call.q.dout = Slot(dout_, QuerySlot(step), source);
      call.q.lse = Slot(lse_, QuerySlot(step), source);
      call.q.delta = Slot(delta_, QuerySlot(step), source);
      call.q.dq_acc = Slot(part_dq_, PartSlot(step), source);
      AddOperand(call, KeysWithGradients(), route_.Work(rank(), source));
      builder_.AddZero(base + step, call.q.dq_acc);
      AddBackwardCall(base + step, std::move(call), shard_, builder_);
    }
    AddReturns(base, {&part_dq_});
    AddUpQueryGradients(base);
    AddUpSinkGradients(first + 1, route_.q_rows, shard_, builder_);
    FinishBackward(base + StepsOfPass() - 1, shard_, builder_);
  }

 private:
  int rank() const { return builder_.rank(); }
  // The own call's step, others' steps, and one in which the last partials arrive.
  int64_t StepsOfPass() const { return route_.steps() == 1 ? 1 : route_.steps() + 1; }
  // Returns the slot of others' queries at a step.
  int QuerySlot(int step) const { return route_.gathered ? step : step % 2; }
  // Returns the slot in which the partial of a step is computed. It is sent one step later, while
  // the own rows' partial of that step arrives. A gathered route reuses the slots of partials that
  // are already sent, so that all received partials stay until they are merged.
  int PartSlot(int step) const { return route_.gathered ? step : step % 2; }
  int LandingSlot(int step) const { return route_.gathered ? step - 1 : 2; }

  ByteRange Slot(Travelling& tensor, int slot, int source) {
    BufferId& buffer = tensor.slots[slot];
    if (buffer == kNoBuffer) {
      const bool is_part = tensor.home == kNoBuffer;
      const char* kind = is_part ? "part" : "others";
      buffer = builder_.AddBuffer(absl::StrCat(kind, slot, ".", tensor.name), 0);
    }
    return builder_.First(buffer, route_.q_rows[source] * tensor.row_bytes);
  }
  // Returns where the rank that holds `source`'s queries stores them at a step.
  ByteRange Held(Travelling& tensor, int step, int source) {
    return step == 0 ? builder_.Whole(tensor.home) : Slot(tensor, QuerySlot(step), source);
  }

  void AddFetches(int64_t first, const std::vector<Travelling*>& tensors) {
    for (int step = 1; step < route_.steps(); ++step) {
      const int64_t at = route_.gathered ? first : first + step - 1;
      const int from_step = route_.direct ? 0 : step - 1;
      builder_.Use(at);  // every step has a transfer
      for (int source : route_.SourcesAt(rank(), step)) {
        if (!route_.held[step][source]) continue;
        const int from = route_.SenderTo(source, step);
        const int to = route_.HolderOf(source, step);
        for (Travelling* tensor : tensors) {
          if (from == rank()) {
            builder_.AddTransfer(at, {Transfer::Kind::kSend, to, Held(*tensor, from_step, source)});
          }
          if (to == rank()) {
            builder_.AddTransfer(at, {Transfer::Kind::kReceive, from, Held(*tensor, step, source)});
          }
        }
      }
    }
  }

  void AddReturns(int64_t first, const std::vector<Travelling*>& parts) {
    for (int step = 1; step < route_.steps(); ++step) {
      if (route_.works_any[step]) builder_.Use(first + step + 1);
    }
    ForEachReturn(first, [&](int64_t at, int step, int source) {
      const int holder = route_.HolderOf(source, step);
      for (Travelling* part : parts) {
        if (holder == rank()) {
          builder_.AddTransfer(
              at, {Transfer::Kind::kSend, source, Slot(*part, PartSlot(step), source)});
        }
        if (source == rank()) {
          builder_.AddTransfer(
              at, {Transfer::Kind::kReceive, holder, Slot(*part, LandingSlot(step), source)});
        }
      }
    });
  }

  // Visits every partial that returns from this rank to its owner, or to this rank: when, computed
  // at which step, and for which rank.
  void ForEachReturn(int64_t first,
                     const std::function<void(int64_t at, int step, int source)>& action) const {
    for (int step = 1; step < route_.steps(); ++step) {
      for (int source : route_.SourcesAt(rank(), step)) {
        if (route_.Works(step, source)) action(first + step + 1, step, source);
      }
    }
  }

  // Returns the steps at which partials of this rank's rows arrive, in the order in which they are
  // merged.
  std::vector<int> Contributions() const {
    std::vector<int> steps;
    for (int step = 1; step < route_.steps(); ++step) {
      if (route_.Works(step, rank())) steps.push_back(step);
    }
    if (route_.gathered) {
      std::sort(steps.begin(), steps.end(), [this](int a, int b) {
        return route_.HolderOf(rank(), a) < route_.HolderOf(rank(), b);
      });
    }
    return steps;
  }

  // Records that some rank has a call on others' queries at the step.
  void UseCompute(int64_t first, int step) {
    if (route_.works_any[step]) builder_.Use(first + step);
  }

  KvOperand Keys() const {
    KvOperand keys{rank(), 0, builder_.kv_rows(), builder_.Whole(shard_.k),
                   builder_.Whole(shard_.v)};
    keys.segment_ids = builder_.WholeIfAny(shard_.kv_segment_ids);
    return keys;
  }

  KvOperand KeysWithGradients() const {
    KvOperand keys = Keys();
    keys.dk = builder_.Whole(shard_.dk_acc);
    keys.dv = builder_.Whole(shard_.dv_acc);
    return keys;
  }

  QOperand OthersQueries(int source, int step) {
    QOperand operand;
    operand.source_rank = source;
    operand.row_end = route_.q_rows[source];
    operand.q = Slot(q_, QuerySlot(step), source);
    if (ids_.home != kNoBuffer) {
      operand.options.push_back({TensorId::kQSegmentIds, Slot(ids_, QuerySlot(step), source)});
    }
    // Sharded by keys: they hold the values for all queries.
    for (TensorId id : {TensorId::kBias, TensorId::kMask}) {
      const BufferId buffer = builder_.InputOf(id);
      if (buffer != kNoBuffer) operand.options.push_back({id, builder_.Whole(buffer)});
    }
    return operand;
  }

  bool AnyQueries() const {
    return std::any_of(route_.q_rows.begin(), route_.q_rows.end(), [](int64_t n) { return n > 0; });
  }

  // Includes rows without keys: they get out = 0, lse = -inf, or wait for partials that arrive.
  void OwnForward(int64_t first) {
    if (AnyQueries()) builder_.Use(first);
    if (builder_.q_rows() == 0) return;
    ComputeCall call;
    call.q = AllQueries(builder_);
    call.q.q = builder_.Whole(shard_.q);
    call.q.lse = builder_.Whole(shard_.lse);
    AddTermOptions(builder_, call.q);
    call.initial = true;
    call.final = !route_.IsSeenByOthers(rank());
    if (call.final) {
      call.q.out = builder_.Whole(shard_.out);
      AddFinalOptions(builder_, call.q);
    } else {
      AddOutAccumulator(shard_, builder_);
      call.q.out_acc = builder_.Whole(shard_.out_acc);
    }
    const WorkCount& work = route_.Work(rank(), rank());
    if (work.pairs > 0) AddOperand(call, Keys(), work);
    builder_.AddCall(first, std::move(call));
  }

  void OwnBackward(int64_t base) {
    for (int source = 0; source < route_.world_size; ++source) {
      if (route_.Work(source, source).pairs > 0) builder_.Use(base);
    }
    const WorkCount& work = route_.Work(rank(), rank());
    if (work.pairs == 0) return;
    ComputeCall call = BackwardCallOf(shard_, builder_);
    AddOperand(call, KeysWithGradients(), work);
    AddBackwardCall(base, std::move(call), shard_, builder_);
  }

  void AddMerges(int64_t first) {
    const std::vector<int> steps = Contributions();
    const PartialOperand own = {builder_.WholeIfAny(shard_.out_acc), builder_.Whole(shard_.lse)};
    const auto landed = [&](int step) {
      return PartialOperand{Slot(part_out_, LandingSlot(step), rank()),
                            Slot(part_lse_, LandingSlot(step), rank())};
    };
    if (!route_.gathered) {
      for (int step : steps) {
        AddMerge(first + step + 1, {own, landed(step)}, /*final=*/step == steps.back());
      }
      return;
    }
    std::vector<PartialOperand> parts;
    for (int step : steps) {
      if (parts.size() == OwnPlace(steps)) parts.push_back(own);
      parts.push_back(landed(step));
    }
    if (steps.empty()) return;
    if (parts.size() == steps.size()) parts.push_back(own);
    AddMerge(first + route_.steps(), std::move(parts), /*final=*/true);
  }

  // Returns the position of the own partial among those of lower and higher ranks.
  size_t OwnPlace(const std::vector<int>& steps) const {
    return std::count_if(steps.begin(), steps.end(),
                         [this](int step) { return route_.HolderOf(rank(), step) < rank(); });
  }

  void AddMerge(int64_t at, std::vector<PartialOperand> parts, bool final) {
    ComputeCall call;
    call.op = ComputeCall::Op::kMerge;
    call.q = AllQueries(builder_);
    call.q.lse = builder_.Whole(shard_.lse);
    call.parts = std::move(parts);
    call.final = final;
    if (final) {
      call.q.out = builder_.Whole(shard_.out);
      AddFinalOptions(builder_, call.q);
    } else {
      call.q.out_acc = builder_.Whole(shard_.out_acc);
    }
    builder_.AddLateCall(at, std::move(call));
  }

  void AddUpQueryGradients(int64_t base) {
    for (int step : Contributions()) {
      ComputeCall add;
      add.op = ComputeCall::Op::kAdd;
      add.source = Slot(part_dq_, LandingSlot(step), rank());
      add.target = builder_.Whole(shard_.dq_acc);
      builder_.AddLateCall(route_.gathered ? base + route_.steps() : base + step + 1,
                           std::move(add));
    }
    // All ranks have this step, even if the last partials arrive earlier.
    if (!route_.gathered) return;
    const auto& works = route_.works_any;
    if (std::find(works.begin(), works.end(), 1) != works.end()) {
      builder_.Use(base + route_.steps());
    }
  }

  void UseBackwardSteps(int64_t first) {
    const int64_t last = first + (route_.steps() > 1 ? 1 : 0) + StepsOfPass() - 1;
    for (int source = 0; source < route_.world_size; ++source) {
      if (route_.q_rows[source] == 0 && route_.kv_rows[source] == 0) continue;
      builder_.Use(first);
      if (builder_.spec().result_dtype() != DType::kFloat32) builder_.Use(last);  // kConvert calls
    }
    if (builder_.spec().options.sinks) builder_.Use(first);  // rank 0 has dsinks
  }

  const QRoute& route_;
  ShardBuffers& shard_;
  ProgramBuilder& builder_;
  Travelling q_, ids_, dout_, lse_, delta_;
  Travelling part_out_, part_lse_, part_dq_;
};

}  // namespace

ResidentKeysRoute MakePassQRoute(const ScheduleContext& context) {
  const RingSpans pieces(context.spec, context.plan, context.latch);
  return {MakeQRoute(context.plan, pieces, /*gathered=*/false)};
}

ResidentKeysRoute MakeReplicatedQRoute(const ScheduleContext& context) {
  const RingSpans pieces(context.spec, context.plan, context.latch);
  return {MakeQRoute(context.plan, pieces, /*gathered=*/true)};
}

Program MakeResidentKeysProgram(const ScheduleContext& context, const ResidentKeysRoute& route,
                                int rank) {
  const ProgramRecipe& recipe = context.recipe;
  const bool backward = recipe.direction == Direction::kBackward;
  ProgramBuilder builder(context.spec, context.plan, rank);
  ShardBuffers shard = AddShardBuffers(recipe.direction, recipe.recompute_forward, builder);
  ResidentKeys keys(route.queries, shard, builder);
  int64_t steps = 0;
  if (!backward || recipe.recompute_forward) steps = keys.Forward(0);
  if (backward) {
    keys.Backward(steps,
                  /*has_queries=*/recipe.recompute_forward && route.queries.gathered);
  }
  return builder.Finish();
}

}  // namespace ringattn
