#include "worker/executor/late_keys.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

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

// Two consecutive steps. Neither changes the keys of their calls, except by receiving them.
struct Pair {
  const Step& step;
  const Step& next;

  bool IsThere(const KvOperand& keys) const {
    return !keys.late && !ReceivesInto(step, keys) && !ReceivesInto(next, keys);
  }
  bool Comes(const KvOperand& keys) const {
    return ReceivesInto(step, keys) && !ReceivesInto(next, keys);
  }
};

// The ring's case: each step has one call.
bool CanJoin(const Pair& pair) {
  if (pair.step.calls.size() != 1 || pair.next.calls.size() != 1) return false;
  const ComputeCall& first = pair.step.calls.front();
  const ComputeCall& second = pair.next.calls.front();
  return IsWholeForward(first) && IsWholeForward(second) && SameQueries(first, second) &&
         std::all_of(first.kv.begin(), first.kv.end(),
                     [&](const KvOperand& keys) { return pair.IsThere(keys); }) &&
         std::all_of(second.kv.begin(), second.kv.end(),
                     [&](const KvOperand& keys) { return pair.Comes(keys); });
}

// The all_gather case: the first step only receives, and the next call also has keys of its own
// rank.
bool CanBeginSooner(const Pair& pair) {
  if (!pair.step.calls.empty() || pair.next.calls.size() != 1) return false;
  const ComputeCall& call = pair.next.calls.front();
  int there = 0, come = 0;
  for (const KvOperand& keys : call.kv) {
    there += pair.IsThere(keys) ? 1 : 0;
    come += pair.Comes(keys) ? 1 : 0;
  }
  return IsWholeForward(call) && there > 0 && come > 0 &&
         there + come == static_cast<int>(call.kv.size());
}

ComputeCall Joined(const ComputeCall& first, const ComputeCall& second) {
  ComputeCall call = second;  // the final call has operands that the first lacks
  call.initial = first.initial;
  if (call.initial && call.final) call.q.out_acc = kNone;
  call.kv = first.kv;
  for (KvOperand keys : second.kv) {
    keys.late = true;
    call.kv.push_back(std::move(keys));
  }
  call.tiles += first.tiles;
  call.pairs += first.pairs;
  return call;
}

// Returns the call to run in `step`. The keys that `step` receives become late and move to the end.
ComputeCall BegunSooner(const Step& step, ComputeCall call) {
  for (KvOperand& keys : call.kv) keys.late = ReceivesInto(step, keys);
  std::stable_partition(call.kv.begin(), call.kv.end(),
                        [](const KvOperand& keys) { return !keys.late; });
  return call;
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

}  // namespace

Program JoinLateKeys(Program program, absl::FunctionRef<bool(const ComputeCall&)> takes,
                     absl::FunctionRef<bool(int peer)> takes_units,
                     absl::FunctionRef<bool(Lane lane)> may_be_late) {
  bool joined_any = false;
  for (size_t i = 0; i + 1 < program.steps.size(); ++i) {
    Step& step = program.steps[i];
    Step& next = program.steps[i + 1];
    if (NeedsComputeUnits(step, program.rank, takes_units)) continue;
    const Pair pair{step, next};
    ComputeCall joined;
    if (CanJoin(pair)) {
      joined = Joined(step.calls.front(), next.calls.front());
    } else if (CanBeginSooner(pair)) {
      joined = BegunSooner(step, next.calls.front());
    } else {
      continue;
    }
    const std::vector<Access> late = LateReadsOf(joined);
    const bool too_slow = std::any_of(std::begin(kAllLanes), std::end(kAllLanes), [&](Lane lane) {
      return !may_be_late(lane) && BringsInLane(step, lane, late);
    });
    if (too_slow || !takes(joined)) continue;
    step.calls = {std::move(joined)};
    next.calls.clear();
    joined_any = true;
  }
  if (joined_any) EmptyUnused(program);
  return program;
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
