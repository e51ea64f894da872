#include "worker/kernels/cuda/check/huge_scores.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "common/attention/dtype.h"
#include "worker/kernels/cuda/check/guarded_buffer.h"
#include "worker/kernels/cuda/check/launch_and_wait.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda::check {
namespace {

struct HugeCase {
  DType dtype = DType::kBFloat16;
  int64_t head_dim = 64;
  float amplitude = 1.0f;  // of the elements that meet; their scores are its square times scale
  bool negative = false;   // all keys far below zero, the largest among them the least far
  std::string family;
};

// Row i sees keys whose scores are a, 2 a, ... (or their negatives) times the square of the
// amplitude; the largest is key (7 i) % keys. Keys come in two calls, as around a ring.
class HugeScores {
 public:
  explicit HugeScores(const HugeCase& c) : c_(c) {
    const int64_t d = c.head_dim;
    std::vector<float> q(kRows * d), k(kKeys * d);
    // One column for every key: q's row asks the key that it chooses twice as much as the others.
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t j = 0; j < kKeys; ++j) {
        const float chosen = j == ChosenBy(i) ? 2.0f : 1.0f;
        q[i * d + j] = c.amplitude * (c.negative ? 3.0f - chosen : chosen);
      }
    }
    for (int64_t j = 0; j < kKeys; ++j) k[j * d + j] = c.negative ? -c.amplitude : c.amplitude;
    q_ = Converted(q);
    k_ = Converted(k);
    std::vector<float> v(kKeys * d), dout(kRows * d);
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i % 31) / 8.0f - 2.0f;
    for (size_t i = 0; i < dout.size(); ++i) dout[i] = static_cast<float>(i % 17) / 4.0f - 2.0f;
    v_ = Converted(v);
    dout_ = Converted(dout);
    v_values_ = v;  // small multiples of 1/8: exact in every dtype
    dout_values_ = dout;
  }

  // Prints what is wrong.
  bool Passes(const DeviceInfo& device) {
    const int64_t d = c_.head_dim;
    AttentionProblem problem;
    problem.dtype = c_.dtype;
    problem.head_dim = problem.head_dim_v = d;
    problem.softmax_scale = kScale;
    problem.bands = {Band{}};
    Memory memory(d, ElementBytes(c_.dtype));
    memory.q.Upload(q_);
    memory.k.Upload(k_);
    memory.v.Upload(v_);
    memory.dout.Upload(dout_);
    for (Buffer* buffer : {&memory.dq, &memory.dk, &memory.dv}) {
      const int64_t rows = buffer == &memory.dq ? kRows : kKeys;
      Check(StartZero({buffer->get(), rows * d * 4}, nullptr));
    }
    Forward(problem, device, memory);
    Check(StartDelta(
        {&problem, kRows, memory.out.get(), memory.dout.get(), memory.delta.get<float>()},
        nullptr));
    Backward(problem, device, memory);
    std::vector<float> out(kRows * d);
    ConvertToFloat(c_.dtype, memory.out.Download<char>().data(), out.data(), kRows * d);
    return Judge(out, memory.lse.Download<float>(), memory.dq.Download<float>(),
                 memory.dk.Download<float>(), memory.dv.Download<float>());
  }

 private:
  static constexpr int64_t kRows = 160;
  static constexpr int64_t kKeys = 32;  // at most head_dim
  static constexpr float kScale = 0.125f;

  struct Memory {
    Memory(int64_t d, int64_t element)
        : q(kRows * d * element),
          k(kKeys * d * element),
          v(kKeys * d * element),
          dout(kRows * d * element),
          out(kRows * d * element),
          acc(kRows * d * 4),
          lse(kRows * 4),
          delta(kRows * 4),
          dq(kRows * d * 4),
          dk(kKeys * d * 4),
          dv(kKeys * d * 4) {}
    Buffer q, k, v, dout, out, acc, lse, delta, dq, dk, dv;
  };

  // The keys of one of the two calls.
  KvBlock Half(const Memory& memory, int step) const {
    const int64_t first = step * kKeys / 2 * c_.head_dim;
    KvBlock block;
    block.rows = kKeys / 2;
    block.pieces = {Piece{0, kKeys / 2, 0, step * kKeys / 2, 1}};
    block.k = memory.k.get<char>() + first * ElementBytes(c_.dtype);
    block.v = memory.v.get<char>() + first * ElementBytes(c_.dtype);
    block.dk = memory.dk.get<float>() + first;
    block.dv = memory.dv.get<float>() + first;
    return block;
  }

  void Forward(const AttentionProblem& problem, const DeviceInfo& device, Memory& memory) const {
    for (int step = 0; step < 2; ++step) {
      ForwardCall call;
      call.problem = &problem;
      call.q_rows = kRows;
      call.q_pieces = {Piece{0, kRows, 0, 0, 1}};
      call.q = memory.q.get();
      call.blocks = {Half(memory, step)};
      call.out_acc = memory.acc.get<float>();
      call.lse = memory.lse.get<float>();
      call.out = memory.out.get();
      call.initial = step == 0;
      call.final = step == 1;
      LaunchAndWait(PrepareForward(call, device, {.family = c_.family}));
    }
  }

  void Backward(const AttentionProblem& problem, const DeviceInfo& device, Memory& memory) const {
    for (int step = 0; step < 2; ++step) {
      BackwardCall call;
      call.problem = &problem;
      call.q_rows = kRows;
      call.q_pieces = {Piece{0, kRows, 0, 0, 1}};
      call.q = memory.q.get();
      call.dout = memory.dout.get();
      call.lse = memory.lse.get<float>();
      call.delta = memory.delta.get<float>();
      call.dq_acc = memory.dq.get<float>();
      call.blocks = {Half(memory, step)};
      LaunchAndWait(PrepareBackward(call, device, {.family = c_.family}));
    }
  }

  static int64_t ChosenBy(int64_t row) { return row * 7 % kKeys; }

  std::vector<char> Converted(const std::vector<float>& values) const {
    std::vector<char> bits(values.size() * ElementBytes(c_.dtype));
    ConvertFromFloat(c_.dtype, values.data(), bits.data(), static_cast<int64_t>(values.size()));
    return bits;
  }

  double Score() const {
    const std::vector<float> amplitude{c_.amplitude};
    float rounded = 0;
    ConvertToFloat(c_.dtype, Converted(amplitude).data(), &rounded, 1);
    return (c_.negative ? -1.0 : 2.0) * kScale * rounded * rounded;
  }

  // By how much the backward's p of a chosen key may differ from 1. A wide row's is exactly 1: what
  // is subtracted from its score was rounded like it. Below, lse and score are products and sums of
  // fp32 of the size S = |Score()|, rounded by 2^-24 S each: the base in log2 units, lse, its way
  // back to log2 units, and the two constants, log2(e) and ln 2. docs/semantics.md grants 2^-21 of
  // p (1 + S) in all. P is then rounded to the dtype, above 1 by half of 2^-7 (bf16) or 2^-10.
  double ProbabilityError() const {
    const double size = std::fabs(Score());
    if (size >= 0x1p17) return 0;
    const double rounding = c_.dtype == DType::kBFloat16  ? 0x1p-8
                            : c_.dtype == DType::kFloat16 ? 0x1p-11
                                                          : 0;
    return 0x1p-21 * (1 + size) + rounding;
  }

  bool Judge(const std::vector<float>& out, const std::vector<float>& lse,
             const std::vector<float>& dq, const std::vector<float>& dk,
             const std::vector<float>& dv) const {
    const int64_t d = c_.head_dim;
    int wrong[4] = {};  // out, lse, dv; NaN in dq or dk
    double worst = 0;   // error of dv beside its bound
    std::vector<double> exact(kKeys * d, 0.0), magnitude(kKeys * d, 0.0);
    for (int64_t i = 0; i < kRows; ++i) {
      wrong[1] += !(std::fabs(lse[i] - Score()) <= 4e-6 * std::fabs(Score()));
      for (int64_t x = 0; x < d; ++x) {
        wrong[0] += !(std::fabs(out[i * d + x] - v_values_[ChosenBy(i) * d + x]) <= 1e-5);
        exact[ChosenBy(i) * d + x] += dout_values_[i * d + x];
        magnitude[ChosenBy(i) * d + x] += std::fabs(dout_values_[i * d + x]);
      }
    }
    for (int64_t i = 0; i < kKeys * d; ++i) {
      const double error = std::fabs(dv[i] - exact[i]);
      const double bound = 1e-6 + ProbabilityError() * magnitude[i];
      wrong[2] += !(error <= bound);
      if (!(error / bound <= worst)) worst = error / bound;
    }
    for (const auto* gradient : {&dq, &dk}) {
      wrong[3] +=
          std::count_if(gradient->begin(), gradient->end(), [](float x) { return std::isnan(x); });
    }
    const bool passed = wrong[0] + wrong[1] + wrong[2] + wrong[3] == 0;
    if (!passed) {
      std::printf(
          "FAILED huge scores: %s d=%lld amplitude %g%s %s: wrong out %d, lse %d, dv %d (%.3g of "
          "the bound), NaN %d\n",
          std::string(DTypeName(c_.dtype)).c_str(), static_cast<long long>(d), c_.amplitude,
          c_.negative ? " negative" : "", c_.family.c_str(), wrong[0], wrong[1], wrong[2], worst,
          wrong[3]);
    }
    return passed;
  }

  const HugeCase c_;
  std::vector<char> q_, k_, v_, dout_;
  std::vector<float> v_values_, dout_values_;
};

}  // namespace

int CheckHugeScores(const DeviceInfo& device) {
  int failed = 0, cases = 0;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const int64_t head_dim : {32, 64, 96, 128, 192, 256}) {
      for (const float amplitude : {3e2f, 3e3f, 3e4f, 3e6f, 3e10f, 3e15f, 1e18f}) {
        if (dtype == DType::kFloat16 && amplitude > 3.2e4f) continue;
        for (const bool negative : {false, true}) {
          for (const std::string family : {"", "sm80", "simt"}) {
            if (family == "sm80" && dtype == DType::kFloat32) continue;
            HugeScores huge({dtype, head_dim, amplitude, negative, family});
            failed += !huge.Passes(device);
            ++cases;
          }
        }
      }
    }
  }
  std::printf("huge scores: %d cases, %d failed\n", cases, failed);
  return failed;
}

}  // namespace ringattn::worker::cuda::check
