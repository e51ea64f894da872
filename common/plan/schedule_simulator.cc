#include "common/plan/schedule_simulator.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn {
namespace {

// Bytes per cell. Gradients (fp32) have as many cells per row as keys in fp32; the
// element counts per row, not the bytes, are compared.
constexpr int64_t kCellBytes = 2;
// Segment ids are told from keys by cells that no row of keys has (Identity).
constexpr int64_t kFirstIdCell = 4000;
constexpr int64_t kIdCells = 4 / kCellBytes;

}  // namespace

VisibleKeys::VisibleKeys(const AttentionSpec& spec, const ShardPlan& plan) {
  const std::vector<Band> bands = DocumentBands(spec);
  for (const Shard& shard : plan.q) {
    const std::vector<Piece> q = CutIntoPieces(shard, spec.shape.cu_seqlens_q);
    seen.emplace_back();
    for (const Shard& source : plan.kv) {
      std::vector<char>& seen_here = seen.back().emplace_back(RowsIn(source), 0);
      for (const Piece& keys : CutIntoPieces(source, spec.shape.cu_seqlens_k)) {
        std::vector<int64_t> changes(keys.length + 1, 0);
        for (const Piece& rows : q) {
          for (int64_t row = 0; row < rows.length; ++row) {
            const RowRange range = KeysOfRow(rows, row, keys, bands[rows.document]);
            pairs += range.size();
            ++changes[range.begin];
            --changes[range.end];
          }
        }
        std::partial_sum(changes.begin(), changes.end(), changes.begin());
        for (int64_t j = 0; j < keys.length; ++j) seen_here[keys.local_begin + j] = changes[j] > 0;
      }
    }
  }
}

ScheduleSimulator::ScheduleSimulator(const AttentionSpec& spec, const ShardPlan& plan,
                                     const Schedule& schedule)
    : spec_(spec), plan_(plan), schedule_(schedule), visible_(spec, plan) {
  const int64_t element_cells = ElementBytes(spec.dtype) / kCellBytes;
  key_cells_ = spec.shape.num_kv_heads * spec.shape.head_dim * element_cells;
  value_cells_ = spec.shape.num_kv_heads * spec.shape.head_dim_v * element_cells;
  const size_t world_size = schedule.programs.size();
  std::vector<std::vector<int>> none;
  for (const Shard& shard : plan.kv) none.emplace_back(RowsIn(shard), 0);
  forward_.computed.assign(world_size, none);
  backward_.computed.assign(world_size, none);
  bias_gradient_.computed.assign(world_size, none);
  probabilities_.computed.assign(world_size, none);
  probability_calls_.assign(world_size, 0);
  forward_calls_.assign(world_size, 0);
  forward_done_.assign(world_size, 0);
  converted_.resize(world_size);
  bytes_sent_.assign(world_size, std::vector<int64_t>(world_size, 0));
  for (const Program& program : schedule.programs) {
    memory_.emplace_back();
    for (const BufferSpec& buffer : program.buffers) {
      memory_.back().emplace_back((buffer.bytes + kCellBytes - 1) / kCellBytes);
    }
  }
}

bool ScheduleSimulator::Fail(std::string what) {
  if (error_.empty()) error_ = std::move(what);
  return false;
}

ByteRange ScheduleSimulator::Whole(int rank, BufferId id) const {
  return {id, 0, schedule_.programs[rank].buffers[id].bytes};
}

bool ScheduleSimulator::Slice(int rank, const ByteRange& range, Cell** begin, int64_t* count) {
  if (range.buffer < 0 || range.buffer >= static_cast<int>(memory_[rank].size())) {
    return Fail("no such buffer");
  }
  Cells& cells = memory_[rank][range.buffer];
  if (range.offset < 0 || range.bytes < 0 ||
      range.offset + range.bytes > schedule_.programs[rank].buffers[range.buffer].bytes) {
    return Fail(
        absl::StrCat("range outside buffer ", schedule_.programs[rank].buffers[range.buffer].name));
  }
  *begin = cells.data() + range.offset / kCellBytes;
  *count = (range.bytes + kCellBytes - 1) / kCellBytes;
  return true;
}

bool ScheduleSimulator::Require(int rank, const ByteRange& range, const char* what) {
  Cell* cells;
  int64_t count;
  if (!Slice(rank, range, &cells, &count)) return false;
  for (int64_t i = 0; i < count; ++i) {
    if (cells[i].state == Cell::State::kUnwritten) {
      return Fail(absl::StrCat(what, " reads unwritten bytes of ",
                               schedule_.programs[rank].buffers[range.buffer].name));
    }
  }
  return true;
}

bool ScheduleSimulator::Write(int rank, const ByteRange& range, Cell value) {
  Cell* cells;
  int64_t count;
  if (!Slice(rank, range, &cells, &count)) return false;
  std::fill(cells, cells + count, value);
  return true;
}

int64_t ScheduleSimulator::Identity(int source, bool is_value, int64_t batch, int64_t row,
                                    int64_t inner) const {
  int64_t identity = source * 2 + (is_value ? 1 : 0);
  identity = identity * spec_.shape.batch + batch;
  identity = identity * (spec_.shape.seq_len_kv + 1) + row;
  return identity * 4096 + inner;
}

void ScheduleSimulator::FillInputs() {
  for (size_t rank = 0; rank < memory_.size(); ++rank) {
    const Program& program = schedule_.programs[rank];
    for (size_t id = 0; id < program.buffers.size(); ++id) {
      const std::optional<TensorId> input = program.buffers[id].input;
      if (!input.has_value()) continue;
      Cells& cells = memory_[rank][id];
      const bool is_ids = *input == TensorId::kKvSegmentIds;
      if (*input != TensorId::kK && *input != TensorId::kV && !is_ids) {
        std::fill(cells.begin(), cells.end(), Cell{Cell::State::kNumbers, -1, 0});
        continue;
      }
      const bool is_value = *input == TensorId::kV;
      const int64_t inner_cells = is_ids ? kIdCells : is_value ? value_cells_ : key_cells_;
      size_t at = 0;
      for (int64_t b = 0; b < spec_.shape.batch; ++b) {
        for (int64_t row = 0; row < RowsIn(plan_.kv[rank]); ++row) {
          for (int64_t inner = 0; inner < inner_cells; ++inner) {
            cells[at++] = {Cell::State::kKeys,
                           Identity(static_cast<int>(rank), is_value, b, row,
                                    is_ids ? kFirstIdCell + inner : inner),
                           0};
          }
        }
      }
    }
  }
}

std::string ScheduleSimulator::Run() {
  FillInputs();
  const size_t steps = schedule_.programs[0].steps.size();
  for (const Program& program : schedule_.programs) {
    if (program.steps.size() != steps) return "programs differ in their number of steps";
  }
  for (size_t step = 0; step < steps && error_.empty(); ++step) {
    bool any = false;
    for (const Program& program : schedule_.programs) {
      any = any || !program.steps[step].transfers.empty() || !program.steps[step].calls.empty();
    }
    if (!any) Fail("a step in which nobody does anything");
    if (!RunTransfers(step)) break;
    for (size_t rank = 0; rank < memory_.size() && error_.empty(); ++rank) {
      for (const ComputeCall& call : schedule_.programs[rank].steps[step].calls) {
        if (!RunCall(static_cast<int>(rank), call)) break;
      }
    }
    if (!error_.empty()) absl::StrAppend(&error_, " (step ", step, ")");
  }
  if (error_.empty()) CheckOutputs();
  return error_;
}

bool ScheduleSimulator::RunTransfers(size_t step) {
  const int world_size = static_cast<int>(memory_.size());
  // Per pair of ranks, in order: what was sent.
  std::map<std::pair<int, int>, std::vector<Cells>> wires;
  for (int rank = 0; rank < world_size; ++rank) {
    std::vector<ByteRange> written, touched;
    for (const Transfer& transfer : schedule_.programs[rank].steps[step].transfers) {
      if (transfer.peer < 0 || transfer.peer >= world_size || transfer.peer == rank) {
        return Fail("transfer with an impossible peer");
      }
      if (transfer.range.bytes <= 0) return Fail("transfer of nothing");
      const bool receives = transfer.kind == Transfer::Kind::kReceive;
      for (const ByteRange& other : receives ? touched : written) {
        if (other.buffer == transfer.range.buffer &&
            other.offset < transfer.range.offset + transfer.range.bytes &&
            transfer.range.offset < other.offset + other.bytes) {
          return Fail("transfers of one group collide");
        }
      }
      touched.push_back(transfer.range);
      if (receives) {
        written.push_back(transfer.range);
        continue;
      }
      if (!Require(rank, transfer.range, "send")) return false;
      Cell* cells;
      int64_t count;
      Slice(rank, transfer.range, &cells, &count);
      wires[{rank, transfer.peer}].emplace_back(cells, cells + count);
      bytes_sent_[rank][transfer.peer] += transfer.range.bytes;
    }
  }
  std::map<std::pair<int, int>, size_t> next;
  for (int rank = 0; rank < world_size; ++rank) {
    for (const Transfer& transfer : schedule_.programs[rank].steps[step].transfers) {
      if (transfer.kind != Transfer::Kind::kReceive) continue;
      const std::pair<int, int> wire{transfer.peer, rank};
      size_t& index = next[wire];
      if (index >= wires[wire].size()) return Fail("receive without a send");
      const Cells& sent = wires[wire][index++];
      Cell* cells;
      int64_t count;
      if (!Slice(rank, transfer.range, &cells, &count)) return false;
      if (count != static_cast<int64_t>(sent.size())) return Fail("send and receive differ");
      std::copy(sent.begin(), sent.end(), cells);
    }
  }
  for (const auto& [wire, sent] : wires) {
    if (next[wire] != sent.size()) return Fail("send without a receive");
  }
  return true;
}

bool ScheduleSimulator::RunCall(int rank, const ComputeCall& call) {
  const Cell numbers{Cell::State::kNumbers, -1, 0};
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
      return Write(rank, call.target, {Cell::State::kGradients, -1, 0});
    case ComputeCall::Op::kConvert: {
      Cell* cells;
      int64_t count;
      if (!Require(rank, call.source, "convert")) return false;
      Slice(rank, call.source, &cells, &count);
      if (call.target.bytes * 4 != call.source.bytes * ElementBytes(spec_.result_dtype())) {
        return Fail("convert between different numbers of elements");
      }
      if (call.target.offset != 0 || call.target.bytes != Whole(rank, call.target.buffer).bytes) {
        return Fail("convert of a part");
      }
      converted_[rank][call.target.buffer] = Cells(cells, cells + count);
      return Write(rank, call.target, numbers);
    }
  }
  return Fail("unknown call");
}

bool ScheduleSimulator::Cover(int rank, const ComputeCall& call, Coverage& coverage) {
  for (const KvOperand& operand : call.kv) {
    if (operand.rows() <= 0) return Fail("operand without rows");
    if (!CheckKeys(rank, operand, false) || !CheckKeys(rank, operand, true) ||
        !CheckSegmentIds(rank, operand)) {
      return false;
    }
    for (int64_t row = operand.row_begin; row < operand.row_end; ++row) {
      ++coverage.computed[rank][operand.source_rank][row];
    }
  }
  return true;
}

bool ScheduleSimulator::RunForward(int rank, const ComputeCall& call) {
  const Cell numbers{Cell::State::kNumbers, -1, 0};
  if (call.initial != (forward_calls_[rank]++ == 0)) return Fail("initial flag is wrong");
  if (forward_done_[rank]) return Fail("forward call after the final one");
  if (!call.initial &&
      !(Require(rank, call.q.lse, "forward") && Require(rank, call.q.out_acc, "forward"))) {
    return false;
  }
  // Once: joined to every partial they would count as often.
  const bool has_sinks = call.q.Option(TensorId::kSinks).buffer != kNoBuffer;
  if (has_sinks != (spec_.options.sinks && call.final) ||
      (has_sinks && !Require(rank, call.q.Option(TensorId::kSinks), "forward"))) {
    return Fail("sinks in a call that is not the last");
  }
  if (!RequireTerms(rank, call)) return false;
  if (!Cover(rank, call, forward_)) return false;
  forward_pairs_ += call.pairs;
  forward_done_[rank] = call.final;
  if (!call.final && !Write(rank, call.q.out_acc, numbers)) return false;
  return Require(rank, call.q.q, "forward") && Write(rank, call.q.lse, numbers) &&
         (!call.final || Write(rank, call.q.out, numbers));
}

bool ScheduleSimulator::RequireTerms(int rank, const ComputeCall& call) {
  for (TensorId id : {TensorId::kBias, TensorId::kMask, TensorId::kQSegmentIds}) {
    const ByteRange& range = call.q.Option(id);
    if ((range.buffer != kNoBuffer) != InfoOf(id).is_present(spec_)) {
      return Fail(absl::StrCat(TensorName(id), " is not where it belongs"));
    }
    if (range.buffer == kNoBuffer) continue;
    if (range.bytes != LayoutOf(spec_, id).ShardBytes(RowsIn(plan_.q[rank])) ||
        !Require(rank, range, "a call with score terms")) {
      return Fail(absl::StrCat(TensorName(id), " is not the shard's"));
    }
  }
  return true;
}

bool ScheduleSimulator::RunBiasGradient(int rank, const ComputeCall& call) {
  for (const ByteRange& range : {call.q.q, call.q.dout, call.q.lse, call.q.delta, call.target}) {
    if (!Require(rank, range, "bias_gradient")) return false;
  }
  if (call.target.bytes != LayoutOf(spec_, TensorId::kDbias).ShardBytes(RowsIn(plan_.q[rank]))) {
    return Fail("dbias of a wrong size");
  }
  if (!RequireTerms(rank, call) || !Cover(rank, call, bias_gradient_)) return false;
  bias_gradient_pairs_ += call.pairs;
  return true;
}

bool ScheduleSimulator::RunProbabilities(int rank, const ComputeCall& call) {
  const Cell numbers{Cell::State::kNumbers, -1, 0};
  if (call.initial != (probability_calls_[rank]++ == 0)) return Fail("initial flag is wrong");
  if (!Require(rank, call.q.q, "probabilities") || !RequireTerms(rank, call)) return false;
  if (call.final != forward_done_[rank]) return Fail("probabilities before the last forward call");
  if (call.final && !Require(rank, call.q.lse, "probabilities")) return false;
  if (!call.initial && !Require(rank, call.target, "probabilities")) return false;
  if (call.target.bytes !=
      LayoutOf(spec_, TensorId::kProbabilities).ShardBytes(RowsIn(plan_.chosen[rank]))) {
    return Fail("probabilities of a wrong size");
  }
  for (const KvOperand& operand : call.kv) {
    if (!CheckKeys(rank, operand, false) || !CheckSegmentIds(rank, operand)) return false;
    for (int64_t row = operand.row_begin; row < operand.row_end; ++row) {
      ++probabilities_.computed[rank][operand.source_rank][row];
    }
  }
  return Write(rank, call.target, numbers);
}

bool ScheduleSimulator::RunDelta(int rank, const ComputeCall& call) {
  for (const ByteRange& range : {call.q.out, call.q.dout}) {
    if (!Require(rank, range, "delta")) return false;
  }
  if (spec_.has_dlse && !(Require(rank, call.q.Option(TensorId::kDlse), "delta") &&
                          Require(rank, call.q.lse, "delta"))) {
    return false;
  }
  if (!spec_.has_dlse && !call.q.options.empty()) return Fail("dlse that nobody sent");
  return Write(rank, call.q.delta, {Cell::State::kNumbers, -1, 0});
}

bool ScheduleSimulator::RunSinkGradient(int rank, const ComputeCall& call) {
  for (const ByteRange& range : {call.q.Option(TensorId::kSinks), call.q.lse, call.q.delta}) {
    if (!Require(rank, range, "sink_gradient")) return false;
  }
  if (call.target.bytes != spec_.shape.num_heads * 4) return Fail("dsinks of a wrong size");
  return Write(rank, call.target, {Cell::State::kGradients, -1, uint64_t{1} << rank});
}

bool ScheduleSimulator::RunBackward(int rank, const ComputeCall& call) {
  for (const ByteRange& range : {call.q.q, call.q.dout, call.q.lse, call.q.delta, call.q.dq_acc}) {
    if (!Require(rank, range, "backward")) return false;
  }
  if (!RequireTerms(rank, call) || !Cover(rank, call, backward_)) return false;
  backward_pairs_ += call.pairs;
  for (const KvOperand& operand : call.kv) {
    if (!Contribute(rank, operand, false) || !Contribute(rank, operand, true)) return false;
  }
  return true;
}

bool ScheduleSimulator::CheckKeys(int rank, const KvOperand& operand, bool is_value) {
  const int64_t inner_cells = is_value ? value_cells_ : key_cells_;
  Cell* cells;
  int64_t count;
  if (!Slice(rank, is_value ? operand.v : operand.k, &cells, &count)) return false;
  if (count != spec_.shape.batch * operand.rows() * inner_cells) {
    return Fail("operand of a wrong size");
  }
  for (int64_t b = 0; b < spec_.shape.batch; ++b) {
    for (int64_t row = operand.row_begin; row < operand.row_end; ++row) {
      for (int64_t inner = 0; inner < inner_cells; ++inner, ++cells) {
        if (cells->state != Cell::State::kKeys ||
            cells->identity != Identity(operand.source_rank, is_value, b, row, inner)) {
          return Fail(absl::StrCat("rank ", rank, ": operand does not hold row ", row, " of rank ",
                                   operand.source_rank));
        }
      }
    }
  }
  return true;
}

bool ScheduleSimulator::CheckSegmentIds(int rank, const KvOperand& operand) {
  if (!spec_.options.segment_ids) {
    return operand.segment_ids.buffer == kNoBuffer || Fail("segment ids that nobody sent");
  }
  Cell* cells;
  int64_t count;
  if (!Slice(rank, operand.segment_ids, &cells, &count)) return false;
  if (count != spec_.shape.batch * operand.rows() * kIdCells) return Fail("ids of a wrong size");
  for (int64_t b = 0; b < spec_.shape.batch; ++b) {
    for (int64_t row = operand.row_begin; row < operand.row_end; ++row) {
      for (int64_t inner = 0; inner < kIdCells; ++inner, ++cells) {
        if (cells->state != Cell::State::kKeys ||
            cells->identity != Identity(operand.source_rank, false, b, row, kFirstIdCell + inner)) {
          return Fail(absl::StrCat("rank ", rank, ": segment ids are not those of row ", row,
                                   " of rank ", operand.source_rank));
        }
      }
    }
  }
  return true;
}

bool ScheduleSimulator::Contribute(int rank, const KvOperand& operand, bool is_value) {
  const int64_t inner_cells = spec_.shape.num_kv_heads *
                              (is_value ? spec_.shape.head_dim_v : spec_.shape.head_dim) *
                              (4 / kCellBytes);
  Cell* cells;
  int64_t count;
  if (!Slice(rank, is_value ? operand.dv : operand.dk, &cells, &count)) return false;
  if (count != spec_.shape.batch * operand.rows() * inner_cells) {
    return Fail("gradients of a wrong size");
  }
  for (int64_t b = 0; b < spec_.shape.batch; ++b) {
    for (int64_t row = operand.row_begin; row < operand.row_end; ++row) {
      for (int64_t inner = 0; inner < inner_cells; ++inner, ++cells) {
        const int64_t identity = Identity(operand.source_rank, is_value, b, row, inner);
        if (cells->state != Cell::State::kGradients) return Fail("accumulator was not zeroed");
        if (cells->identity != -1 && cells->identity != identity) {
          return Fail("accumulator belongs to another row");
        }
        if ((cells->contributors >> rank & 1) != 0) return Fail("contribution made twice");
        cells->identity = identity;
        cells->contributors |= uint64_t{1} << rank;
      }
    }
  }
  return true;
}

bool ScheduleSimulator::RunAdd(int rank, const ComputeCall& call) {
  Cell *source, *target;
  int64_t source_count, target_count;
  if (!Slice(rank, call.source, &source, &source_count) ||
      !Slice(rank, call.target, &target, &target_count)) {
    return false;
  }
  if (source_count != target_count) return Fail("add of different sizes");
  for (int64_t i = 0; i < source_count; ++i) {
    if (source[i].state != Cell::State::kGradients || target[i].state != Cell::State::kGradients) {
      return Fail("add of something that is no gradient");
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

bool ScheduleSimulator::CheckCoverage(const Coverage& coverage, const char* pass, int64_t pairs) {
  for (size_t rank = 0; rank < memory_.size(); ++rank) {
    for (size_t source = 0; source < memory_.size(); ++source) {
      for (size_t row = 0; row < visible_.seen[rank][source].size(); ++row) {
        const int computed = coverage.computed[rank][source][row];
        if (computed > 1 || (computed == 0 && visible_.seen[rank][source][row])) {
          return Fail(absl::StrCat(pass, ": rank ", rank, " computed ", computed, " times on row ",
                                   row, " of rank ", source));
        }
      }
    }
  }
  if (pairs != visible_.pairs) {
    return Fail(absl::StrCat(pass, ": counts ", pairs, " pairs, there are ", visible_.pairs));
  }
  return true;
}

bool ScheduleSimulator::CheckGradients(int rank, TensorId id, bool is_value) {
  const Program& program = schedule_.programs[rank];
  for (size_t buffer = 0; buffer < program.buffers.size(); ++buffer) {
    if (program.buffers[buffer].output != id) continue;
    const auto converted = converted_[rank].find(static_cast<BufferId>(buffer));
    const Cells& cells =
        converted == converted_[rank].end() ? memory_[rank][buffer] : converted->second;
    const int64_t rows = RowsIn(plan_.kv[rank]);
    const int64_t inner_cells = spec_.shape.num_kv_heads *
                                (is_value ? spec_.shape.head_dim_v : spec_.shape.head_dim) *
                                (4 / kCellBytes);
    if (static_cast<int64_t>(cells.size()) != spec_.shape.batch * rows * inner_cells) {
      return Fail("gradient output of a wrong size");
    }
    for (int64_t b = 0; b < spec_.shape.batch; ++b) {
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t inner = 0; inner < inner_cells; ++inner) {
          const Cell& cell = cells[(b * rows + row) * inner_cells + inner];
          if (cell.state != Cell::State::kGradients) return Fail("gradient never written");
          if (cell.identity != -1 && cell.identity != Identity(rank, is_value, b, row, inner)) {
            return Fail("gradient of another row");
          }
          for (size_t from = 0; from < memory_.size(); ++from) {
            if (visible_.seen[from][rank][row] && (cell.contributors >> from & 1) == 0) {
              return Fail(absl::StrCat("rank ", rank, " row ", row, ": contribution of rank ", from,
                                       " is missing"));
            }
          }
        }
      }
    }
    return true;
  }
  return Fail("no gradient output");
}

bool ScheduleSimulator::CheckSinkGradients() {
  const Program& program = schedule_.programs[0];
  for (size_t buffer = 0; buffer < program.buffers.size(); ++buffer) {
    if (program.buffers[buffer].output != TensorId::kDsinks) continue;
    for (const Cell& cell : memory_[0][buffer]) {
      if (cell.state != Cell::State::kGradients) return Fail("dsinks never written");
      for (size_t rank = 0; rank < memory_.size(); ++rank) {
        if (RowsIn(plan_.q[rank]) > 0 && (cell.contributors >> rank & 1) == 0) {
          return Fail(absl::StrCat("dsinks lacks the part of rank ", rank));
        }
      }
    }
    return true;
  }
  return Fail("no output for dsinks");
}

bool ScheduleSimulator::CheckOutputs() {
  for (size_t r = 0; r < memory_.size(); ++r) {
    const int rank = static_cast<int>(r);
    const Program& program = schedule_.programs[rank];
    for (size_t id = 0; id < program.buffers.size(); ++id) {
      if (program.buffers[id].output.has_value() &&
          !Require(rank, Whole(rank, static_cast<BufferId>(id)), "client")) {
        return false;
      }
    }
    const bool forward = schedule_.direction == Direction::kForward || schedule_.recompute_forward;
    if (forward && RowsIn(plan_.q[rank]) > 0 && !forward_done_[rank]) {
      return Fail("no final forward call");
    }
    if (!spec_.probability_rows.empty() && RowsIn(plan_.chosen[rank]) > 0 &&
        schedule_.direction == Direction::kForward &&
        probabilities_.computed[rank] != forward_.computed[rank]) {
      return Fail("probabilities of other keys than the forward's");
    }
    if (schedule_.direction == Direction::kBackward &&
        !(CheckGradients(rank, TensorId::kDk, false) &&
          CheckGradients(rank, TensorId::kDv, true))) {
      return false;
    }
  }
  if ((schedule_.direction == Direction::kForward || schedule_.recompute_forward) &&
      !CheckCoverage(forward_, "forward", forward_pairs_)) {
    return false;
  }
  if (schedule_.direction == Direction::kForward) return true;
  if (spec_.options.sinks && !CheckSinkGradients()) return false;
  if (InfoOf(TensorId::kDbias).is_present(spec_) &&
      !CheckCoverage(bias_gradient_, "bias_gradient", bias_gradient_pairs_)) {
    return false;
  }
  return CheckCoverage(backward_, "backward", backward_pairs_);
}

}  // namespace ringattn
