#include "worker/kernels/cuda/check/term_speed.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "common/attention/dtype.h"
#include "worker/kernels/cuda/check/guarded_buffer.h"
#include "worker/kernels/cuda/check/launch_and_wait.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda::check {
namespace {

constexpr int64_t kRows = 8192;
constexpr int64_t kHeads = 32;
constexpr int64_t kKvHeads = 8;
constexpr int64_t kDim = 128;
constexpr int kCalls = 3;

// The fastest of some launches.
double Seconds(const Prepared& prepared) {
  Check(prepared.status());
  PreparedKernel& kernel = **prepared;
  std::vector<char> host(kernel.table_bytes());
  Buffer tables(std::max<int64_t>(kernel.table_bytes(), 1));
  Buffer scratch(std::max<int64_t>(kernel.scratch_bytes(), 1));
  Check(kernel.PlaceScratch(scratch.get()));
  kernel.WriteTables(host.data());
  tables.Upload(host);
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "cudaEventCreate");
  Check(cudaEventCreate(&end), "cudaEventCreate");
  float best = INFINITY;
  for (int i = 0; i < kCalls; ++i) {
    Check(cudaEventRecord(begin, nullptr), "cudaEventRecord");
    Check(kernel.Launch({nullptr, tables.get(), scratch.get(), nullptr}));
    Check(cudaEventRecord(end, nullptr), "cudaEventRecord");
    Check(cudaDeviceSynchronize(), "kernel");
    float milliseconds = 0;
    Check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    best = std::min(best, milliseconds);
  }
  (void)cudaEventDestroy(begin);
  (void)cudaEventDestroy(end);
  return best / 1e3;
}

std::vector<char> Normal(int64_t count) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& x : values) x = normal(random);
  std::vector<char> bits(count * 2);
  ConvertFromFloat(DType::kBFloat16, values.data(), bits.data(), count);
  return bits;
}

class Calls {
 public:
  Calls(const DeviceInfo& device, const std::string& family) : device_(device) {
    tuning_.family = family;
    q_.Upload(Normal(kRows * kHeads * kDim));
    dout_.Upload(Normal(kRows * kHeads * kDim));
    k_.Upload(Normal(kRows * kKvHeads * kDim));
    v_.Upload(Normal(kRows * kKvHeads * kDim));
    bias_.Upload(std::vector<char>(kRows * kRows * 2, 0));
    mask_.Upload(std::vector<uint8_t>(kRows * kRows / 8, 0xb5));
    ids_.Upload(std::vector<int32_t>(kRows, 3));
    Check(StartZero({delta_.get(), kRows * kHeads * 4}, nullptr));
    Check(StartZero({dq_.get(), kRows * kHeads * kDim * 4}, nullptr));
    for (Buffer* sum : {&dk_, &dv_}) {
      Check(StartZero({sum->get(), kRows * kKvHeads * kDim * 4}, nullptr));
    }
  }

  void Print(const char* name, const std::function<void(AttentionProblem&)>& set) {
    AttentionProblem problem;
    problem.dtype = DType::kBFloat16;
    problem.num_heads = kHeads;
    problem.num_kv_heads = kKvHeads;
    problem.head_dim = problem.head_dim_v = kDim;
    problem.softmax_scale = 1.0f / std::sqrt(static_cast<float>(kDim));
    problem.bands = {Band{.upper = 0}};
    problem.terms.shifts = {0};
    problem.terms.columns = kRows;
    set(problem);
    const double product = 2.0 * kDim * kHeads * (0.5 * kRows * (kRows + 1)) / 1e12;
    const auto forward = Filled<ForwardCall>(problem);
    std::printf("%-28s forward %7.2f", name,
                2 * product / Seconds(PrepareForward(forward, device_, TuningOf(problem))));
    const auto backward = Filled<BackwardCall>(problem);
    std::printf("  backward %7.2f",
                5 * product / Seconds(PrepareBackward(backward, device_, TuningOf(problem))));
    if (problem.terms.bias.has_value()) {
      auto gradient = Filled<BiasGradientCall>(problem);
      gradient.dbias = dbias_.get();
      std::printf("  dbias %7.2f",
                  2 * product / Seconds(PrepareBiasGradient(gradient, device_, TuningOf(problem))));
    }
    std::printf(" TFLOP/s\n");
  }

 private:
  KernelTuning TuningOf(const AttentionProblem& problem) const {
    return problem.terms.any() ? tuning_ : KernelTuning{};
  }

  template <typename Call>
  Call Filled(const AttentionProblem& problem) {
    Call call;
    call.problem = &problem;
    call.q_rows = kRows;
    call.q_pieces = {Piece{.length = kRows}};
    call.q = q_.get();
    KvBlock block;
    block.rows = kRows;
    block.pieces = call.q_pieces;
    block.k = k_.get();
    block.v = v_.get();
    block.segment_ids = ids_.get<int32_t>();
    call.lse = lse_.get<float>();
    call.terms = {bias_.get(), mask_.get<uint8_t>(), ids_.get<int32_t>()};
    if constexpr (std::is_same_v<Call, ForwardCall>) {
      call.out = out_.get();
      call.initial = call.final = true;
    } else {
      call.dout = dout_.get();
      call.delta = delta_.get<float>();
    }
    if constexpr (std::is_same_v<Call, BackwardCall>) {
      block.dk = dk_.get<float>();
      block.dv = dv_.get<float>();
      call.dq_acc = dq_.get<float>();
    }
    call.blocks = {block};
    return call;
  }

  const DeviceInfo& device_;
  KernelTuning tuning_;
  Buffer q_{kRows * kHeads * kDim * 2}, dout_{kRows * kHeads * kDim * 2};
  Buffer out_{kRows * kHeads * kDim * 2}, lse_{kRows * kHeads * 4}, delta_{kRows * kHeads * 4};
  Buffer dq_{kRows * kHeads * kDim * 4}, dk_{kRows * kKvHeads * kDim * 4};
  Buffer dv_{kRows * kKvHeads * kDim * 4};
  Buffer k_{kRows * kKvHeads * kDim * 2}, v_{kRows * kKvHeads * kDim * 2};
  Buffer bias_{kRows * kRows * 2}, dbias_{kRows * kRows * 2}, mask_{kRows * kRows / 8};
  Buffer ids_{kRows * 4};
};

}  // namespace

void PrintTermSpeed(const DeviceInfo& device, const std::string& family) {
  Calls calls(device, family);
  const auto alibi = [](AttentionProblem& p) { p.terms.alibi_slopes.assign(kHeads, 0.01f); };
  const auto ids = [](AttentionProblem& p) { p.terms.segment_ids = true; };
  const auto mask = [](AttentionProblem& p) { p.terms.mask = MaskForm{.bits = true}; };
  const auto bias = [](AttentionProblem& p) { p.terms.bias = BiasForm{.gradient = true}; };
  const auto dropout = [](AttentionProblem& p) {
    p.terms.dropout = {.threshold = 6554, .seed = 1};
  };
  calls.Print("plain", [](AttentionProblem&) {});
  calls.Print("deterministic", [](AttentionProblem& p) { p.deterministic = true; });
  calls.Print("ALiBi", alibi);
  calls.Print("segment ids", ids);
  calls.Print("mask bits, 5 of 8", mask);
  calls.Print("bias for all heads", bias);
  calls.Print("dropout 0.1", dropout);
  calls.Print("all of them", [&](AttentionProblem& p) {
    for (const auto& set :
         {std::function<void(AttentionProblem&)>(alibi),
          std::function<void(AttentionProblem&)>(ids), std::function<void(AttentionProblem&)>(mask),
          std::function<void(AttentionProblem&)>(bias),
          std::function<void(AttentionProblem&)>(dropout)}) {
      set(p);
    }
  });
}

}  // namespace ringattn::worker::cuda::check
