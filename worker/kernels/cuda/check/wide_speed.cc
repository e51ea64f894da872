#include "worker/kernels/cuda/check/wide_speed.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/attention/dtype.h"
#include "worker/kernels/cuda/check/guarded_buffer.h"
#include "worker/kernels/cuda/check/launch_and_wait.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda::check {
namespace {

constexpr int64_t kMostElements = int64_t{16384} * 8 * 576;

// A forward or backward of `rows` queries and keys.
struct Shape {
  int64_t rows, heads, kv_heads, head_dim, head_dim_v;
  bool causal;
};

// Operands that are large enough for every shape.
class Operands {
 public:
  Operands() {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> some(1 << 20), values(kMostElements);
    for (float& x : some) x = normal(random);
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = some[(i * 7919 + i / some.size()) % some.size()];
    std::vector<char> bits(kMostElements * 2);
    ConvertFromFloat(DType::kBFloat16, values.data(), bits.data(), kMostElements);
    for (Buffer* buffer : {&q_, &k_, &v_, &dout_}) buffer->Upload(bits);
    Check(cudaMemset(delta_.get(), 0, kMostLseBytes), "delta");
  }

  // Returns TFLOP/s of the fastest of `launches` forwards. `family`: forced unless empty.
  double ForwardRate(const DeviceInfo& device, const Shape& shape, int launches,
                     const std::string& family = "") {
    const AttentionProblem problem = ProblemOf(shape);
    ForwardCall call = CallOf<ForwardCall>(shape, problem);
    call.lse = lse_.get<float>();
    call.out = out_.get();
    call.initial = call.final = true;
    KernelTuning tuning;
    tuning.family = family;
    const double seconds = BestSeconds(PrepareForward(call, device, tuning), launches);
    return 2.0 * Products(shape) * (shape.head_dim + shape.head_dim_v) / seconds / 1e12;
  }

  // The same for backwards, after a forward that computes their lse. S, dQ and dK have head_dim
  // columns, dP and dV head_dim_v.
  double BackwardRate(const DeviceInfo& device, const Shape& shape, int launches,
                      const std::string& family = "") {
    ForwardRate(device, shape, 1);
    const AttentionProblem problem = ProblemOf(shape);
    BackwardCall call = CallOf<BackwardCall>(shape, problem);
    call.dout = dout_.get();
    call.lse = lse_.get<float>();
    call.delta = delta_.get<float>();
    call.dq_acc = dq_.get<float>();
    KvBlock& block = call.blocks[0];
    block.dk = dk_.get<float>();
    block.dv = dv_.get<float>();
    block.dk_out = block.dk;
    block.dv_out = block.dv;
    KernelTuning tuning;
    tuning.family = family;
    const double seconds = BestSeconds(PrepareBackward(call, device, tuning), launches);
    return 2.0 * Products(shape) * (3 * shape.head_dim + 2 * shape.head_dim_v) / seconds / 1e12;
  }

 private:
  static constexpr int64_t kMostLseBytes = int64_t{16384} * 32 * 4;

  static AttentionProblem ProblemOf(const Shape& shape) {
    AttentionProblem problem;
    problem.dtype = DType::kBFloat16;
    problem.num_heads = shape.heads;
    problem.num_kv_heads = shape.kv_heads;
    problem.head_dim = shape.head_dim;
    problem.head_dim_v = shape.head_dim_v;
    problem.softmax_scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    problem.bands = {shape.causal ? Band{.upper = 0} : Band{}};
    return problem;
  }
  template <typename Call>
  Call CallOf(const Shape& shape, const AttentionProblem& problem) {
    Call call;
    call.problem = &problem;
    call.q_rows = shape.rows;
    call.q_pieces = {Piece{.length = shape.rows}};
    call.q = q_.get();
    call.blocks = {KvBlock{shape.rows, {Piece{.length = shape.rows}}, k_.get(), v_.get()}};
    return call;
  }
  // Visible pairs of all heads.
  static double Products(const Shape& shape) {
    const double pairs = static_cast<double>(shape.rows) * shape.rows * (shape.causal ? 0.5 : 1.0);
    return pairs * shape.heads;
  }

  Buffer q_{kMostElements * 2}, k_{kMostElements * 2}, v_{kMostElements * 2};
  Buffer out_{kMostElements * 2}, dout_{kMostElements * 2};
  Buffer lse_{kMostLseBytes}, delta_{kMostLseBytes};
  Buffer dq_{kMostElements * 4}, dk_{kMostElements * 4}, dv_{kMostElements * 4};
};

const char* MaskName(bool causal) { return causal ? "causal" : "full"; }

}  // namespace

void PrintWideSpeed(const DeviceInfo& device) {
  Operands operands;
  for (const auto& [rows, heads] :
       {std::pair<int64_t, int64_t>{2048, 32}, {4096, 16}, {16384, 8}}) {
    for (const bool causal : {false, true}) {
      const Shape wide{rows, heads, heads / 4, 512, 512, causal};
      const Shape latent{rows, heads, 1, 576, 512, causal};
      const Shape narrow{rows, heads * 2, heads / 2, 256, 256, causal};
      double rates[3] = {}, backward_rates[2] = {};
      for (int round = 0; round < 3; ++round) {
        rates[0] = std::max(rates[0], operands.ForwardRate(device, narrow, 4));
        rates[1] = std::max(rates[1], operands.ForwardRate(device, wide, 4));
        rates[2] = std::max(rates[2], operands.ForwardRate(device, latent, 4));
        backward_rates[0] = std::max(backward_rates[0], operands.BackwardRate(device, narrow, 4));
        backward_rates[1] = std::max(backward_rates[1], operands.BackwardRate(device, wide, 4));
      }
      std::printf("%5ld tokens %s: d256 %.0f TFLOP/s, d512 %.0f (%.2f), d576/512 %.0f (%.2f)\n",
                  static_cast<long>(rows), MaskName(causal), rates[0], rates[1],
                  rates[1] / rates[0], rates[2], rates[2] / rates[0]);
      std::printf("%5ld tokens %s, backward: d256 %.0f TFLOP/s, d512 %.0f (%.2f)\n",
                  static_cast<long>(rows), MaskName(causal), backward_rates[0], backward_rates[1],
                  backward_rates[1] / backward_rates[0]);
    }
  }
  const Shape portable{4096, 4, 1, 512, 512, false};
  std::printf("portable kernels, 4096 tokens full, d512: %.1f TFLOP/s, backward %.1f\n",
              operands.ForwardRate(device, portable, 2, "simt"),
              operands.BackwardRate(device, portable, 2, "simt"));
}

}  // namespace ringattn::worker::cuda::check
