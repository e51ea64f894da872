#include "worker/executor/bind_call.h"

#include <utility>

namespace ringattn::worker {
namespace {

class Binder {
 public:
  Binder(const BindContext& context, const Operation& operation)
      : context_(context), operation_(operation) {}

  BoundCall Bind(const ComputeCall& call) {
    switch (call.op) {
      case ComputeCall::Op::kForward:
        return Forward(call);
      case ComputeCall::Op::kDelta:
        return Delta();
      case ComputeCall::Op::kBackward:
        return Backward(call);
      case ComputeCall::Op::kZero:
        return Finish("zero", ZeroCall{Write(call.target), call.target.bytes});
      case ComputeCall::Op::kAdd:
        return Finish("add",
                      AddCall{static_cast<float*>(ReadWrite(call.target)),
                              static_cast<const float*>(Read(call.source)), call.target.bytes / 4});
      case ComputeCall::Op::kConvert:
        return Finish("convert", ConvertCall{context_.problem.dtype, Write(call.target),
                                             static_cast<const float*>(Read(call.source)),
                                             call.source.bytes / 4});
    }
    return {};
  }

 private:
  BoundCall Forward(const ComputeCall& call) {
    const ProgramBuffers& roles = operation_.program().roles;
    ForwardCall bound;
    bound.problem = &context_.problem;
    bound.q_rows = context_.q_rows;
    bound.q_pieces = context_.q_pieces;
    bound.q = Read(roles.q);
    for (const KvOperand& operand : call.kv) bound.blocks.push_back(Block(operand));
    bound.initial = call.initial;
    bound.final = call.final;
    bound.lse = static_cast<float*>(call.initial ? Write(roles.lse) : ReadWrite(roles.lse));
    if (roles.out_acc != kNoBuffer) {
      bound.out_acc =
          static_cast<float*>(call.initial ? Write(roles.out_acc) : ReadWrite(roles.out_acc));
    }
    if (call.final) bound.out = Write(roles.out);
    return Finish("forward", std::move(bound));
  }

  BoundCall Delta() {
    const ProgramBuffers& roles = operation_.program().roles;
    DeltaCall bound;
    bound.problem = &context_.problem;
    bound.q_rows = context_.q_rows;
    bound.out = Read(roles.out);
    bound.dout = Read(roles.dout);
    bound.delta = static_cast<float*>(Write(roles.delta));
    return Finish("delta", std::move(bound));
  }

  BoundCall Backward(const ComputeCall& call) {
    const ProgramBuffers& roles = operation_.program().roles;
    BackwardCall bound;
    bound.problem = &context_.problem;
    bound.q_rows = context_.q_rows;
    bound.q_pieces = context_.q_pieces;
    bound.q = Read(roles.q);
    bound.dout = Read(roles.dout);
    bound.lse = static_cast<const float*>(Read(roles.lse));
    bound.delta = static_cast<const float*>(Read(roles.delta));
    bound.dq_acc = static_cast<float*>(ReadWrite(roles.dq_acc));
    for (const KvOperand& operand : call.kv) {
      KvBlock block = Block(operand);
      block.dk = static_cast<float*>(ReadWrite(operand.dk));
      block.dv = static_cast<float*>(ReadWrite(operand.dv));
      bound.blocks.push_back(std::move(block));
    }
    return Finish("backward", std::move(bound));
  }

  KvBlock Block(const KvOperand& operand) {
    KvBlock block;
    block.rows = operand.rows();
    block.pieces =
        SlicePieces(context_.kv_pieces[operand.source_rank], operand.row_begin, operand.row_end);
    block.k = Read(operand.k);
    block.v = Read(operand.v);
    return block;
  }

  void* Touch(const ByteRange& range, bool write) {
    accesses_.push_back({range, write});
    char* base = static_cast<char*>(operation_.Address(range.buffer));
    return base == nullptr ? nullptr : base + range.offset;
  }
  ByteRange Whole(BufferId id) const { return {id, 0, operation_.program().buffers[id].bytes}; }
  // A write waits for earlier readers and writers alike, so it covers a read.
  void* Read(const ByteRange& range) { return Touch(range, false); }
  void* Write(const ByteRange& range) { return Touch(range, true); }
  void* ReadWrite(const ByteRange& range) { return Touch(range, true); }
  void* Read(BufferId id) { return Touch(Whole(id), false); }
  void* Write(BufferId id) { return Touch(Whole(id), true); }
  void* ReadWrite(BufferId id) { return Touch(Whole(id), true); }

  BoundCall Finish(std::string name, KernelCall call) {
    return {std::move(call), std::move(accesses_), std::move(name)};
  }

  const BindContext& context_;
  const Operation& operation_;
  std::vector<Access> accesses_;
};

}  // namespace

BindContext MakeBindContext(const Operation& operation) {
  const AttentionSpec& spec = operation.spec();
  const AttentionShape& shape = spec.shape;
  BindContext context;
  context.problem.dtype = spec.dtype;
  context.problem.batch = shape.batch;
  context.problem.num_heads = shape.num_heads;
  context.problem.num_kv_heads = shape.num_kv_heads;
  context.problem.head_dim = shape.head_dim;
  context.problem.head_dim_v = shape.head_dim_v;
  context.problem.softmax_scale = static_cast<float>(spec.options.softmax_scale);
  context.problem.softcap = static_cast<float>(spec.options.softcap);
  context.problem.bands = DocumentBands(spec);
  const Shard& own = operation.plan().q[operation.program().rank];
  context.q_rows = RowsIn(own);
  context.q_pieces = CutIntoPieces(own, shape.cu_seqlens_q);
  for (const Shard& shard : operation.plan().kv) {
    context.kv_pieces.push_back(CutIntoPieces(shard, shape.cu_seqlens_k));
  }
  return context;
}

BoundCall BindCall(const BindContext& context, const Operation& operation,
                   const ComputeCall& call) {
  return Binder(context, operation).Bind(call);
}

}  // namespace ringattn::worker
