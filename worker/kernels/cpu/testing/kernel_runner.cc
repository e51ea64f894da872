#include "worker/kernels/cpu/testing/kernel_runner.h"

#include <atomic>
#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace ringattn::worker {

void RunOrDie(CpuKernels& kernels, const KernelCall& call) {
  const std::atomic<bool> stop{false};
  ASSERT_TRUE(kernels.Run(call, stop, nullptr).ok());
}

static Floats ToFloats(const TestTensor& tensor) {
  Floats values(tensor.count);
  ConvertToFloat(tensor.dtype, tensor.bytes.data(), values.data(), tensor.count);
  return values;
}

ForwardResult RunForward(CpuKernels& kernels, TestData& data, const std::vector<int>& groups) {
  TestTensor out = MakeTensor(data.shape.dtype, data.dout.count);
  Floats out_acc(data.dout.count, std::numeric_limits<float>::quiet_NaN());
  ForwardResult result;
  result.lse.assign(data.shape.batch * data.shape.heads * data.shape.q_rows, NAN);
  const std::vector<KvBlock> blocks = data.Blocks();
  size_t next = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    ForwardCall call;
    call.problem = &data.problem;
    call.q_rows = data.shape.q_rows;
    call.q_pieces = data.shape.q_pieces;
    call.q = data.q.data();
    for (int n = 0; n < groups[g]; ++n) call.blocks.push_back(blocks[next++]);
    call.lse = result.lse.data();
    call.initial = g == 0;
    call.final = g + 1 == groups.size();
    if (groups.size() > 1) call.out_acc = out_acc.data();
    if (call.final) call.out = out.data();
    RunOrDie(kernels, call);
  }
  result.out = ToFloats(out);
  return result;
}

BackwardResult RunBackward(CpuKernels& kernels, TestData& data, const Reference& reference) {
  BackwardResult result;
  result.dq.assign(data.q.count, 0.0f);
  for (size_t i = 0; i < data.k.size(); ++i) {
    result.dk.emplace_back(data.k[i].count);
    result.dv.emplace_back(data.v[i].count);
  }
  const Floats lse(reference.lse.begin(), reference.lse.end());
  BackwardCall call;
  call.problem = &data.problem;
  call.q_rows = data.shape.q_rows;
  call.q_pieces = data.shape.q_pieces;
  call.q = data.q.data();
  call.dout = data.dout.data();
  call.lse = lse.data();
  call.delta = reference.delta.data();
  call.dq_acc = result.dq.data();
  call.blocks = data.Blocks(&result.dk, &result.dv);
  RunOrDie(kernels, call);
  return result;
}

void ExpectForward(const TestShape& shape, const ForwardResult& result,
                   const Reference& reference) {
  ExpectClose("out", shape.dtype, result.out, reference.out, shape.head_dim_v);
  ExpectLseClose(result.lse, reference);
}

void ExpectBackward(const TestShape& shape, const BackwardResult& result,
                    const Reference& reference) {
  ExpectClose("dq", shape.dtype, result.dq, reference.dq, shape.head_dim);
  for (size_t i = 0; i < result.dk.size(); ++i) {
    ExpectClose("dk", shape.dtype, result.dk[i], reference.dk[i], shape.head_dim);
    ExpectClose("dv", shape.dtype, result.dv[i], reference.dv[i], shape.head_dim_v);
  }
}

void Check(const TestShape& shape, float magnitude, int threads) {
  TestData data(shape, 1, magnitude);
  const Reference reference(data);
  CpuKernels kernels(threads);
  const std::vector<int> one_call = {static_cast<int>(shape.kv_rows.size())};
  ExpectForward(shape, RunForward(kernels, data, one_call), reference);
  if (shape.kv_rows.size() > 1) {
    const std::vector<int> calls(shape.kv_rows.size(), 1);
    ExpectForward(shape, RunForward(kernels, data, calls), reference);
  }
  ExpectBackward(shape, RunBackward(kernels, data, reference), reference);
}

TestShape PiecesShape() {
  TestShape shape;
  AttentionOptions options;
  options.causal = true;
  options.window_left = 150;
  shape.bands = {DocumentBand(options, 400, 400), DocumentBand(options, 50, 70)};
  shape.heads = 4;
  shape.kv_heads = 2;
  shape.q_rows = 200 + 5 + 25;
  shape.q_pieces = {{0, 200, 0, 1, 2}, {205, 25, 1, 0, 2}};
  shape.kv_rows = {200, 275};
  shape.kv_pieces.resize(2);
  for (int64_t p = 0; p < 20; ++p) {
    shape.kv_pieces[0].push_back({p * 10, 10, 0, p * 20, 1});
    shape.kv_pieces[1].push_back({p * 10, 10, 0, p * 20 + 10, 1});
  }
  // Positions go back: these pieces do not join into one run.
  shape.kv_pieces[1].push_back({205, 30, 1, 40, 1});
  shape.kv_pieces[1].push_back({235, 40, 1, 0, 1});
  return shape;
}

}  // namespace ringattn::worker
