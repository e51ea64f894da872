// Renders schedules as text.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/schedule/schedule.h"

namespace ringattn {
namespace {

// Decimal units, as in all printed reports (client/cli/report.h).
std::string Bytes(int64_t bytes) {
  if (bytes < 10'000) return absl::StrCat(bytes, " B");
  if (bytes < 10'000'000) return absl::StrFormat("%.1f kB", bytes / 1e3);
  return absl::StrFormat("%.1f MB", bytes / 1e6);
}

// One line per peer and direction; sums the transfers of one peer.
std::string TransfersOf(const Step& step, Transfer::Kind kind) {
  std::vector<int> peers;
  std::vector<int64_t> bytes;
  for (const Transfer& transfer : step.transfers) {
    if (transfer.kind != kind) continue;
    const auto found = std::find(peers.begin(), peers.end(), transfer.peer);
    if (found == peers.end()) {
      peers.push_back(transfer.peer);
      bytes.push_back(transfer.range.bytes);
    } else {
      bytes[found - peers.begin()] += transfer.range.bytes;
    }
  }
  std::vector<std::string> parts;
  for (size_t i = 0; i < peers.size(); ++i) {
    parts.push_back(absl::StrFormat("%s %d: %s", kind == Transfer::Kind::kSend ? "to" : "from",
                                    peers[i], Bytes(bytes[i])));
  }
  return parts.empty() ? "-" : absl::StrJoin(parts, ", ");
}

bool IsScatter(const ComputeCall& call) {
  return call.op == ComputeCall::Op::kScatterAdd || call.op == ComputeCall::Op::kScatterMerge;
}

// A scatter has several consecutive parts.
std::string PartText(const ComputeCall& call) {
  if (call.part == ComputeCall::kWhole) return "";
  if (!IsScatter(call)) return absl::StrCat(" part ", call.part);
  return absl::StrFormat(" parts[%d,%d)", call.part,
                         call.part + static_cast<int64_t>(call.parts.size()));
}

std::string CallText(const ComputeCall& call, const Program& program) {
  std::string text = OpName(call.op) + PartText(call);
  const std::string flags =
      absl::StrCat(call.initial ? " initial" : "", call.final ? " final" : "");
  if (!call.kv.empty() || call.op == ComputeCall::Op::kForward) {
    if (call.q.source_rank != program.rank)
      absl::StrAppendFormat(&text, " q%d", call.q.source_rank);
    if (!call.heads.all()) {
      absl::StrAppendFormat(&text, " heads[%d,%d)", call.heads.begin,
                            call.heads.begin + call.heads.count);
    }
    for (const KvOperand& kv : call.kv) {
      absl::StrAppendFormat(&text, " kv%d[%d,%d)", kv.source_rank, kv.row_begin, kv.row_end);
    }
    absl::StrAppendFormat(&text, " %d tiles%s", call.tiles, flags);
  } else if (call.op == ComputeCall::Op::kMerge) {
    absl::StrAppendFormat(&text, " %d partials%s", call.parts.size(), call.final ? " final" : "");
  } else if (call.target.buffer != kNoBuffer) {
    absl::StrAppend(&text, " ", program.buffers[call.target.buffer].name);
  }
  if (IsScatter(call)) absl::StrAppend(&text, flags);
  return text;
}

std::string CallsOf(const Step& step, const Program& program) {
  std::vector<std::string> parts;
  for (const ComputeCall& call : step.calls) {
    std::string text = CallText(call, program);
    if (parts.empty() || parts.back() != text) parts.push_back(std::move(text));
  }
  return parts.empty() ? "-" : absl::StrJoin(parts, "; ");
}

std::string BuffersOf(const Program& program) {
  std::vector<std::string> parts;
  for (const BufferSpec& buffer : program.buffers) {
    parts.push_back(absl::StrCat(buffer.name, " ", Bytes(buffer.bytes),
                                 buffer.input.has_value()    ? " (in)"
                                 : buffer.output.has_value() ? " (out)"
                                                             : ""));
  }
  return absl::StrJoin(parts, ", ");
}

}  // namespace

std::string ToString(const Schedule& schedule, const AttentionSpec& spec) {
  const AttentionShape& shape = spec.shape;
  std::string text = absl::StrFormat(
      "schedule %s, %s%s, exchange %s; %s q [%d,%d,%d,%d] kv [%d,%d,%d,%d/%d]\n",
      ScheduleKindName(schedule.recipe.schedule),
      schedule.recipe.direction == Direction::kForward ? "forward" : "backward",
      schedule.recipe.recompute_forward ? " after forward" : "",
      schedule.programs.size() == 1 ? "none" : (schedule.direct ? "direct" : "relay"),
      DTypeName(spec.dtype), shape.batch, shape.seq_len_q, shape.num_heads, shape.head_dim,
      shape.batch, shape.seq_len_kv, shape.num_kv_heads, shape.head_dim, shape.head_dim_v);
  int64_t tiles = 0, sent = 0;
  for (const Program& program : schedule.programs) {
    absl::StrAppendFormat(&text, "rank %d  buffers %s: %s\n", program.rank,
                          Bytes(program.BufferBytes()), BuffersOf(program));
    absl::StrAppendFormat(&text, "  %4s  %-24s  %-24s  %s\n", "step", "send", "receive", "compute");
    for (size_t i = 0; i < program.steps.size(); ++i) {
      const Step& step = program.steps[i];
      absl::StrAppendFormat(&text, "  %4d  %-24s  %-24s  %s\n", i,
                            TransfersOf(step, Transfer::Kind::kSend),
                            TransfersOf(step, Transfer::Kind::kReceive), CallsOf(step, program));
    }
    absl::StrAppendFormat(&text, "  total tiles %d, pairs %d, sent %s\n", program.TileCount(),
                          program.PairCount(), Bytes(program.SentBytes()));
    tiles += program.TileCount();
    sent += program.SentBytes();
  }
  absl::StrAppendFormat(&text, "all ranks: tiles %d, exchanged %s\n", tiles, Bytes(sent));
  return text;
}

}  // namespace ringattn
