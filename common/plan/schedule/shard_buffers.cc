#include "common/plan/schedule/shard_buffers.h"

namespace ringattn {
namespace {

// An fp32 accumulator of an output: the output itself where that is fp32.
BufferId AddAccumulator(TensorId output, const char* name, BufferId* buffer,
                        ProgramBuilder& builder) {
  *buffer = builder.AddOutput(output);
  const DType dtype = builder.spec().dtype;
  if (dtype == DType::kFloat32) return *buffer;
  const int64_t elements = builder.ShardBytes(output) / ElementBytes(dtype);
  return builder.AddBuffer(name, elements * ElementBytes(DType::kFloat32));
}

// All of the rank's queries, no bytes yet.
QOperand AllQueries(const ProgramBuilder& builder) {
  QOperand operand;
  operand.source_rank = builder.rank();
  operand.row_end = builder.q_rows();
  return operand;
}

}  // namespace

ShardBuffers AddShardBuffers(Direction direction, bool recompute_forward, ProgramBuilder& builder) {
  ShardBuffers shard;
  shard.q = builder.AddInput(TensorId::kQ);
  shard.k = builder.AddInput(TensorId::kK);
  shard.v = builder.AddInput(TensorId::kV);
  if (direction == Direction::kForward) {
    shard.out = builder.AddOutput(TensorId::kOut);
    shard.lse = builder.AddOutput(TensorId::kLse);
    return shard;
  }
  const auto add = [&](TensorId id) {
    return recompute_forward ? builder.AddTensor(id) : builder.AddInput(id);
  };
  shard.out = add(TensorId::kOut);
  shard.lse = add(TensorId::kLse);
  shard.dout = builder.AddInput(TensorId::kDout);
  shard.delta = builder.AddBuffer("delta", builder.ShardBytes(TensorId::kLse));
  shard.dq_acc = AddAccumulator(TensorId::kDq, "dq_acc", &shard.dq, builder);
  shard.dk_acc = AddAccumulator(TensorId::kDk, "dk_acc", &shard.dk, builder);
  shard.dv_acc = AddAccumulator(TensorId::kDv, "dv_acc", &shard.dv, builder);
  return shard;
}

void AddForwardCalls(CallsAt calls, int64_t first_step, ShardBuffers& shard,
                     ProgramBuilder& builder) {
  if (builder.q_rows() == 0) return;
  if (calls.empty()) calls.emplace_back(first_step, ComputeCall{});
  calls.front().second.initial = true;
  calls.back().second.final = true;
  if (calls.size() > 1) {
    const DType dtype = builder.spec().dtype;
    const int64_t elements = builder.ShardBytes(TensorId::kOut) / ElementBytes(dtype);
    shard.out_acc = dtype == DType::kFloat32
                        ? shard.out
                        : builder.AddBuffer("out_acc", elements * ElementBytes(DType::kFloat32));
  }
  for (auto& [step, call] : calls) {
    call.q = AllQueries(builder);
    call.q.q = builder.Whole(shard.q);
    call.q.lse = builder.Whole(shard.lse);
    if (!(call.initial && call.final)) call.q.out_acc = builder.Whole(shard.out_acc);
    if (call.final) call.q.out = builder.Whole(shard.out);
    builder.AddCall(step, std::move(call));
  }
}

void StartBackward(int64_t step, const ShardBuffers& shard, ProgramBuilder& builder) {
  if (builder.q_rows() == 0) return;
  ComputeCall delta;
  delta.op = ComputeCall::Op::kDelta;
  delta.q = AllQueries(builder);
  delta.q.out = builder.Whole(shard.out);
  delta.q.dout = builder.Whole(shard.dout);
  delta.q.delta = builder.Whole(shard.delta);
  builder.AddCall(step, std::move(delta));
  builder.AddZero(step, builder.Whole(shard.dq_acc));
}

ComputeCall BackwardCallOf(const ShardBuffers& shard, const ProgramBuilder& builder) {
  ComputeCall call;
  call.op = ComputeCall::Op::kBackward;
  call.q = AllQueries(builder);
  call.q.q = builder.Whole(shard.q);
  call.q.lse = builder.Whole(shard.lse);
  call.q.dout = builder.Whole(shard.dout);
  call.q.delta = builder.Whole(shard.delta);
  call.q.dq_acc = builder.Whole(shard.dq_acc);
  return call;
}

void AddOperand(ComputeCall& call, const KvOperand& operand, const WorkCount& work) {
  call.kv.push_back(operand);
  call.tiles += work.tiles;
  call.pairs += work.pairs;
}

void FinishBackward(int64_t step, const ShardBuffers& shard, ProgramBuilder& builder) {
  builder.AddConvertLate(step, shard.dq_acc, shard.dq);
  builder.AddConvertLate(step, shard.dk_acc, shard.dk);
  builder.AddConvertLate(step, shard.dv_acc, shard.dv);
}

}  // namespace ringattn
