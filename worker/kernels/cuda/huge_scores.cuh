// Scores that fp32 holds in steps of more than one: the part of cuda_kernels_test that checks what
// docs/semantics.md promises of them. Rows have one largest key that no other comes near, so that
// out is its value, lse its score, and dv the sum of the dout of the rows that chose it.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_HUGE_SCORES_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_HUGE_SCORES_CUH_

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "common/attention/dtype.h"
#include "worker/kernels/cuda/cuda_kernels.h"
#include "worker/kernels/cuda/guarded_buffer.cuh"
#include "worker/kernels/cuda/launch_and_wait.cuh"

namespace ringattn::worker::cuda {

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
    const int64_t element = ElementBytes(c_.dtype);
    AttentionProblem problem;
    problem.dtype = c_.dtype;
    problem.head_dim = problem.head_dim_v = d;
    problem.softmax_scale = kScale;
    problem.bands = {Band{}};
    Buffer q(q_.size()), k(k_.size()), v(v_.size()), dout(dout_.size());
    q.Upload(q_);
    k.Upload(k_);
    v.Upload(v_);
    dout.Upload(dout_);
    Buffer out(kRows * d * element), acc(kRows * d * 4), lse(kRows * 4), delta(kRows * 4);
    Buffer dq(kRows * d * 4), dk(kKeys * d * 4), dv(kKeys * d * 4);
    for (Buffer* buffer : {&dq, &dk, &dv}) {
      Check(StartZero({buffer->get(), (buffer == &dq ? kRows : kKeys) * d * 4}, nullptr));
    }
    const KernelTuning tuning{.family = c_.family};
    const Piece rows{0, kRows, 0, 0, 1};
    const auto half = [&](int step) {
      KvBlock block;
      block.rows = kKeys / 2;
      block.pieces = {Piece{0, kKeys / 2, 0, step * kKeys / 2, 1}};
      block.k = k.get<char>() + step * kKeys / 2 * d * element;
      block.v = v.get<char>() + step * kKeys / 2 * d * element;
      block.dk = dk.get<float>() + step * kKeys / 2 * d;
      block.dv = dv.get<float>() + step * kKeys / 2 * d;
      return block;
    };
    for (int step = 0; step < 2; ++step) {
      ForwardCall call;
      call.problem = &problem;
      call.q_rows = kRows;
      call.q_pieces = {rows};
      call.q = q.get();
      call.blocks = {half(step)};
      call.out_acc = acc.get<float>();
      call.lse = lse.get<float>();
      call.out = out.get();
      call.initial = step == 0;
      call.final = step == 1;
      LaunchAndWait(PrepareForward(call, device, tuning));
    }
    Check(StartDelta({&problem, kRows, out.get(), dout.get(), delta.get<float>()}, nullptr));
    for (int step = 0; step < 2; ++step) {
      BackwardCall call;
      call.problem = &problem;
      call.q_rows = kRows;
      call.q_pieces = {rows};
      call.q = q.get();
      call.dout = dout.get();
      call.lse = lse.get<float>();
      call.delta = delta.get<float>();
      call.dq_acc = dq.get<float>();
      call.blocks = {half(step)};
      LaunchAndWait(PrepareBackward(call, device, tuning));
    }
    std::vector<float> out_values(kRows * d);
    ConvertToFloat(c_.dtype, out.Download<char>().data(), out_values.data(), kRows * d);
    return Judge(out_values, lse.Download<float>(), dq.Download<float>(), dk.Download<float>(),
                 dv.Download<float>());
  }

 private:
  static constexpr int64_t kRows = 160;
  static constexpr int64_t kKeys = 32;  // at most head_dim
  static constexpr float kScale = 0.125f;

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

  bool Judge(const std::vector<float>& out, const std::vector<float>& lse,
             const std::vector<float>& dq, const std::vector<float>& dk,
             const std::vector<float>& dv) const {
    const int64_t d = c_.head_dim;
    int wrong[4] = {};  // out, lse, dv; NaN in dq or dk
    std::vector<double> exact(kKeys * d, 0.0);
    for (int64_t i = 0; i < kRows; ++i) {
      wrong[1] += !(std::fabs(lse[i] - Score()) <= 4e-6 * std::fabs(Score()));
      for (int64_t x = 0; x < d; ++x) {
        wrong[0] += !(std::fabs(out[i * d + x] - v_values_[ChosenBy(i) * d + x]) <= 1e-5);
        exact[ChosenBy(i) * d + x] += dout_values_[i * d + x];
      }
    }
    for (int64_t i = 0; i < kKeys * d; ++i) wrong[2] += !(std::fabs(dv[i] - exact[i]) <= 1e-3);
    for (const auto* gradient : {&dq, &dk}) {
      wrong[3] +=
          std::count_if(gradient->begin(), gradient->end(), [](float x) { return std::isnan(x); });
    }
    const bool passed = wrong[0] + wrong[1] + wrong[2] + wrong[3] == 0;
    if (!passed) {
      std::printf(
          "FAILED huge scores: %s d=%lld amplitude %g%s %s: wrong out %d, lse %d, dv %d, NaN %d\n",
          std::string(DTypeName(c_.dtype)).c_str(), static_cast<long long>(d), c_.amplitude,
          c_.negative ? " negative" : "", c_.family.c_str(), wrong[0], wrong[1], wrong[2],
          wrong[3]);
    }
    return passed;
  }

  const HugeCase c_;
  std::vector<char> q_, k_, v_, dout_;
  std::vector<float> v_values_, dout_values_;
};

// Scores of 1e4 to 1e36 (fp16: to what its elements reach), in every family and head-dim class.
inline int CheckHugeScores(const DeviceInfo& device) {
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

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_HUGE_SCORES_CUH_
