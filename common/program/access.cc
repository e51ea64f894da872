#include "common/program/access.h"

namespace ringattn {

bool Conflict(const Access& a, const Access& b) {
  return (a.write || b.write) && Overlap(a.range, b.range);
}

bool Conflict(const std::vector<Access>& a, const std::vector<Access>& b) {
  for (const Access& x : a) {
    for (const Access& y : b) {
      if (Conflict(x, y)) return true;
    }
  }
  return false;
}

Access AccessOf(const Transfer& transfer) {
  return {transfer.range, transfer.kind == Transfer::Kind::kReceive};
}

bool OnlyAddToTheSame(const ComputeCall& a, const ComputeCall& b) {
  if (a.op != ComputeCall::Op::kBackward || b.op != ComputeCall::Op::kBackward) return false;
  const auto without_dq = [](ComputeCall call) {
    call.q.dq_acc = kNone;
    return AccessesOf(call);
  };
  return !Conflict(without_dq(a), without_dq(b)) &&
         !Conflict({{a.q.dq_acc, true}}, without_dq(b)) &&
         !Conflict(without_dq(a), {{b.q.dq_acc, true}});
}

std::vector<std::vector<Access>> LateReadsOf(const ComputeCall& call) {
  std::vector<std::vector<Access>> reads(call.kv.empty() ? 0 : call.kv.back().late);
  for (const KvOperand& operand : call.kv) {
    if (operand.late == 0) continue;
    for (const ByteRange& range : {operand.k, operand.v}) {
      if (range.buffer != kNoBuffer) reads[operand.late - 1].push_back({range, /*write=*/false});
    }
  }
  return reads;
}

std::vector<Access> AccessesOf(const ComputeCall& call) {
  std::vector<Access> accesses;
  const auto add = [&](const ByteRange& range, bool write) {
    if (range.buffer != kNoBuffer) accesses.push_back({range, write});
  };
  // A write waits for earlier readers and writers alike, so it implies a read.
  const auto read = [&](const ByteRange& range) { add(range, false); };
  const auto write = [&](const ByteRange& range) { add(range, true); };
  switch (call.op) {
    case ComputeCall::Op::kForward:
      read(call.q.q);
      write(call.q.lse);
      write(call.q.out_acc);
      write(call.q.out);
      break;
    case ComputeCall::Op::kDelta:
      read(call.q.out);
      read(call.q.dout);
      read(call.q.lse);
      write(call.q.delta);
      write(call.q.dq_acc);
      break;
    case ComputeCall::Op::kSinkGradient:
      read(call.q.lse);
      read(call.q.delta);
      write(call.target);
      break;
    case ComputeCall::Op::kBackward:
      read(call.q.q);
      read(call.q.dout);
      read(call.q.lse);
      read(call.q.delta);
      write(call.q.dq_acc);
      break;
    case ComputeCall::Op::kBiasGradient:
      read(call.q.q);
      read(call.q.dout);
      read(call.q.lse);
      read(call.q.delta);
      write(call.target);
      break;
    case ComputeCall::Op::kProbabilities:
      read(call.q.q);
      read(call.q.lse);
      write(call.target);
      break;
    case ComputeCall::Op::kZero:
    case ComputeCall::Op::kAdd:
    case ComputeCall::Op::kConvert:
    case ComputeCall::Op::kCopy:
    case ComputeCall::Op::kGather:
    case ComputeCall::Op::kScatterAdd:
      for (const PartialOperand& part : call.parts) read(part.out);
      read(call.source);
      write(call.target);
      break;
    case ComputeCall::Op::kMerge:
    case ComputeCall::Op::kScatterMerge:
      for (const PartialOperand& part : call.parts) {
        read(part.out);
        read(part.lse);
      }
      write(call.q.lse);
      write(call.q.out_acc);
      write(call.q.out);
      break;
  }
  for (const OptionOperand& operand : call.q.options) read(operand.range);
  for (const KvOperand& operand : call.kv) {
    read(operand.k);
    read(operand.v);
    read(operand.segment_ids);
    write(operand.dk);
    write(operand.dv);
    write(operand.dk_out);
    write(operand.dv_out);
  }
  return accesses;
}

}  // namespace ringattn
