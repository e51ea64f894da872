#include "common/schedule/shard_buffers.h"

#include <utility>

#include "absl/types/span.h"

namespace ringattn {
namespace {

// Adds the fp32 accumulator of an output: the output itself if it is fp32.
BufferId AddAccumulator(TensorId output, const char* name, bool accumulates, BufferId* buffer,
                        ProgramBuilder& builder) {
  *buffer = builder.AddOutput(output);
  const DType dtype = DTypeOf(builder.spec(), output);
  if (dtype == DType::kFloat32) return *buffer;
  if (!accumulates) return kNoBuffer;
  const int64_t elements = builder.ShardBytes(output) / ElementBytes(dtype);
  return builder.AddBuffer(name, elements * ElementBytes(DType::kFloat32));
}

// Adds the buffers of tensors that only some requests have.
void AddOptionBuffers(Direction direction, ProgramBuilder& builder, ShardBuffers& shard) {
  const AttentionSpec& spec = builder.spec();
  for (TensorId id : ShardInputsOf(spec, direction, /*recompute_forward=*/false)) {
    if (InfoOf(id).is_present != nullptr) builder.AddInput(id);
  }
  shard.kv_segment_ids = builder.InputOf(TensorId::kKvSegmentIds);
  if (direction == Direction::kForward) return;
  if (InfoOf(TensorId::kDbias).is_present(spec)) {
    shard.dbias = builder.AddOutput(TensorId::kDbias);
  }
  if (!spec.options.sinks) return;
  if (builder.rank() == 0) {
    shard.dsinks = builder.AddOutput(TensorId::kDsinks);
  } else if (builder.q_rows() > 0) {
    shard.dsinks = builder.AddBuffer("dsinks_part", BytesOf(spec, TensorId::kDsinks));
  }
}

// The tensors that each kind of call uses.
constexpr TensorId kFinalOptions[] = {TensorId::kSinks};  // the final forward call
// Forward, backward and bias gradient: every call with keys. (Tensors of the keys: KvOperand.)
constexpr TensorId kTermOptions[] = {TensorId::kBias, TensorId::kMask, TensorId::kQSegmentIds};
constexpr TensorId kDeltaOptions[] = {TensorId::kDlse};
constexpr TensorId kSinkGradientOptions[] = {TensorId::kSinks};

void AddOptions(absl::Span<const TensorId> tensors, const ProgramBuilder& builder,
                QOperand& operand) {
  for (TensorId tensor : tensors) {
    const BufferId buffer = builder.InputOf(tensor);
    if (buffer != kNoBuffer) operand.options.push_back({tensor, builder.Whole(buffer)});
  }
}

}  // namespace

QOperand AllQueries(const ProgramBuilder& builder) {
  QOperand operand;
  operand.source_rank = builder.rank();
  operand.row_end = builder.q_rows();
  return operand;
}

absl::Span<const TensorId> TermOptions() { return kTermOptions; }

void AddTermOptions(const ProgramBuilder& builder, QOperand& operand) {
  AddOptions(kTermOptions, builder, operand);
}

void AddFinalOptions(const ProgramBuilder& builder, QOperand& operand) {
  AddOptions(kFinalOptions, builder, operand);
}

void AddOutAccumulator(ShardBuffers& shard, ProgramBuilder& builder) {
  const DType dtype = DTypeOf(builder.spec(), TensorId::kOut);
  const int64_t elements = builder.ShardBytes(TensorId::kOut) / ElementBytes(dtype);
  shard.out_acc = dtype == DType::kFloat32
                      ? shard.out
                      : builder.AddBuffer("out_acc", elements * ElementBytes(DType::kFloat32));
}

namespace {

// Adds the call for the chosen rows' probabilities over the keys of a forward call, after it.
void AddProbabilities(int64_t step, const ComputeCall& forward, const ShardBuffers& shard,
                      ProgramBuilder& builder) {
  const ByteRange target = builder.WholeIfAny(shard.probabilities);
  if (target.bytes == 0) return;
  ComputeCall call;
  call.op = ComputeCall::Op::kProbabilities;
  call.q = AllQueries(builder);
  call.q.q = builder.Whole(shard.q);
  if (forward.final) call.q.lse = builder.Whole(shard.lse);
  AddOptions(kTermOptions, builder, call.q);
  call.kv = forward.kv;
  for (KvOperand& keys : call.kv) keys.v = kNone;
  call.initial = forward.initial;
  call.final = forward.final;
  call.target = target;
  builder.AddCall(step, std::move(call));
}

}  // namespace

ShardBuffers AddShardBuffers(Direction direction, bool recompute_forward, ProgramBuilder& builder,
                             bool accumulates) {
  ShardBuffers shard;
  shard.q = builder.AddInput(TensorId::kQ);
  shard.k = builder.AddInput(TensorId::kK);
  shard.v = builder.AddInput(TensorId::kV);
  if (direction == Direction::kForward) {
    shard.out = builder.AddOutput(TensorId::kOut);
    shard.lse = builder.AddOutput(TensorId::kLse);
    if (InfoOf(TensorId::kProbabilities).is_present(builder.spec())) {
      shard.probabilities = builder.AddOutput(TensorId::kProbabilities);
    }
    AddOptionBuffers(direction, builder, shard);
    return shard;
  }
  const auto add = [&](TensorId id) {
    return recompute_forward ? builder.AddTensor(id) : builder.AddInput(id);
  };
  shard.out = add(TensorId::kOut);
  shard.lse = add(TensorId::kLse);
  shard.dout = builder.AddInput(TensorId::kDout);
  shard.delta = builder.AddBuffer("delta", builder.ShardBytes(TensorId::kLse));
  shard.dq_acc = AddAccumulator(TensorId::kDq, "dq_acc", accumulates, &shard.dq, builder);
  shard.dk_acc = AddAccumulator(TensorId::kDk, "dk_acc", accumulates, &shard.dk, builder);
  shard.dv_acc = AddAccumulator(TensorId::kDv, "dv_acc", accumulates, &shard.dv, builder);
  AddOptionBuffers(direction, builder, shard);
  return shard;
}

void AddForwardCalls(CallsAt calls, int64_t first_step, ShardBuffers& shard,
                     ProgramBuilder& builder, const OtherCalls& others) {
  if (builder.q_rows() == 0) return;
  const bool has_others = others.before || others.after;
  if (calls.empty() && has_others) return;
  if (calls.empty()) calls.emplace_back(first_step, ComputeCall{});
  calls.front().second.initial = !others.before;
  calls.back().second.final = !others.after;
  if (calls.size() > 1 || has_others) AddOutAccumulator(shard, builder);
  for (auto& [step, call] : calls) {
    call.q = AllQueries(builder);
    call.q.q = builder.Whole(shard.q);
    call.q.lse = builder.Whole(shard.lse);
    if (!(call.initial && call.final)) call.q.out_acc = builder.Whole(shard.out_acc);
    AddTermOptions(builder, call.q);
    if (call.final) {
      call.q.out = builder.Whole(shard.out);
      AddFinalOptions(builder, call.q);
    }
    const ComputeCall forward = call;
    builder.AddCall(step, std::move(call));
    AddProbabilities(step, forward, shard, builder);
  }
}

void StartBackward(int64_t step, const ShardBuffers& shard, ProgramBuilder& builder) {
  if (builder.q_rows() == 0) {
    builder.AddZero(step, builder.WholeIfAny(shard.dbias));  // dbias may be sharded by keys
    builder.AddZero(step, builder.WholeIfAny(shard.dsinks));
    return;
  }
  ComputeCall delta;
  delta.op = ComputeCall::Op::kDelta;
  delta.q = AllQueries(builder);
  delta.q.out = builder.Whole(shard.out);
  delta.q.dout = builder.Whole(shard.dout);
  delta.q.delta = builder.Whole(shard.delta);
  delta.q.dq_acc = builder.WholeIfAny(shard.dq_acc);
  AddOptions(kDeltaOptions, builder, delta.q);
  if (!delta.q.options.empty()) delta.q.lse = builder.Whole(shard.lse);
  builder.AddCall(step, std::move(delta));
  builder.AddZero(step, builder.WholeIfAny(shard.dbias));
  if (shard.dsinks == kNoBuffer) return;
  ComputeCall sinks;
  sinks.op = ComputeCall::Op::kSinkGradient;
  sinks.q = AllQueries(builder);
  AddOptions(kSinkGradientOptions, builder, sinks.q);
  sinks.q.lse = builder.Whole(shard.lse);
  sinks.q.delta = builder.Whole(shard.delta);
  sinks.target = builder.Whole(shard.dsinks);
  builder.AddCall(step, std::move(sinks));
}

void AddUpSinkGradients(int64_t step, const std::vector<int64_t>& q_rows, const ShardBuffers& shard,
                        ProgramBuilder& builder) {
  if (!builder.spec().options.sinks) return;
  std::vector<int> senders;
  for (size_t rank = 1; rank < q_rows.size(); ++rank) {
    if (q_rows[rank] > 0) senders.push_back(static_cast<int>(rank));
  }
  if (senders.empty()) return;
  builder.Use(step);
  const int64_t bytes = BytesOf(builder.spec(), TensorId::kDsinks);
  if (builder.rank() != 0) {
    if (builder.q_rows() == 0) return;
    return builder.AddTransfer(step, {Transfer::Kind::kSend, 0, builder.Whole(shard.dsinks)});
  }
  const BufferId parts =
      builder.AddBuffer("dsinks_parts", static_cast<int64_t>(senders.size()) * bytes);
  for (size_t i = 0; i < senders.size(); ++i) {
    const ByteRange part{parts, static_cast<int64_t>(i) * bytes, bytes};
    builder.AddTransfer(step, {Transfer::Kind::kReceive, senders[i], part});
    ComputeCall add;
    add.op = ComputeCall::Op::kAdd;
    add.source = part;
    add.target = builder.Whole(shard.dsinks);
    builder.AddLateCall(step, std::move(add));
  }
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
  AddOptions(kTermOptions, builder, call.q);
  return call;
}

void AddBackwardCall(int64_t step, ComputeCall call, const ShardBuffers& shard,
                     ProgramBuilder& builder) {
  if (shard.dbias == kNoBuffer) return builder.AddCall(step, std::move(call));
  ComputeCall bias = call;
  builder.AddCall(step, std::move(call));
  bias.op = ComputeCall::Op::kBiasGradient;
  bias.q.dq_acc = kNone;
  for (KvOperand& keys : bias.kv) keys.dk = keys.dv = kNone;
  bias.target = builder.Whole(shard.dbias);
  builder.AddCall(step, std::move(bias));
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
