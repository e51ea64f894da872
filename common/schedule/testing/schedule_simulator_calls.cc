// Defines what each kind of call requires and what it leaves in memory.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/schedule/testing/schedule_simulator.h"

namespace ringattn {
namespace {

constexpr int64_t kCellBytes = SymbolicMemory::kCellBytes;
constexpr int64_t kFloatCells = 4 / kCellBytes;
constexpr Cell kNumbers = {Cell::State::kNumbers, -1, 0};

int TensorOf(TensorId id) { return static_cast<int>(id); }
uint64_t BitOf(int64_t rank) { return uint64_t{1} << rank; }

}  // namespace

// --- Required contents of operands ----------------------------------------------

int64_t ScheduleSimulator::KvHeads(const ComputeCall& call) const {
  return call.heads.all() ? spec_.shape.num_kv_heads : call.heads.count;
}

uint64_t ScheduleSimulator::KvHeadMask(const ComputeCall& call) const {
  return (BitOf(KvHeads(call)) - 1) << call.heads.begin;
}

Block ScheduleSimulator::ShardBlock(TensorId id, int rank) const {
  const AttentionShape& shape = spec_.shape;
  const TensorInfo& info = InfoOf(id);
  const bool of_keys = info.axis == Axis::kKv;
  Block block;
  block.tensor = TensorOf(id);
  block.source = rank;
  block.row_end = RowsIn((of_keys ? plan_.kv : plan_.q)[rank]);
  block.statistic = info.form == TensorForm::kStatistics;
  if (info.form == TensorForm::kPerToken) {
    block.cells_per_head = kFloatCells;
    return block;
  }
  block.head_count = of_keys ? shape.num_kv_heads : shape.num_heads;
  const int64_t dim = info.dim == DimOf::kValue ? shape.head_dim_v : shape.head_dim;
  block.cells_per_head =
      block.statistic ? kFloatCells : dim * ElementBytes(DTypeOf(spec_, id)) / kCellBytes;
  return block;
}

Block ScheduleSimulator::QBlock(const ComputeCall& call, int tensor, int64_t dim,
                                int64_t element_bytes) const {
  const int64_t group = spec_.shape.group_size();
  Block block;
  block.tensor = tensor;
  block.source = call.q.source_rank;
  block.row_begin = call.q.row_begin;
  block.row_end = call.q.row_end;
  block.head_begin = call.heads.begin * group;
  block.head_count = KvHeads(call) * group;
  block.cells_per_head = dim * element_bytes / kCellBytes;
  return block;
}

Block ScheduleSimulator::QStatistic(const ComputeCall& call, int tensor) const {
  Block block = QBlock(call, tensor, 1, 4);
  block.statistic = true;
  return block;
}

Block ScheduleSimulator::QOf(const ComputeCall& call) const {
  return QBlock(call, TensorOf(TensorId::kQ), spec_.shape.head_dim, ElementBytes(spec_.dtype));
}

Block ScheduleSimulator::DoutOf(const ComputeCall& call) const {
  return QBlock(call, TensorOf(TensorId::kDout), spec_.shape.head_dim_v, ElementBytes(spec_.dtype));
}

Block ScheduleSimulator::KvBlock(const ComputeCall& call, const KvOperand& operand, TensorId id,
                                 int64_t element_bytes) const {
  const int64_t dim =
      InfoOf(id).dim == DimOf::kValue ? spec_.shape.head_dim_v : spec_.shape.head_dim;
  Block block;
  block.tensor = TensorOf(id);
  block.source = operand.source_rank;
  block.row_begin = operand.row_begin;
  block.row_end = operand.row_end;
  block.head_begin = call.heads.begin;
  block.head_count = KvHeads(call);
  block.cells_per_head = dim * element_bytes / kCellBytes;
  return block;
}

bool ScheduleSimulator::RunCall(int rank, const ComputeCall& call) {
  const HeadRange& heads = call.heads;
  if (!heads.all() && (heads.of != spec_.shape.num_kv_heads || heads.begin < 0 || heads.count < 1 ||
                       heads.begin + heads.count > heads.of)) {
    return Fail("heads that the problem does not have");
  }
  if (takes_hints_ && call.store_hint != ComputeCall::kNoStoreHint &&
      call.op != ComputeCall::Op::kBackward) {
    return true;
  }
  switch (call.op) {
    case ComputeCall::Op::kForward:
      return RunForward(rank, call);
    case ComputeCall::Op::kBackward:
      return RunBackward(rank, call);
    case ComputeCall::Op::kBiasGradient:
      return RunBiasGradient(rank, call);
    case ComputeCall::Op::kAdd:
      return RunAdd(rank, call);
    case ComputeCall::Op::kDelta:
      return RunDelta(rank, call);
    case ComputeCall::Op::kSinkGradient:
      return RunSinkGradient(rank, call);
    case ComputeCall::Op::kProbabilities:
      return RunProbabilities(rank, call);
    case ComputeCall::Op::kZero:
      return memory_.Write(rank, call.target, {Cell::State::kGradients, -1, 0});
    case ComputeCall::Op::kConvert:
      return RunConvert(rank, call);
    case ComputeCall::Op::kMerge:
      return RunMerge(rank, call);
    case ComputeCall::Op::kCopy:
      return RunCopy(rank, call);
    // Dilated problems: the simulator runs each part separately.
    case ComputeCall::Op::kGather:
    case ComputeCall::Op::kScatterAdd:
    case ComputeCall::Op::kScatterMerge:
      return Fail("a part of a dilated problem");
  }
  return Fail("unknown call");
}

bool ScheduleSimulator::RunProbabilities(int rank, const ComputeCall& call) {
  if (call.q.source_rank != rank || !call.heads.all()) {
    return Fail("probabilities of other rows or heads than the rank's");
  }
  if (call.initial != (probability_calls_[rank]++ == 0)) return Fail("initial flag is wrong");
  if (!memory_.CheckRows(rank, call.q.q, QOf(call)) || !RequireTerms(rank, call)) return false;
  if (call.final == forward_done_[rank].empty()) {
    return Fail("probabilities before the last forward call");
  }
  if (call.final && !memory_.Require(rank, call.q.lse, "probabilities")) return false;
  if (!call.initial && !memory_.Require(rank, call.target, "probabilities")) return false;
  if (call.target.bytes !=
      LayoutOf(spec_, TensorId::kProbabilities).ShardBytes(RowsIn(plan_.chosen[rank]))) {
    return Fail("probabilities of a wrong size");
  }
  return Cover(rank, call, probabilities_, /*with_values=*/false) &&
         memory_.Write(rank, call.target, kNumbers);
}

bool ScheduleSimulator::Cover(int rank, const ComputeCall& call, Coverage& coverage,
                              bool with_values) {
  for (const KvOperand& operand : call.kv) {
    if (operand.rows() <= 0) return Fail("operand without rows");
    const int64_t element_bytes = ElementBytes(spec_.dtype);
    if (!memory_.CheckRows(rank, operand.k, KvBlock(call, operand, TensorId::kK, element_bytes)) ||
        (with_values && !memory_.CheckRows(rank, operand.v,
                                           KvBlock(call, operand, TensorId::kV, element_bytes)))) {
      return false;
    }
    if (spec_.options.segment_ids) {
      Block ids = ShardBlock(TensorId::kKvSegmentIds, operand.source_rank);
      ids.row_begin = operand.row_begin;
      ids.row_end = operand.row_end;
      if (!memory_.CheckRows(rank, operand.segment_ids, ids)) return false;
    } else if (operand.segment_ids.buffer != kNoBuffer) {
      return Fail("segment ids that were never sent");
    }
    for (int64_t row = operand.row_begin; row < operand.row_end; ++row) {
      uint64_t& heads = coverage.computed[call.q.source_rank][operand.source_rank][row];
      if ((heads & KvHeadMask(call)) != 0) {
        return Fail(absl::StrCat("rank ", rank, " computes again with row ", row, " of rank ",
                                 operand.source_rank));
      }
      heads |= KvHeadMask(call);
    }
  }
  coverage.pairs += call.pairs * KvHeads(call);
  return true;
}

bool ScheduleSimulator::CheckSinks(int rank, const ComputeCall& call) {
  // Once: sinks joined to every partial would count several times.
  const ByteRange& sinks = call.q.Option(TensorId::kSinks);
  const bool has_sinks = sinks.buffer != kNoBuffer;
  if (has_sinks != (spec_.options.sinks && call.final)) {
    return Fail("sinks in a call that is not the last");
  }
  if (!has_sinks) return true;
  const int64_t group = spec_.shape.group_size();
  if (sinks.bytes != KvHeads(call) * group * 4 || sinks.offset != call.heads.begin * group * 4) {
    return Fail("sinks of other heads");
  }
  return memory_.Require(rank, sinks, "forward");
}

bool ScheduleSimulator::RunForward(int rank, const ComputeCall& call) {
  const int source = call.q.source_rank;
  const std::pair<int, int64_t> caller = {rank, call.heads.begin};
  if (call.initial != (forward_calls_[source][caller]++ == 0)) {
    return Fail("initial flag is wrong");
  }
  if (forward_done_[source].count(call.heads.begin) != 0) {
    return Fail("forward call after the final one");
  }
  const Block out = QBlock(call, TensorOf(TensorId::kOut), spec_.shape.head_dim_v, 4);
  const Block lse = QStatistic(call, TensorOf(TensorId::kLse));
  const auto is_own_partial = [&](Cell& cell, int64_t identity) {
    return (cell.state == Cell::State::kPartial && cell.identity == identity &&
            cell.contributors == BitOf(rank)) ||
           Fail("a partial that is not this rank's");
  };
  if (!call.initial && !(memory_.ForEach(rank, call.q.lse, lse, is_own_partial) &&
                         memory_.ForEach(rank, call.q.out_acc, out, is_own_partial))) {
    return false;
  }
  if (!memory_.CheckRows(rank, call.q.q, QOf(call)) || !RequireTerms(rank, call) ||
      !CheckSinks(rank, call) || !Cover(rank, call, forward_)) {
    return false;
  }
  if (call.final) return Finish(rank, call, BitOf(rank));
  const auto write = [&](Cell& cell, int64_t identity) {
    cell = {Cell::State::kPartial, identity, BitOf(rank)};
    return true;
  };
  return memory_.ForEach(rank, call.q.lse, lse, write) &&
         memory_.ForEach(rank, call.q.out_acc, out, write);
}

// Out and lse of the call's rows and heads, by all contributing ranks.
bool ScheduleSimulator::Finish(int rank, const ComputeCall& call, uint64_t contributors) {
  if (call.q.source_rank != rank) return Fail("rows of another rank come to their end");
  if (!forward_done_[rank].emplace(call.heads.begin, contributors).second) {
    return Fail("a second final call");
  }
  const Block out = QBlock(call, TensorOf(TensorId::kOut), spec_.shape.head_dim_v,
                           ElementBytes(spec_.result_dtype()));
  return memory_.WriteRows(rank, call.q.out, out) &&
         memory_.WriteRows(rank, call.q.lse, QStatistic(call, TensorOf(TensorId::kLse)));
}

bool ScheduleSimulator::RunMerge(int rank, const ComputeCall& call) {
  const Block out = QBlock(call, TensorOf(TensorId::kOut), spec_.shape.head_dim_v, 4);
  const Block lse = QStatistic(call, TensorOf(TensorId::kLse));
  uint64_t merged = 0;
  for (const PartialOperand& part : call.parts) {
    uint64_t contributors = 0;
    const auto read = [&](Cell& cell, int64_t identity) {
      if (cell.state != Cell::State::kPartial || cell.identity != identity) {
        return Fail("merge of something that is not a partial of these rows");
      }
      if (contributors != 0 && cell.contributors != contributors) {
        return Fail("merge of out and lse of different partials");
      }
      contributors = cell.contributors;
      return true;
    };
    if (!memory_.ForEach(rank, part.lse, lse, read) ||
        !memory_.ForEach(rank, part.out, out, read)) {
      return false;
    }
    if ((merged & contributors) != 0) return Fail("a partial merged twice");
    merged |= contributors;
  }
  if (!CheckSinks(rank, call)) return false;
  if (call.final) return Finish(rank, call, merged);
  const auto write = [&](Cell& cell, int64_t identity) {
    cell = {Cell::State::kPartial, identity, merged};
    return true;
  };
  return memory_.ForEach(rank, call.q.lse, lse, write) &&
         memory_.ForEach(rank, call.q.out_acc, out, write);
}

int64_t ScheduleSimulator::PairShardBytes(TensorId id, int rank) const {
  const TensorLayout layout = LayoutOf(spec_, plan_, id);
  return layout.ShardBytes(ShardRows(plan_, layout, rank));
}

bool ScheduleSimulator::RequireTerms(int rank, const ComputeCall& call) {
  for (TensorId id : {TensorId::kBias, TensorId::kMask, TensorId::kQSegmentIds}) {
    const ByteRange& range = call.q.Option(id);
    if ((range.buffer != kNoBuffer) != InfoOf(id).is_present(spec_)) {
      return Fail(absl::StrCat(TensorName(id), " is not where it belongs"));
    }
    if (range.buffer == kNoBuffer) continue;
    if (id == TensorId::kQSegmentIds) {
      Block ids = ShardBlock(id, call.q.source_rank);
      if (!memory_.CheckRows(rank, range, ids)) return false;
      continue;
    }
    if (ShardsPairsByKeys(plan_)) {  // of all queries, not only the call's
      const bool is_input = schedule_.programs[rank].buffers[range.buffer].input == id;
      if (!is_input || range.offset != 0 || range.bytes != PairShardBytes(id, rank)) {
        return Fail(absl::StrCat(TensorName(id), " is not the shard's"));
      }
      if (!memory_.Require(rank, range, "a call with score terms")) return false;
      continue;
    }
    const bool per_head =
        id == TensorId::kBias ? spec_.options.bias->per_head : spec_.options.mask->per_head;
    int64_t bytes = PairShardBytes(id, rank);
    if (per_head) bytes = bytes / spec_.shape.num_kv_heads * KvHeads(call);
    if (call.q.source_rank != rank || range.bytes != bytes) {
      return Fail(absl::StrCat(TensorName(id), " is not the shard's"));
    }
    const TensorLayout layout = LayoutOf(spec_, plan_, id);
    const int64_t group = spec_.shape.group_size();
    const bool right =
        per_head ? memory_.CheckPairs(rank, range, RowsIn(plan_.q[rank]) * layout.inner_bytes,
                                      spec_.shape.num_heads, call.heads.begin * group,
                                      KvHeads(call) * group)
                 : memory_.Require(rank, range, "a call with score terms");
    if (!right) return false;
  }
  return true;
}

bool ScheduleSimulator::CheckGradientInputs(int rank, const ComputeCall& call) {
  return memory_.CheckRows(rank, call.q.q, QOf(call)) &&
         memory_.CheckRows(rank, call.q.dout, DoutOf(call)) &&
         memory_.CheckRows(rank, call.q.lse, QStatistic(call, TensorOf(TensorId::kLse))) &&
         memory_.CheckRows(rank, call.q.delta, QStatistic(call, kDeltaTensor)) &&
         RequireTerms(rank, call);
}

bool ScheduleSimulator::RunBiasGradient(int rank, const ComputeCall& call) {
  if (!CheckGradientInputs(rank, call) || !memory_.Require(rank, call.target, "bias_gradient")) {
    return false;
  }
  const int64_t bytes = PairShardBytes(TensorId::kDbias, rank);
  if (call.target.bytes != bytes / spec_.shape.num_kv_heads * KvHeads(call) &&
      !(call.heads.all() && call.target.bytes == bytes)) {
    return Fail("dbias of a wrong size");
  }
  return Cover(rank, call, bias_gradient_);
}

bool ScheduleSimulator::RunDelta(int rank, const ComputeCall& call) {
  const Block out = QBlock(call, TensorOf(TensorId::kOut), spec_.shape.head_dim_v,
                           ElementBytes(spec_.result_dtype()));
  if (!memory_.CheckRows(rank, call.q.out, out) ||
      !memory_.CheckRows(rank, call.q.dout, DoutOf(call))) {
    return false;
  }
  if (spec_.has_dlse) {
    const ByteRange& dlse = call.q.Option(TensorId::kDlse);
    if (!memory_.CheckRows(rank, dlse, QStatistic(call, TensorOf(TensorId::kDlse))) ||
        !memory_.CheckRows(rank, call.q.lse, QStatistic(call, TensorOf(TensorId::kLse)))) {
      return false;
    }
  } else if (!call.q.options.empty()) {
    return Fail("dlse that was never sent");
  }
  if (call.q.dq_acc.bytes > 0 &&
      !memory_.Write(rank, call.q.dq_acc, {Cell::State::kGradients, -1, 0})) {
    return false;
  }
  return memory_.WriteRows(rank, call.q.delta, QStatistic(call, kDeltaTensor));
}

bool ScheduleSimulator::RunSinkGradient(int rank, const ComputeCall& call) {
  for (const ByteRange& range : {call.q.Option(TensorId::kSinks), call.q.lse, call.q.delta}) {
    if (!memory_.Require(rank, range, "sink_gradient")) return false;
  }
  if (call.target.bytes != spec_.shape.num_heads * 4) return Fail("dsinks of a wrong size");
  return memory_.Write(rank, call.target, {Cell::State::kGradients, -1, BitOf(rank)});
}

bool ScheduleSimulator::RunBackward(int rank, const ComputeCall& call) {
  if (!CheckGradientInputs(rank, call) || !Cover(rank, call, backward_)) return false;
  uint64_t sources = 0;
  for (const KvOperand& operand : call.kv) {
    sources |= BitOf(operand.source_rank);
    const uint64_t queries = BitOf(call.q.source_rank);
    const Block dk = KvBlock(call, operand, TensorId::kDk, 4);
    const Block dv = KvBlock(call, operand, TensorId::kDv, 4);
    if (takes_hints_ && call.store_hint != ComputeCall::kNoStoreHint) {
      if (!Store(rank, operand.dk_out, dk, queries) || !Store(rank, operand.dv_out, dv, queries)) {
        return false;
      }
      continue;
    }
    if (!Contribute(rank, operand.dk, dk, queries, true) ||
        !Contribute(rank, operand.dv, dv, queries, true)) {
      return false;
    }
  }
  const Block dq = QBlock(call, TensorOf(TensorId::kDq), spec_.shape.head_dim, 4);
  return Contribute(rank, call.q.dq_acc, dq, sources, /*once=*/false);
}

bool ScheduleSimulator::Contribute(int rank, const ByteRange& range, const Block& block,
                                   uint64_t contributors, bool once) {
  return memory_.ForEach(rank, range, block, [&](Cell& cell, int64_t identity) {
    if (cell.state != Cell::State::kGradients) return Fail("accumulator was not zeroed");
    if (cell.identity != -1 && cell.identity != identity) {
      return Fail("accumulator belongs to another row");
    }
    if (once && (cell.contributors & contributors) != 0) return Fail("contribution made twice");
    cell.identity = identity;
    cell.contributors |= contributors;
    return true;
  });
}

bool ScheduleSimulator::RunAdd(int rank, const ComputeCall& call) {
  Cell *source, *target;
  int64_t source_count, target_count;
  if (!memory_.Slice(rank, call.source, &source, &source_count) ||
      !memory_.Slice(rank, call.target, &target, &target_count)) {
    return false;
  }
  if (source_count != target_count) return Fail("add of different sizes");
  for (int64_t i = 0; i < source_count; ++i) {
    if (source[i].state != Cell::State::kGradients || target[i].state != Cell::State::kGradients) {
      return Fail("add of something that is not a gradient");
    }
    if (source[i].identity != -1 && target[i].identity != -1 &&
        source[i].identity != target[i].identity) {
      return Fail("add of another row");
    }
    if ((source[i].contributors & target[i].contributors) != 0) {
      return Fail("contribution added twice");
    }
    target[i].identity = std::max(source[i].identity, target[i].identity);
    target[i].contributors |= source[i].contributors;
  }
  return true;
}

bool ScheduleSimulator::RunConvert(int rank, const ComputeCall& call) {
  Cell* cells;
  int64_t count;
  if (!memory_.Require(rank, call.source, "convert")) return false;
  memory_.Slice(rank, call.source, &cells, &count);
  if (call.target.bytes * 4 != call.source.bytes * ElementBytes(spec_.result_dtype())) {
    return Fail("convert between different numbers of elements");
  }
  if (call.target != memory_.Whole(rank, call.target.buffer)) return Fail("convert of a part");
  converted_[rank][call.target.buffer] = Cells(cells, cells + count);
  return memory_.Write(rank, call.target, kNumbers);
}

bool ScheduleSimulator::Store(int rank, const ByteRange& result, const Block& block,
                              uint64_t contributors) {
  if (!memory_.Write(rank, result, kNumbers)) return false;
  // The cells of fp32, as a kConvert leaves them.
  const int64_t wider = 4 / ElementBytes(spec_.result_dtype());
  Cells& cells = converted_[rank][result.buffer];
  cells.resize(memory_.Of(rank, result.buffer).size() * wider);
  Cell* const target = cells.data() + result.offset / kCellBytes * wider;
  const int64_t count = result.bytes / kCellBytes * wider;
  return memory_.ForEach(target, count, block, [&](Cell& cell, int64_t identity) {
    if (cell.state != Cell::State::kUnwritten) return Fail("a gradient stored twice");
    cell = {Cell::State::kGradients, identity, contributors};
    return true;
  });
}

bool ScheduleSimulator::RunCopy(int rank, const ComputeCall& call) {
  const CopyForm& form = call.copy;
  const auto is_whole = [&](const ByteRange& range, int64_t pitch) {
    return pitch >= form.run_bytes && range.bytes == (form.runs - 1) * pitch + form.run_bytes;
  };
  if (form.runs < 1 || form.run_bytes < 1 || !is_whole(call.source, form.source_pitch) ||
      !is_whole(call.target, form.target_pitch)) {
    return Fail("a copy whose runs are not its bytes");
  }
  for (int64_t run = 0; run < form.runs; ++run) {
    const ByteRange from = {call.source.buffer, call.source.offset + run * form.source_pitch,
                            form.run_bytes};
    const ByteRange to = {call.target.buffer, call.target.offset + run * form.target_pitch,
                          form.run_bytes};
    Cell *source, *target;
    int64_t count;
    if (!memory_.Require(rank, from, "copy") || !memory_.Slice(rank, from, &source, &count) ||
        !memory_.Slice(rank, to, &target, &count)) {
      return false;
    }
    std::copy(source, source + count, target);
  }
  return true;
}

}  // namespace ringattn
