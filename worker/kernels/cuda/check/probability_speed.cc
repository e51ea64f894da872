#include "worker/kernels/cuda/check/probability_speed.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "worker/kernels/cuda/check/guarded_buffer.h"
#include "worker/kernels/cuda/check/launch_and_wait.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda::check {
namespace {

constexpr int64_t kHeads = 32, kKvHeads = 8, kDim = 128;

// Numbers around one, of either sign: a GPU draws less power, and runs faster, on zeros.
std::vector<uint16_t> Numbers(int64_t count) {
  std::vector<uint16_t> bits(count);
  uint32_t state = 1;
  for (uint16_t& each : bits) {
    state = state * 1664525u + 1013904223u;
    each = static_cast<uint16_t>(0x3F00 | (state >> 25) | (state >> 8 & 1) << 15);  // bf16
  }
  return bits;
}

void Print(const DeviceInfo& device, int64_t queries, int64_t keys, int64_t rows) {
  AttentionProblem problem;
  problem.dtype = DType::kBFloat16;
  problem.num_heads = kHeads;
  problem.num_kv_heads = kKvHeads;
  problem.head_dim = problem.head_dim_v = kDim;
  problem.softmax_scale = 1.0f / std::sqrt(static_cast<float>(kDim));
  problem.bands = {Band{.upper = keys - queries}};
  Buffer q(queries * kHeads * kDim * 2), out(queries * kHeads * kDim * 2);
  Buffer k(keys * kKvHeads * kDim * 2), v(keys * kKvHeads * kDim * 2);
  Buffer lse(queries * kHeads * 4), target(rows * kHeads * keys * 4);
  q.Upload(Numbers(queries * kHeads * kDim));
  k.Upload(Numbers(keys * kKvHeads * kDim));
  v.Upload(Numbers(keys * kKvHeads * kDim));
  ForwardCall forward;
  forward.problem = &problem;
  forward.q_rows = queries;
  forward.q_pieces = {Piece{.length = queries}};
  forward.q = q.get();
  forward.blocks = {KvBlock{keys, {Piece{.length = keys}}, k.get(), v.get()}};
  forward.lse = lse.get<float>();
  forward.out = out.get();
  forward.initial = forward.final = true;
  ProbabilitiesCall call;
  call.problem = &problem;
  call.q_rows = queries;
  call.q_pieces = forward.q_pieces;
  call.q = q.get();
  call.blocks = forward.blocks;
  call.columns = keys;
  call.target = target.get<float>();
  call.lse = lse.get<float>();
  call.initial = call.final = true;
  for (int64_t i = 0; i < rows; ++i) call.rows.push_back({0, queries * (i + 1) / rows - 1});
  const double beside = BestSeconds(PrepareForward(forward, device), 3);
  const double own = BestSeconds(PrepareProbabilities(call, device), 3);
  std::printf("probabilities of %3ld rows, %ld queries, %ld keys: %.3f ms, forward %.3f ms: %.3f\n",
              rows, queries, keys, own * 1e3, beside * 1e3, own / beside);
}

}  // namespace

void PrintProbabilitySpeed(const DeviceInfo& device) {
  Print(device, 65536, 65536, 64);
  Print(device, 65536, 65536, 1);
  Print(device, 1, 1 << 20, 1);
}

}  // namespace ringattn::worker::cuda::check
