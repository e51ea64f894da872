#include "common/schedule/testing/schedule_simulator.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/program/lane_check.h"

namespace ringattn {
namespace {

constexpr int64_t kFloatCells = 4 / SymbolicMemory::kCellBytes;
constexpr Cell kNumbers = {Cell::State::kNumbers, -1, 0};

uint64_t BitOf(int64_t rank) { return uint64_t{1} << rank; }

}  // namespace

VisibleKeys::VisibleKeys(const AttentionSpec& spec, const ShardPlan& plan) {
  const std::vector<Band> bands = DocumentBands(spec);
  for (const Shard& shard : plan.q) {
    const std::vector<Piece> q = QueryPieces(spec.shape, shard);
    seen.emplace_back();
    for (const Shard& source : plan.kv) {
      std::vector<char>& seen_here = seen.back().emplace_back(RowsIn(source), 0);
      for (const Piece& keys : KeyPieces(spec.shape, source)) {
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

bool VisibleKeys::SeesAny(int rank, int source) const {
  const std::vector<char>& rows = seen[rank][source];
  return std::find(rows.begin(), rows.end(), 1) != rows.end();
}

ScheduleSimulator::ScheduleSimulator(const AttentionSpec& spec, const ShardPlan& plan,
                                     const Schedule& schedule, bool takes_hints)
    : spec_(spec),
      plan_(plan),
      schedule_(schedule),
      takes_hints_(takes_hints),
      visible_(spec, plan),
      memory_(spec, schedule) {
  const size_t world_size = schedule.programs.size();
  std::vector<std::vector<uint64_t>> none;
  for (const Shard& shard : plan.kv) none.emplace_back(RowsIn(shard), 0);
  for (Coverage* coverage : {&forward_, &backward_, &bias_gradient_, &probabilities_}) {
    coverage->computed.assign(world_size, none);
  }
  forward_calls_.resize(world_size);
  forward_done_.resize(world_size);
  probability_calls_.assign(world_size, 0);
  converted_.resize(world_size);
  bytes_sent_.assign(world_size, std::vector<int64_t>(world_size, 0));
}

void ScheduleSimulator::FillInputs() {
  for (int rank = 0; rank < memory_.ranks(); ++rank) {
    const Program& program = schedule_.programs[rank];
    for (size_t id = 0; id < program.buffers.size(); ++id) {
      const std::optional<TensorId> input = program.buffers[id].input;
      if (!input.has_value()) continue;
      ByteRange range = memory_.Whole(rank, static_cast<BufferId>(id));
      const TensorForm form = InfoOf(*input).form;
      if (form == TensorForm::kPerHead) {
        memory_.Write(rank, range, kNumbers);
        continue;
      }
      if (form == TensorForm::kPairs) {
        memory_.WritePairs(rank, range);
        continue;
      }
      // The buffer may be larger, for blocks that it holds later.
      range.bytes = std::min(
          range.bytes, LayoutOf(spec_, plan_, *input)
                           .ShardBytes(ShardRows(plan_, LayoutOf(spec_, plan_, *input), rank)));
      memory_.WriteRows(rank, range, ShardBlock(*input, rank));
    }
  }
}

std::string ScheduleSimulator::Run() {
  FillInputs();
  const size_t steps = schedule_.programs[0].steps.size();
  for (const Program& program : schedule_.programs) {
    if (program.steps.size() != steps) return "programs differ in their number of steps";
  }
  if (std::string violation = CheckLanes(schedule_.programs); !violation.empty()) return violation;
  for (size_t step = 0; step < steps && memory_.error().empty(); ++step) {
    bool any = false;
    for (const Program& program : schedule_.programs) {
      any = any || !program.steps[step].transfers.empty() || !program.steps[step].calls.empty();
    }
    if (!any) Fail("a step in which no rank does anything");
    if (!RunTransfers(step)) break;
    for (int rank = 0; rank < memory_.ranks() && memory_.error().empty(); ++rank) {
      for (const ComputeCall& call : schedule_.programs[rank].steps[step].calls) {
        if (!RunCall(rank, call)) break;
      }
    }
    if (!memory_.error().empty()) return absl::StrCat(memory_.error(), " (step ", step, ")");
  }
  if (memory_.error().empty()) CheckOutputs();
  return memory_.error();
}

bool ScheduleSimulator::RunTransfers(size_t step) {
  const int world_size = memory_.ranks();
  // Per pair of ranks, the cells sent, in order.
  std::map<std::pair<int, int>, std::vector<Cells>> wires;
  for (int rank = 0; rank < world_size; ++rank) {
    std::vector<ByteRange> written, touched;
    for (const Transfer& transfer : EndingAt(schedule_.programs[rank], step)) {
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
      if (!memory_.Require(rank, transfer.range, "send")) return false;
      Cell* cells;
      int64_t count;
      memory_.Slice(rank, transfer.range, &cells, &count);
      wires[{rank, transfer.peer}].emplace_back(cells, cells + count);
      bytes_sent_[rank][transfer.peer] += transfer.range.bytes;
    }
  }
  std::map<std::pair<int, int>, size_t> next;
  for (int rank = 0; rank < world_size; ++rank) {
    for (const Transfer& transfer : EndingAt(schedule_.programs[rank], step)) {
      if (transfer.kind != Transfer::Kind::kReceive) continue;
      const std::pair<int, int> wire{transfer.peer, rank};
      size_t& index = next[wire];
      if (index >= wires[wire].size()) return Fail("receive without a send");
      const Cells& sent = wires[wire][index++];
      Cell* cells;
      int64_t count;
      if (!memory_.Slice(rank, transfer.range, &cells, &count)) return false;
      if (count != static_cast<int64_t>(sent.size())) return Fail("send and receive differ");
      std::copy(sent.begin(), sent.end(), cells);
    }
  }
  for (const auto& [wire, sent] : wires) {
    if (next[wire] != sent.size()) return Fail("send without a receive");
  }
  return true;
}

bool ScheduleSimulator::CheckCoverage(const Coverage& coverage, const char* pass) {
  const uint64_t all_heads = BitOf(spec_.shape.num_kv_heads) - 1;
  for (int rank = 0; rank < memory_.ranks(); ++rank) {
    for (int source = 0; source < memory_.ranks(); ++source) {
      for (size_t row = 0; row < visible_.seen[rank][source].size(); ++row) {
        const uint64_t computed = coverage.computed[rank][source][row];
        if (computed != all_heads && (computed != 0 || visible_.seen[rank][source][row])) {
          return Fail(absl::StrCat(pass, ": queries of rank ", rank, " have heads ", computed,
                                   " of row ", row, " of rank ", source));
        }
      }
    }
  }
  if (coverage.pairs != visible_.pairs * spec_.shape.num_kv_heads) {
    return Fail(absl::StrCat(pass, ": counts ", coverage.pairs, " pairs of all heads, there are ",
                             visible_.pairs, " of each"));
  }
  return true;
}

bool ScheduleSimulator::CheckGradients(int rank, TensorId id) {
  const Program& program = schedule_.programs[rank];
  const bool of_keys = InfoOf(id).axis == Axis::kKv;
  Block block = ShardBlock(id, rank);
  block.cells_per_head =
      (id == TensorId::kDv ? spec_.shape.head_dim_v : spec_.shape.head_dim) * kFloatCells;
  for (size_t buffer = 0; buffer < program.buffers.size(); ++buffer) {
    if (program.buffers[buffer].output != id) continue;
    const auto converted = converted_[rank].find(static_cast<BufferId>(buffer));
    Cells cells = converted == converted_[rank].end()
                      ? memory_.Of(rank, static_cast<BufferId>(buffer))
                      : converted->second;
    const int64_t cells_per_row = block.head_count * block.cells_per_head;
    int64_t at = 0;
    return memory_.ForEach(
        cells.data(), static_cast<int64_t>(cells.size()), block,
        [&](const Cell& cell, int64_t identity) {
          const int64_t row = at++ / cells_per_row % block.row_end;
          if (cell.state != Cell::State::kGradients) return Fail("gradient never written");
          if (cell.identity != -1 && cell.identity != identity) {
            return Fail("gradient of another row");
          }
          for (int from = 0; from < memory_.ranks(); ++from) {
            const bool needed =
                of_keys ? visible_.seen[from][rank][row] != 0 : visible_.SeesAny(rank, from);
            if (needed && (cell.contributors & BitOf(from)) == 0) {
              return Fail(absl::StrCat("rank ", rank, " row ", row, " of ", TensorName(id),
                                       ": contribution of rank ", from, " is missing"));
            }
          }
          return true;
        });
  }
  return Fail("no gradient output");
}

bool ScheduleSimulator::CheckSinkGradients() {
  const Program& program = schedule_.programs[0];
  for (size_t buffer = 0; buffer < program.buffers.size(); ++buffer) {
    if (program.buffers[buffer].output != TensorId::kDsinks) continue;
    for (const Cell& cell : memory_.Of(0, static_cast<BufferId>(buffer))) {
      if (cell.state != Cell::State::kGradients) return Fail("dsinks never written");
      for (int rank = 0; rank < memory_.ranks(); ++rank) {
        if (RowsIn(plan_.q[rank]) > 0 && (cell.contributors & BitOf(rank)) == 0) {
          return Fail(absl::StrCat("dsinks lacks the part of rank ", rank));
        }
      }
    }
    return true;
  }
  return Fail("no output for dsinks");
}

bool ScheduleSimulator::CheckOutputs() {
  const bool forward =
      schedule_.recipe.direction == Direction::kForward || schedule_.recipe.recompute_forward;
  for (int rank = 0; rank < memory_.ranks(); ++rank) {
    const Program& program = schedule_.programs[rank];
    for (size_t id = 0; id < program.buffers.size(); ++id) {
      const ByteRange whole = memory_.Whole(rank, static_cast<BufferId>(id));
      const std::optional<TensorId> output = program.buffers[id].output;
      if (!output.has_value()) continue;
      if (!memory_.Require(rank, whole, "client")) return false;
      if ((output == TensorId::kOut || output == TensorId::kLse) &&
          !memory_.CheckRows(rank, whole, ShardBlock(*output, rank))) {
        return false;
      }
    }
    if (forward && RowsIn(plan_.q[rank]) > 0) {
      if (forward_done_[rank].empty()) return Fail("no final forward call");
      for (const auto& [caller, calls] : forward_calls_[rank]) {
        const auto done = forward_done_[rank].find(caller.second);
        if (done == forward_done_[rank].end() || (done->second & BitOf(caller.first)) == 0) {
          return Fail(
              absl::StrCat("rank ", rank, ": the partial of rank ", caller.first, " is lost"));
        }
      }
    }
    // No check if the rows' documents have no keys.
    if (!spec_.probability_rows.empty() && schedule_.recipe.direction == Direction::kForward &&
        LayoutOf(spec_, TensorId::kProbabilities).ShardBytes(RowsIn(plan_.chosen[rank])) > 0 &&
        probabilities_.computed[rank] != forward_.computed[rank]) {
      return Fail("probabilities of other keys than the forward's");
    }
    if (schedule_.recipe.direction == Direction::kForward) continue;
    for (TensorId id : {TensorId::kDq, TensorId::kDk, TensorId::kDv}) {
      if (!CheckGradients(rank, id)) return false;
    }
  }
  if (forward && !CheckCoverage(forward_, "forward")) return false;
  if (schedule_.recipe.direction == Direction::kForward) return true;
  if (spec_.options.sinks && !CheckSinkGradients()) return false;
  if (InfoOf(TensorId::kDbias).is_present(spec_) &&
      !CheckCoverage(bias_gradient_, "bias_gradient")) {
    return false;
  }
  return CheckCoverage(backward_, "backward");
}

}  // namespace ringattn
