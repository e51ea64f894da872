#include "worker/executor/late_keys.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "worker/executor/separate_blocks.h"
#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker {
namespace {

// Returns whether the step receives into the keys.
bool ReceivesInto(const Step& step, const KvOperand& keys) {
  return std::any_of(step.transfers.begin(), step.transfers.end(), [&](const Transfer& transfer) {
    return transfer.kind == Transfer::Kind::kReceive &&
           (Overlap(transfer.range, keys.k) || Overlap(transfer.range, keys.v));
  });
}

bool NeedsComputeUnits(const Step& step, int rank, absl::FunctionRef<bool(int)> takes_units) {
  return std::any_of(step.transfers.begin(), step.transfers.end(), [&](const Transfer& transfer) {
    return transfer.peer == rank || takes_units(transfer.peer);
  });
}

bool SameQueries(const ComputeCall& a, const ComputeCall& b) {
  return a.q.source_rank == b.q.source_rank && a.q.row_begin == b.q.row_begin &&
         a.q.row_end == b.q.row_end && a.q.q == b.q.q && a.q.lse == b.q.lse && a.heads == b.heads;
}

bool IsWholeForward(const ComputeCall& call) {
  return call.op == ComputeCall::Op::kForward && call.part == ComputeCall::kWhole;
}

// Returns the number of steps that bring late keys to the step's call.
int ArrivalsOf(const Step& step) {
  return step.calls.size() == 1 && !step.calls.front().kv.empty()
             ? step.calls.front().kv.back().late
             : 0;
}

bool ReceivesInto(const Program& program, size_t begin, size_t end, const KvOperand& keys) {
  return std::any_of(program.steps.begin() + begin, program.steps.begin() + end,
                     [&](const Step& step) { return ReceivesInto(step, keys); });
}

// A step and a later one, whose call may move to the first step. The steps between them have no
// calls. Transfers of `first` to `next` run while the joined call does.
struct Pair {
  const Program& program;
  size_t first;
  size_t next;

  const Step& first_step() const { return program.steps[first]; }
  const Step& next_step() const { return program.steps[next]; }
  // The step that brings the keys of the later call.
  const Step& last_bringing() const { return program.steps[next - 1]; }

  // Returns whether nothing changes the keys after they have arrived.
  bool Stay(const KvOperand& keys) const {
    return !ReceivesInto(program, first + keys.late, next + 1, keys);
  }
  bool Comes(const KvOperand& keys) const {
    return ReceivesInto(last_bringing(), keys) && !ReceivesInto(next_step(), keys);
  }
};

// The ring's case: each step has one call.
bool CanJoin(const Pair& pair) {
  if (pair.first_step().calls.size() != 1 || pair.next_step().calls.size() != 1) return false;
  const ComputeCall& first = pair.first_step().calls.front();
  const ComputeCall& second = pair.next_step().calls.front();
  return IsWholeForward(first) && IsWholeForward(second) && SameQueries(first, second) &&
         std::all_of(first.kv.begin(), first.kv.end(),
                     [&](const KvOperand& keys) { return pair.Stay(keys); }) &&
         std::all_of(second.kv.begin(), second.kv.end(),
                     [&](const KvOperand& keys) { return pair.Comes(keys); });
}

// The all_gather case: the first step only receives, and the next call also has keys of its own
// rank.
bool CanBeginSooner(const Pair& pair) {
  if (!pair.first_step().calls.empty() || pair.next_step().calls.size() != 1) return false;
  const ComputeCall& call = pair.next_step().calls.front();
  int there = 0, come = 0;
  for (const KvOperand& keys : call.kv) {
    there += keys.late == 0 && pair.Stay(keys) ? 1 : 0;
    come += pair.Comes(keys) ? 1 : 0;
  }
  return IsWholeForward(call) && there > 0 && come > 0 &&
         there + come == static_cast<int>(call.kv.size());
}

ComputeCall Joined(const ComputeCall& first, const ComputeCall& second, int late) {
  ComputeCall call = second;  // the final call has operands that the first lacks
  call.initial = first.initial;
  if (call.initial && call.final) call.q.out_acc = kNone;
  call.kv = first.kv;
  for (KvOperand keys : second.kv) {
    keys.late = late;
    call.kv.push_back(std::move(keys));
  }
  call.tiles += first.tiles;
  call.pairs += first.pairs;
  return call;
}

// Returns the call to run in `step`. The keys that `step` receives become late and move to the end.
ComputeCall BegunSooner(const Step& step, ComputeCall call) {
  for (KvOperand& keys : call.kv) keys.late = ReceivesInto(step, keys) ? 1 : 0;
  std::stable_partition(call.kv.begin(), call.kv.end(),
                        [](const KvOperand& keys) { return keys.late == 0; });
  return call;
}

// When keys may be late (JoinLateKeys).
struct Rules {
  absl::FunctionRef<bool(const ComputeCall&)> takes;
  absl::FunctionRef<bool(int peer)> takes_units;
  absl::FunctionRef<bool(Lane lane)> may_be_late;
};

// Moves the call of a later step to this one if it can. Returns whether it did.
bool JoinNext(Program& program, size_t first, const Rules& rules) {
  const int late = ArrivalsOf(program.steps[first]) + 1;
  const size_t next = first + late;
  if (next >= program.steps.size() || late > kMostArrivals) return false;
  const Pair pair{program, first, next};
  if (NeedsComputeUnits(pair.last_bringing(), program.rank, rules.takes_units)) return false;
  ComputeCall joined;
  if (CanJoin(pair)) {
    joined = Joined(pair.first_step().calls.front(), pair.next_step().calls.front(), late);
  } else if (CanBeginSooner(pair)) {
    joined = BegunSooner(pair.first_step(), pair.next_step().calls.front());
  } else {
    return false;
  }
  const std::vector<Access> reads = LateReadsOf(joined).back();
  for (const Lane lane : kAllLanes) {
    if (!rules.may_be_late(lane) && BringsInLane(pair.last_bringing(), lane, reads)) return false;
  }
  if (!rules.takes(joined)) return false;
  program.steps[first].calls = {std::move(joined)};
  program.steps[next].calls.clear();
  return true;
}

void EmptyUnused(Program& program) {
  std::vector<char> used(program.buffers.size(), 0);
  const auto use = [&used](const ByteRange& range) {
    if (range.buffer != kNoBuffer) used[range.buffer] = 1;
  };
  for (const Step& step : program.steps) {
    for (const Transfer& transfer : step.transfers) use(transfer.range);
    for (const ComputeCall& call : step.calls) ForEachRange(call, use);
  }
  for (size_t id = 0; id < program.buffers.size(); ++id) {
    BufferSpec& buffer = program.buffers[id];
    const bool scratch = buffer.source == BufferSource::kScratch && !buffer.input.has_value() &&
                         !buffer.output.has_value();
    if (scratch && !used[id]) buffer.bytes = 0;
  }
}

Program JoinSteps(Program program, const Rules& rules) {
  bool joined_any = false;
  for (size_t first = 0; first + 1 < program.steps.size(); ++first) {
    while (JoinNext(program, first, rules)) joined_any = true;
  }
  if (joined_any) EmptyUnused(program);
  return program;
}

int64_t BytesOf(const Program& program) {
  int64_t bytes = 0;
  for (const BufferSpec& buffer : program.buffers) bytes += buffer.bytes;
  return bytes;
}

int64_t CallsOf(const Program& program) {
  int64_t calls = 0;
  for (const Step& step : program.steps) calls += static_cast<int64_t>(step.calls.size());
  return calls;
}

}  // namespace

Program JoinLateKeys(Program program, absl::FunctionRef<bool(const ComputeCall&)> takes,
                     absl::FunctionRef<bool(int peer)> takes_units,
                     absl::FunctionRef<bool(Lane lane)> may_be_late) {
  const Rules rules{takes, takes_units, may_be_late};
  std::optional<Program> separate = SeparateBlocks(program);
  if (separate.has_value()) separate = JoinSteps(*std::move(separate), rules);
  const int64_t most_bytes = BytesOf(program);
  Program joined = JoinSteps(std::move(program), rules);
  const bool better = separate.has_value() && BytesOf(*separate) <= most_bytes &&
                      CallsOf(*separate) < CallsOf(joined);
  return better ? *std::move(separate) : joined;
}

int64_t LongerWayBytes(const Step& step, Lane lane) {
  int64_t received = 0, sent = 0;
  for (const Transfer& transfer : step.transfers) {
    if (transfer.lane != lane) continue;
    (transfer.kind == Transfer::Kind::kReceive ? received : sent) += transfer.range.bytes;
  }
  return std::max(received, sent);
}

bool BringsInLane(const Step& step, Lane lane, const std::vector<Access>& accesses) {
  return std::any_of(step.transfers.begin(), step.transfers.end(), [&](const Transfer& transfer) {
    return transfer.kind == Transfer::Kind::kReceive && transfer.lane == lane &&
           Conflict({AccessOf(transfer)}, accesses);
  });
}

}  // namespace ringattn::worker
