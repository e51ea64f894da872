#include "common/program/program.h"

#include <cassert>

namespace ringattn {
namespace {

// Returns a count as if each head were counted separately. Calls may work on a subset of the heads
// (a group, or the heads of a dilated part).
int64_t PerHead(const std::vector<Step>& steps, int64_t ComputeCall::*count) {
  int64_t whole = 0, parts = 0, of = 1;
  for (const Step& step : steps) {
    for (const ComputeCall& call : step.calls) {
      if (call.part != ComputeCall::kWhole) {
        parts += call.*count * call.part_query_heads;
        of = call.of_query_heads;
      } else if (call.heads.all()) {
        whole += call.*count;
      } else {
        parts += call.*count * call.heads.count;
        of = call.heads.of;
      }
    }
  }
  return whole + parts / of;
}

}  // namespace

bool Overlap(const ByteRange& a, const ByteRange& b) {
  return a.buffer == b.buffer && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
}

const ByteRange& QOperand::Option(TensorId tensor) const {
  for (const OptionOperand& operand : options) {
    if (operand.tensor == tensor) return operand.range;
  }
  return kNone;
}

const char* OpName(ComputeCall::Op op) {
  switch (op) {
    case ComputeCall::Op::kForward:
      return "forward";
    case ComputeCall::Op::kDelta:
      return "delta";
    case ComputeCall::Op::kSinkGradient:
      return "sink_gradient";
    case ComputeCall::Op::kBackward:
      return "backward";
    case ComputeCall::Op::kBiasGradient:
      return "bias_gradient";
    case ComputeCall::Op::kProbabilities:
      return "probabilities";
    case ComputeCall::Op::kZero:
      return "zero";
    case ComputeCall::Op::kAdd:
      return "add";
    case ComputeCall::Op::kConvert:
      return "convert";
    case ComputeCall::Op::kMerge:
      return "merge";
    case ComputeCall::Op::kCopy:
      return "copy";
    case ComputeCall::Op::kGather:
      return "gather";
    case ComputeCall::Op::kScatterAdd:
      return "scatter_add";
    case ComputeCall::Op::kScatterMerge:
      return "scatter_merge";
  }
  assert(false && "unknown Op");
  return "";
}

int64_t Program::BufferBytes() const {
  int64_t bytes = 0;
  for (const BufferSpec& buffer : buffers) bytes += buffer.bytes;
  return bytes;
}

int64_t Program::SentBytes() const {
  int64_t bytes = 0;
  for (const Step& step : steps) {
    for (const Transfer& transfer : step.transfers) {
      if (transfer.kind == Transfer::Kind::kSend) bytes += transfer.range.bytes;
    }
  }
  return bytes;
}

int64_t Program::SentBytes(Lane lane) const {
  int64_t bytes = 0;
  for (const Step& step : steps) {
    for (const Transfer& transfer : step.transfers) {
      const bool counts = transfer.kind == Transfer::Kind::kSend && transfer.lane == lane;
      if (counts) bytes += transfer.range.bytes;
    }
  }
  return bytes;
}

int64_t Program::TileCount() const { return PerHead(steps, &ComputeCall::tiles); }

int64_t Program::PairCount() const { return PerHead(steps, &ComputeCall::pairs); }

void AssignLanes(const std::vector<int>& host_of_rank, Program& program) {
  for (Step& step : program.steps) {
    for (Transfer& transfer : step.transfers) {
      transfer.lane = LaneBetween(host_of_rank, program.rank, transfer.peer);
      if (transfer.lane == Lane::kInside) transfer.steps = 1;
    }
  }
}

}  // namespace ringattn
