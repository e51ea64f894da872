#include "worker/kernels/cuda/check/huge_scores.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "common/attention/dtype.h"
#include "worker/kernels/cuda/check/guarded_buffer.h"
#include "worker/kernels/cuda/check/launch_and_wait.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda::check {
namespace {

// The kernels under test. The terms change nothing: the same segment for all, or a bias of zeros. A
// separate call computes the bias's gradient, or the backward stores it.
enum class Kind { kPlain, kCapped, kSegments, kBias, kStoredBias };

constexpr const char* kKindNames[] = {"plain", "capped", "segments", "bias", "stored bias"};

struct HugeCase {
  DType dtype = DType::kBFloat16;
  int64_t head_dim = 64;
  float amplitude = 1.0f;  // of the nonzero elements; their scores are its square times the scale
  bool negative = false;   // all scores are far below zero, the largest the least far
  std::string family;
  Kind kind = Kind::kPlain;
  bool steep = false;    // deltas of more than 2^31
  bool ordered = false;  // the backward is deterministic

  bool biased() const { return kind == Kind::kBias || kind == Kind::kStoredBias; }
  std::string ToString() const {
    char text[160];
    std::snprintf(text, sizeof(text), "%s d=%lld amplitude %g%s %s%s%s %s",
                  std::string(DTypeName(dtype)).c_str(), static_cast<long long>(head_dim),
                  amplitude, negative ? " negative" : "", kKindNames[static_cast<int>(kind)],
                  steep ? " steep" : "", ordered ? " ordered" : "", family.c_str());
    return text;
  }
};

// Row i sees keys whose scores are a, 2 a, ... (or their negatives) times the square of the
// amplitude. The largest is that of key (7 i) % keys. The keys come in two calls, as in a ring.
//
// dP of the largest score is exactly delta without dlse: all of v, dout and dlse are whole
// multiples of one power of two, small enough for every sum to be exact. dS is therefore p dlse
// there, and 0 elsewhere.
class HugeScores {
 public:
  explicit HugeScores(const HugeCase& c) : c_(c) {
    const int64_t d = c.head_dim;
    std::vector<float> q(kRows * d), k(kKeys * d);
    // One column per key: q's row weights the key that it chooses twice as much as the others.
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t j = 0; j < kKeys; ++j) {
        const float chosen = j == ChosenBy(i) ? 2.0f : 1.0f;
        q[i * d + j] = c.amplitude * (c.negative ? 3.0f - chosen : chosen);
      }
    }
    for (int64_t j = 0; j < kKeys; ++j) k[j * d + j] = c.negative ? -c.amplitude : c.amplitude;
    q_ = Converted(q);
    k_ = Converted(k);
    q_values_ = Rounded(q);
    k_values_ = Rounded(k);
    // Multiples of 1/8 (steep: of 2^10), exact in every dtype. Steep: positive, so that the least
    // delta is 64 times 2^26. With such a delta, dlse would be rounded away or, in fp16's dS,
    // infinite.
    const float factor = c.steep ? 0x1p13f : 1.0f, shift = c.steep ? 1.0f : -2.0f;
    std::vector<float> v(kKeys * d), dout(kRows * d);
    for (size_t i = 0; i < v.size(); ++i) {
      v[i] = factor * (static_cast<float>(i % 31) / 8.0f + shift);
    }
    for (size_t i = 0; i < dout.size(); ++i) {
      dout[i] = factor * (static_cast<float>(i % 17) / 4.0f + shift);
    }
    v_ = Converted(v);
    dout_ = Converted(dout);
    v_values_ = v;
    dout_values_ = dout;
    for (int64_t i = 0; i < kRows && !c.steep; ++i) dlse_[i] = static_cast<float>(i % 7) - 3.0f;
  }

  // Runs the case and prints its errors; returns whether there are none.
  bool Passes(const DeviceInfo& device) {
    const int64_t d = c_.head_dim;
    AttentionProblem problem;
    problem.dtype = c_.dtype;
    problem.head_dim = problem.head_dim_v = d;
    problem.softmax_scale = kScale;
    problem.bands = {Band{}};
    problem.softcap = c_.kind == Kind::kCapped ? kCap : 0.0f;
    problem.deterministic = c_.ordered;
    problem.terms.shifts = {0};
    problem.terms.columns = kKeys;
    problem.terms.segment_ids = c_.kind == Kind::kSegments;
    if (c_.biased()) problem.terms.bias = BiasForm{.gradient = true};
    Memory memory(d, ElementBytes(c_.dtype));
    memory.q.Upload(q_);
    memory.k.Upload(k_);
    memory.v.Upload(v_);
    memory.dout.Upload(dout_);
    memory.dlse.Upload(dlse_);
    memory.ids.Upload(std::vector<int32_t>(kRows, 3));
    memory.bias.Upload(std::vector<char>(kRows * kKeys * ElementBytes(c_.dtype), 0));
    for (Buffer* buffer : {&memory.dq, &memory.dk, &memory.dv}) {
      const int64_t rows = buffer == &memory.dq ? kRows : kKeys;
      Check(StartZero({buffer->get(), rows * d * 4}, nullptr));
    }
    Forward(problem, device, memory);
    Check(StartDelta({&problem, kRows, memory.out.get(), memory.dout.get(),
                      memory.delta.get<float>(), memory.dlse.get<float>(), memory.lse.get<float>()},
                     nullptr));
    Backward(problem, device, memory);
    return Judge(Floats(memory.out.Download<char>()), memory.lse.Download<float>(),
                 memory.dq.Download<float>(), memory.dk.Download<float>(),
                 memory.dv.Download<float>(), Floats(memory.dbias.Download<char>()));
  }

 private:
  static constexpr int64_t kRows = 160;
  static constexpr int64_t kKeys = 32;  // at most head_dim
  static constexpr float kScale = 0.125f;
  static constexpr float kCap = 300.0f;

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
          dlse(kRows * 4),
          ids(kRows * 4),
          bias(kRows * kKeys * element),
          dbias(kRows * kKeys * element),
          dq(kRows * d * 4),
          dk(kKeys * d * 4),
          dv(kKeys * d * 4) {}
    Buffer q, k, v, dout, out, acc, lse, delta, dlse, ids, bias, dbias, dq, dk, dv;
  };

  TermOperands Operands(const Memory& memory) const {
    TermOperands operands;
    if (c_.kind == Kind::kSegments) operands.q_segment_ids = memory.ids.get<int32_t>();
    if (c_.biased()) operands.bias = memory.bias.get();
    return operands;
  }

  // Returns the keys of one of the two calls.
  KvBlock Half(const Memory& memory, int step) const {
    const int64_t first = step * kKeys / 2 * c_.head_dim;
    KvBlock block;
    block.rows = kKeys / 2;
    block.pieces = {Piece{0, kKeys / 2, 0, step * kKeys / 2, 1}};
    block.k = memory.k.get<char>() + first * ElementBytes(c_.dtype);
    block.v = memory.v.get<char>() + first * ElementBytes(c_.dtype);
    block.dk = memory.dk.get<float>() + first;
    block.dv = memory.dv.get<float>() + first;
    block.segment_ids = Operands(memory).q_segment_ids;  // all ids are equal
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
      call.terms = Operands(memory);
      call.initial = step == 0;
      call.final = step == 1;
      LaunchAndWait(PrepareForward(call, device, {.family = c_.family}));
    }
  }

  template <typename Call>
  Call GradientCall(const AttentionProblem& problem, const Memory& memory, int step) const {
    Call call;
    call.problem = &problem;
    call.q_rows = kRows;
    call.q_pieces = {Piece{0, kRows, 0, 0, 1}};
    call.q = memory.q.get();
    call.dout = memory.dout.get();
    call.lse = memory.lse.get<float>();
    call.delta = memory.delta.get<float>();
    call.blocks = {Half(memory, step)};
    call.terms = Operands(memory);
    return call;
  }

  void Backward(const AttentionProblem& problem, const DeviceInfo& device, Memory& memory) const {
    const KernelTuning tuning{.family = c_.family};
    for (int step = 0; step < 2; ++step) {
      auto call = GradientCall<BackwardCall>(problem, memory, step);
      call.dq_acc = memory.dq.get<float>();
      auto gradient = GradientCall<BiasGradientCall>(problem, memory, step);
      gradient.dbias = memory.dbias.get();
      if (c_.kind == Kind::kStoredBias) {
        auto both = PrepareGradients(call, gradient, device, tuning);
        Check(both.status());
        if (both->backward != nullptr) {
          LaunchAndWait(Prepared(std::move(both->backward)));
          continue;
        }
      }
      LaunchAndWait(PrepareBackward(call, device, tuning));
      if (c_.biased()) LaunchAndWait(PrepareBiasGradient(gradient, device, tuning));
    }
  }

  static int64_t ChosenBy(int64_t row) { return row * 7 % kKeys; }

  std::vector<char> Converted(const std::vector<float>& values) const {
    std::vector<char> bits(values.size() * ElementBytes(c_.dtype));
    ConvertFromFloat(c_.dtype, values.data(), bits.data(), static_cast<int64_t>(values.size()));
    return bits;
  }

  std::vector<float> Floats(const std::vector<char>& bits) const {
    std::vector<float> values(bits.size() / ElementBytes(c_.dtype));
    ConvertToFloat(c_.dtype, bits.data(), values.data(), static_cast<int64_t>(values.size()));
    return values;
  }
  std::vector<float> Rounded(const std::vector<float>& values) const {
    return Floats(Converted(values));
  }

  double Score() const {
    const double rounded = Rounded({c_.amplitude})[0];
    const double score = (c_.negative ? -1.0 : 2.0) * kScale * rounded * rounded;
    return c_.kind == Kind::kCapped ? kCap * std::tanh(score / kCap) : score;
  }

  // Returns how far the backward's p of a chosen key, and values computed from it, may differ from
  // 1 after `roundings` roundings. A wide row's p is exactly 1: the value that is subtracted from
  // its score was rounded in the same way. For other rows, lse and score are fp32 products and sums
  // of the size S = |Score()|, each rounded by 2^-24 S. These are the base in log2 units, lse, its
  // conversion back to log2 units, and the two constants, log2(e) and ln 2. docs/numerics.md
  // permits 2^-21 of p (1 + S) in total. P is then rounded to the dtype, above 1 by half of 2^-7
  // (bf16) or 2^-10. With a softcap the error of the tanh counts as well; this test does not
  // measure it closely.
  double ProbabilityError(int roundings) const {
    const double size = std::fabs(Score());
    if (size >= 0x1p17) return 0;
    const double rounding = c_.dtype == DType::kBFloat16  ? 0x1p-8
                            : c_.dtype == DType::kFloat16 ? 0x1p-11
                                                          : 0;
    return 0x1p-21 * (1 + size) + roundings * rounding + (c_.kind == Kind::kCapped ? 0.01 : 0.0);
  }

  // The expected values of a gradient.
  class Sums {
   public:
    explicit Sums(int64_t count) : exact_(count, 0.0), magnitude_(count, 0.0) {}

    void Add(int64_t i, double x) {
      exact_[i] += x;
      magnitude_[i] += std::fabs(x);
    }
    // Returns how many elements are off by more than `error` of their magnitude plus their
    // rounding. Sets `worst` to the largest ratio of error to bound.
    int Wrong(const std::vector<float>& found, double error, double* worst) const {
      int wrong = 0;
      for (size_t i = 0; i < exact_.size(); ++i) {
        const double bound = 1e-6 + (error + 0x1p-20) * magnitude_[i];
        const double off = std::fabs(found[i] - exact_[i]) / bound;
        wrong += !(off <= 1.0);
        if (!std::isnan(*worst) && !(off <= *worst)) *worst = off;
      }
      return wrong;
    }

   private:
    std::vector<double> exact_, magnitude_;
  };

  bool Judge(const std::vector<float>& out, const std::vector<float>& lse,
             const std::vector<float>& dq, const std::vector<float>& dk,
             const std::vector<float>& dv, const std::vector<float>& dbias) const {
    const int64_t d = c_.head_dim;
    const double lse_error = (c_.kind == Kind::kCapped ? 1e-4 : 4e-6) * std::fabs(Score());
    int wrong_out = 0, wrong_lse = 0;
    Sums exact_dq(kRows * d), exact_dk(kKeys * d), exact_dv(kKeys * d), exact_dbias(kRows * kKeys);
    for (int64_t i = 0; i < kRows; ++i) {
      const int64_t chosen = ChosenBy(i);
      wrong_lse += !(std::fabs(lse[i] - Score()) <= lse_error);
      exact_dbias.Add(i * kKeys + chosen, dlse_[i]);
      for (int64_t x = 0; x < d; ++x) {
        wrong_out += !(std::fabs(out[i * d + x] - v_values_[chosen * d + x]) <= 1e-5);
        const double ds = static_cast<double>(kScale) * dlse_[i];
        exact_dq.Add(i * d + x, ds * k_values_[chosen * d + x]);
        exact_dk.Add(chosen * d + x, ds * q_values_[i * d + x]);
        exact_dv.Add(chosen * d + x, dout_values_[i * d + x]);
      }
    }
    double worst = 0;
    const int wrong_dq = exact_dq.Wrong(dq, ProbabilityError(2), &worst);
    const int wrong_dk = exact_dk.Wrong(dk, ProbabilityError(2), &worst);
    const int wrong_dv = exact_dv.Wrong(dv, ProbabilityError(1), &worst);
    const int wrong_dbias = c_.biased() ? exact_dbias.Wrong(dbias, ProbabilityError(2), &worst) : 0;
    if (wrong_out + wrong_lse + wrong_dq + wrong_dk + wrong_dv + wrong_dbias == 0) return true;
    std::printf(
        "FAILED huge scores: %s: wrong out %d, lse %d, dq %d, dk %d, dv %d, dbias %d (%.3g of the "
        "bound)\n",
        c_.ToString().c_str(), wrong_out, wrong_lse, wrong_dq, wrong_dk, wrong_dv, wrong_dbias,
        worst);
    return false;
  }

  const HugeCase c_;
  std::vector<char> q_, k_, v_, dout_;
  std::vector<float> q_values_, k_values_, v_values_, dout_values_;
  std::vector<float> dlse_ = std::vector<float>(kRows, 0.0f);
};

using Cases = std::vector<HugeCase>;

constexpr DType kHalves[] = {DType::kBFloat16, DType::kFloat16};

// fp16 elements end at 65504, and twice the amplitude is one of them.
bool Holds(DType dtype, float amplitude) { return dtype != DType::kFloat16 || amplitude <= 3.2e4f; }

void AddPlain(Cases& cases) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const int64_t head_dim : {32, 64, 96, 128, 192, 256}) {
      for (const float amplitude : {3e2f, 3e3f, 3e4f, 3e6f, 3e10f, 3e15f, 1e18f}) {
        if (!Holds(dtype, amplitude)) continue;
        for (const bool negative : {false, true}) {
          for (const char* family : {"", "sm80", "simt"}) {
            if (dtype == DType::kFloat32 && std::string(family) == "sm80") continue;
            cases.push_back({dtype, head_dim, amplitude, negative, family});
          }
        }
      }
    }
  }
}

// Adds cases with narrow and with capped scores too, because separate kernels compute them.
void AddSteepAndOrdered(Cases& cases) {
  for (const DType dtype : kHalves) {
    for (const int64_t head_dim : {64, 96, 128, 192, 256}) {
      for (const float amplitude : {3e2f, 3e4f}) {
        for (const char* family : {"", "sm80", "simt"}) {
          cases.push_back({dtype, head_dim, amplitude, false, family, Kind::kPlain, true});
        }
        for (const bool steep : {false, true}) {
          cases.push_back({dtype, head_dim, amplitude, false, "", Kind::kPlain, steep, true});
        }
      }
      for (const bool ordered : {false, true}) {
        cases.push_back({dtype, head_dim, 30.0f, false, "", Kind::kCapped, true, ordered});
      }
    }
  }
}

void AddTerms(Cases& cases) {
  for (const DType dtype : kHalves) {
    for (const int64_t head_dim : {64, 96, 128}) {
      for (const Kind kind : {Kind::kSegments, Kind::kBias, Kind::kStoredBias}) {
        for (const float amplitude : {3e2f, 3e3f, 3e4f, 1e18f}) {
          if (!Holds(dtype, amplitude)) continue;
          for (const bool steep : {false, true}) {
            for (const bool negative : {false, true}) {
              cases.push_back({dtype, head_dim, amplitude, negative, "", kind, steep});
            }
            cases.push_back({dtype, head_dim, amplitude, false, "", kind, steep, true});
          }
          cases.push_back({dtype, head_dim, amplitude, false, "simt", kind});
        }
      }
    }
  }
}

}  // namespace

int CheckHugeScores(const DeviceInfo& device) {
  Cases cases;
  AddPlain(cases);
  AddSteepAndOrdered(cases);
  AddTerms(cases);
  int failed = 0;
  for (const HugeCase& c : cases) failed += !HugeScores(c).Passes(device);
  std::printf("huge scores: %d cases, %d failed\n", static_cast<int>(cases.size()), failed);
  return failed;
}

}  // namespace ringattn::worker::cuda::check
