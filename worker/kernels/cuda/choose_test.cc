#include "worker/kernels/cuda/choose.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda {
namespace {

using ::testing::HasSubstr;

constexpr DeviceInfo kH200{132, 9, 227 << 10};
constexpr DeviceInfo kA100{108, 8, 163 << 10};
constexpr DeviceInfo kSmall{40, 8, 48 << 10};  // no real device has so little shared memory

AttentionProblem ProblemOf(DType dtype, int64_t head_dim) {
  AttentionProblem problem;
  problem.dtype = dtype;
  problem.head_dim = problem.head_dim_v = head_dim;
  return problem;
}

// Builds for other architectures do not contain this family.
bool HaveHopper() { return CheckFamily("sm90").ok(); }

std::string Name(const absl::StatusOr<const KernelFamily*>& family) {
  return family.ok() ? std::string((*family)->name) : family.status().ToString();
}

TEST(ChooseTest, TensorCoresWhereTheyServe) {
  for (int64_t dim : {1, 32, 64, 96, 128, 192, 250, 256}) {
    for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      // Hopper computes head dims that are large enough for wgmma and whose rows the copy engine
      // can read.
      const bool hopper = HaveHopper() && dim > 32 && dim % 8 == 0;
      EXPECT_EQ(Name(ChooseForward(ProblemOf(dtype, dim), kH200, {})), hopper ? "sm90" : "sm80");
      EXPECT_NE(Name(ChooseForward(ProblemOf(dtype, dim), kA100, {})), "sm90");
      EXPECT_EQ(Name(ChooseBackward(ProblemOf(dtype, dim), kH200, {})), hopper ? "sm90" : "sm80");
      EXPECT_NE(Name(ChooseBackward(ProblemOf(dtype, dim), kA100, {})), "sm90");
      EXPECT_EQ(Name(ChooseForward(ProblemOf(dtype, 256), kSmall, {})), "simt");
    }
    EXPECT_EQ(Name(ChooseForward(ProblemOf(DType::kFloat32, dim), kH200, {})), "simt");
    EXPECT_EQ(Name(ChooseBackward(ProblemOf(DType::kFloat32, dim), kH200, {})), "simt");
  }
}

// Rows above 256 have portable kernels. In 16 bits, Hopper has a forward up to 576 and 512, and a
// backward up to 512 without a fixed order of sums.
TEST(ChooseTest, TheExactFamilyServesTheWidestRows) {
  for (const auto& [dim, dim_v, hopper] : {std::tuple{257, 64, false},
                                           {64, 264, true},
                                           {512, 512, true},
                                           {576, 512, true},
                                           {576, 520, false}}) {
    for (DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      AttentionProblem problem = ProblemOf(dtype, dim);
      problem.head_dim_v = dim_v;
      const bool served = hopper && dtype != DType::kFloat32 && HaveHopper();
      EXPECT_EQ(Name(ChooseForward(problem, kH200, {})), served ? "sm90" : "simt");
      EXPECT_EQ(Name(ChooseForward(problem, kA100, {})), "simt");
      EXPECT_EQ(Name(ChooseBackward(problem, kH200, {})), served && dim <= 512 ? "sm90" : "simt");
      EXPECT_EQ(Name(ChooseBackward(problem, kA100, {})), "simt");
      problem.deterministic = true;
      EXPECT_EQ(Name(ChooseBackward(problem, kH200, {})), "simt");
    }
  }
  for (const auto& refused : {ChooseForward(ProblemOf(DType::kFloat32, 577), kH200, {}),
                              ChooseBackward(ProblemOf(DType::kFloat32, 577), kH200, {})}) {
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("must be in 1..576"));
  }
}

TEST(ChooseTest, AForcedFamilyServesOrRefusesByName) {
  const AttentionProblem bf16 = ProblemOf(DType::kBFloat16, 64);
  const AttentionProblem fp32 = ProblemOf(DType::kFloat32, 64);
  EXPECT_EQ(Name(ChooseForward(bf16, kH200, {.family = "simt"})), "simt");
  EXPECT_EQ(Name(ChooseBackward(bf16, kH200, {.family = "sm80"})), "sm80");
  for (const auto& refused : {ChooseForward(fp32, kH200, {.family = "sm80"}),
                              ChooseBackward(fp32, kH200, {.family = "sm80"})}) {
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("no sm80 kernel computes"));
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("fp32 with head_dim 64"));
  }
  EXPECT_THAT(std::string(CheckFamily("sm1").message()), HasSubstr("\"sm1\" is none of"));
}

// Returns the numbers that README.md states where `pattern` has its groups.
std::vector<int64_t> ReadmeNumbers(const std::string& pattern) {
  std::ifstream file("README.md");
  std::string text(std::istreambuf_iterator<char>(file), {});
  std::replace(text.begin(), text.end(), '\n', ' ');
  std::smatch match;
  std::vector<int64_t> numbers;
  if (!std::regex_search(text, match, std::regex(pattern))) {
    ADD_FAILURE() << "README.md does not state: " << pattern;
    return numbers;
  }
  for (size_t i = 1; i < match.size(); ++i) numbers.push_back(std::stoll(match[i].str()));
  return numbers;
}

// The notes below README's table are true of every pair of head dims in bf16.
TEST(ChooseTest, ReadmeStatesWhatHopperServes) {
  const auto plain = ReadmeNumbers(
      "¹ In bf16 and fp16, if the head dims are multiples of (\\d+) and the larger one is above "
      "(\\d+)\\.");
  const auto terms =
      ReadmeNumbers("With score terms, also head dims up to (\\d+), no softcap in the backward");
  const auto wide = ReadmeNumbers(
      "² Above (\\d+), tensor cores serve Hopper's forward ¹ with Dv up to (\\d+), and its "
      "backward "
      "¹ with D and Dv up to (\\d+), unless `deterministic`\\.");
  ASSERT_EQ(plain.size() + terms.size() + wide.size(), 6);
  for (int64_t dim : {32, 36, 40, 128, 136, 256, 264, 300, 512, 520, 576}) {
    for (int64_t dim_v : {8, 64, 128, 136, 256, 260, 512, 520}) {
      const int64_t larger = std::max(dim, dim_v);
      const bool fits =
          HaveHopper() && dim % plain[0] == 0 && dim_v % plain[0] == 0 && larger > plain[1];
      const bool is_wide = larger > wide[0];
      AttentionProblem problem = ProblemOf(DType::kBFloat16, dim);
      problem.head_dim_v = dim_v;
      const auto forward = [&] { return Name(ChooseForward(problem, kH200, {})) == "sm90"; };
      const auto backward = [&] { return Name(ChooseBackward(problem, kH200, {})) == "sm90"; };
      EXPECT_EQ(forward(), fits && dim_v <= wide[1]) << dim << " " << dim_v;
      EXPECT_EQ(backward(), fits && larger <= wide[2]) << dim << " " << dim_v;
      problem.deterministic = true;
      EXPECT_EQ(backward(), fits && !is_wide) << dim << " " << dim_v;
      problem.deterministic = false;
      problem.terms.segment_ids = true;
      EXPECT_EQ(forward(), fits && larger <= terms[0]) << dim << " " << dim_v;
      EXPECT_EQ(backward(), fits && larger <= terms[0]) << dim << " " << dim_v;
      problem.softcap = 20;
      EXPECT_EQ(forward(), fits && larger <= terms[0]) << dim << " " << dim_v;
      EXPECT_FALSE(backward()) << dim << " " << dim_v;
    }
  }
}

// Hopper has a kernel for forwards in e4m3. Other devices reject such a forward, with the dtype in
// the message.
TEST(ChooseTest, E4m3HasOneFamily) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (int64_t dim : {8, 64, 100, 128, 192}) {
      AttentionProblem problem = ProblemOf(dtype, dim);
      problem.compute = ComputeDType::kFloat8E4M3;
      const bool served = HaveHopper() && dtype != DType::kFloat32 && dim <= 128 && dim % 8 == 0;
      const auto on_hopper = ChooseForward(problem, kH200, {});
      EXPECT_EQ(on_hopper.ok(), served) << dim;
      if (served) {
        EXPECT_EQ(Name(on_hopper), "sm90");
      }
      for (const auto& refused :
           {ChooseForward(problem, kA100, {}), ChooseForward(problem, kH200, {.family = "sm80"})}) {
        EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
        EXPECT_THAT(std::string(refused.status().message()), HasSubstr("products in e4m3"));
      }
    }
  }
}

// The exact family serves fixed orders and score terms in every dtype, except those for which
// Hopper has kernels.
TEST(ChooseTest, ScoreTermsAndFixedOrdersAreTheExactFamilysOrHoppers) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (int64_t dim : {7, 64, 128, 256}) {
      AttentionProblem problem = ProblemOf(dtype, dim);
      const std::string plain = Name(ChooseForward(problem, kH200, {}));
      const std::string plain_backward = Name(ChooseBackward(problem, kH200, {}));
      problem.deterministic = true;
      EXPECT_EQ(Name(ChooseForward(problem, kH200, {})), plain);  // every forward is deterministic
      EXPECT_EQ(Name(ChooseBackward(problem, kH200, {})),
                plain_backward == "sm90" ? "sm90" : "simt");
      EXPECT_EQ(Name(ChooseBackward(problem, kA100, {})), "simt");
      problem.softcap = 20;
      EXPECT_EQ(Name(ChooseBackward(problem, kH200, {})),
                plain_backward == "sm90" ? "sm90" : "simt");
      problem.softcap = 0;
      problem.terms.dropout.threshold = 1;
      const bool hopper = HaveHopper() && dtype != DType::kFloat32 && (dim == 64 || dim == 128);
      EXPECT_EQ(Name(ChooseBackward(problem, kH200, {})), hopper ? "sm90" : "simt");
      EXPECT_EQ(Name(ChooseBackward(problem, kA100, {})), "simt");
      problem.deterministic = false;
      EXPECT_EQ(Name(ChooseForward(problem, kH200, {})), hopper ? "sm90" : "simt");
      EXPECT_EQ(Name(ChooseForward(problem, kA100, {})), "simt");
      EXPECT_EQ(Name(ChooseBackward(problem, kA100, {})), "simt");
      const auto refused = ChooseForward(problem, kH200, {.family = "sm80"});
      EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(refused.status().message()), HasSubstr("or dropout"));
    }
  }
}

// The exact family serves problems that the Hopper kernels do not serve. Forcing Hopper for them is
// an error.
TEST(ChooseTest, HopperServesTermsThatItsKernelsHave) {
  if (!HaveHopper()) GTEST_SKIP() << "built without sm_90a";
  const KernelTuning forced{.family = "sm90"};
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    AttentionProblem problem = ProblemOf(dtype, 128);
    problem.terms.segment_ids = true;
    for (const KernelTuning& tuning : {KernelTuning{}, forced}) {
      EXPECT_EQ(Name(ChooseForward(problem, kH200, tuning)), "sm90");
      EXPECT_EQ(Name(ChooseBackward(problem, kH200, tuning)), "sm90");
    }
    const auto refusal = [&](const absl::StatusOr<const KernelFamily*>& family) {
      EXPECT_EQ(family.status().code(), absl::StatusCode::kInvalidArgument);
      return std::string(family.status().message());
    };
    problem.deterministic = true;
    EXPECT_EQ(Name(ChooseForward(problem, kH200, forced)), "sm90");
    EXPECT_EQ(Name(ChooseBackward(problem, kH200, forced)), "sm90");
    problem.head_dim = 136;
    EXPECT_THAT(refusal(ChooseBackward(problem, kH200, forced)), HasSubstr("the same bits"));
    EXPECT_EQ(Name(ChooseBackward(problem, kH200, {})), "simt");
    problem.head_dim = 128;
    problem.deterministic = false;
    problem.softcap = 30;
    EXPECT_EQ(Name(ChooseForward(problem, kH200, forced)), "sm90");
    EXPECT_THAT(refusal(ChooseBackward(problem, kH200, forced)), HasSubstr("and a softcap"));
    EXPECT_EQ(Name(ChooseBackward(problem, kH200, {})), "simt");
    problem.softcap = 0;
    problem.head_dim = 136;
    EXPECT_THAT(refusal(ChooseForward(problem, kH200, forced)), HasSubstr("head_dim 136"));
    problem.head_dim = 128;
    problem.dtype = DType::kFloat32;
    EXPECT_THAT(refusal(ChooseForward(problem, kH200, forced)), HasSubstr("in fp32"));
  }
  AttentionProblem plain = ProblemOf(DType::kBFloat16, 128);
  plain.deterministic = true;
  EXPECT_EQ(Name(ChooseBackward(plain, kH200, forced)), "sm90");
  EXPECT_FALSE(ChooseBackward(plain, kH200, {.family = "sm80"}).ok());
}

TEST(ChooseTest, ABiasGradientNeedsABias) {
  AttentionProblem problem = ProblemOf(DType::kBFloat16, 64);
  problem.bands = {Band{}};
  BiasGradientCall call;
  call.problem = &problem;
  EXPECT_EQ(PrepareBiasGradient(call, kH200).status().code(), absl::StatusCode::kInvalidArgument);
  problem.terms.bias = BiasForm{};
  problem.terms.shifts = {0};
  const auto prepared = PrepareBiasGradient(call, kH200);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  EXPECT_EQ((*prepared)->name(), (KernelName{HaveHopper() ? "sm90" : "simt", "terms", ""}));
  EXPECT_EQ(PrepareBiasGradient(call, kH200, {.family = "sm80"}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// The exact family computes the gradient for a call whose operands the Hopper kernel cannot read.
TEST(ChooseTest, AForcedBiasGradientFallsToTheExactFamily) {
  if (!HaveHopper()) GTEST_SKIP() << "built without sm_90a";
  AttentionProblem problem = ProblemOf(DType::kBFloat16, 64);
  problem.bands = {Band{}};
  problem.terms.bias = BiasForm{};
  problem.terms.shifts = {0};
  BiasGradientCall call;
  call.problem = &problem;
  const auto family = [&] {
    const auto prepared = PrepareBiasGradient(call, kH200, {.family = "sm90"});
    return prepared.ok() ? std::string((*prepared)->family()) : prepared.status().ToString();
  };
  EXPECT_EQ(family(), "sm90");
  call.q = reinterpret_cast<const void*>(uintptr_t{8});
  EXPECT_EQ(family(), "simt");
}

// If a family serves a problem but does not take a call, the next family gets the call.
TEST(ChooseTest, ACallThatIsNotTakenFallsToTheNextFamily) {
  AttentionProblem problem = ProblemOf(DType::kBFloat16, 64);
  problem.bands = {Band{}};
  ForwardCall call;
  call.problem = &problem;
  call.q_rows = 64;
  call.q_pieces = {Piece{0, 64, 0, 0, 1}};
  call.blocks = {{64, {Piece{0, 64, 0, 0, 2}}}};  // keys of every other position
  call.initial = call.final = true;
  const auto prepared = PrepareForward(call, kH200);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  EXPECT_EQ((*prepared)->family(), "sm80");
  if (!HaveHopper()) return;
  const auto refused = PrepareForward(call, kH200, {.family = "sm90"});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("from these pieces"));
}

// The names in reports and metrics.
TEST(ChooseTest, PreparedCallsSayFamilyAndClass) {
  AttentionProblem problem = ProblemOf(DType::kBFloat16, 64);
  problem.bands = {Band{}};
  BackwardCall call;
  call.problem = &problem;
  call.q_rows = 64;
  call.q_pieces = {Piece{0, 64, 0, 0, 1}};
  call.blocks = {{64, {Piece{0, 64, 0, 0, 1}}}};
  EXPECT_EQ((*PrepareBackward(call, kH200, {.family = "sm80"}))->name(),
            (KernelName{"sm80", "plain", ""}));
  problem.deterministic = true;
  EXPECT_EQ((*PrepareBackward(call, kH200))->name(),
            HaveHopper() ? (KernelName{"sm90", "plain", ""}) : (KernelName{"simt", "terms", ""}));
  EXPECT_EQ((*PrepareBackward(call, kA100))->name(), (KernelName{"simt", "terms", ""}));
  ProbabilitiesCall rows;
  rows.problem = &problem;
  EXPECT_EQ((*PrepareProbabilities(rows, kH200))->name(), (KernelName{"simt", "terms", ""}));
  EXPECT_TRUE((*PrepareGather(GatherCall()))->name().empty());
  EXPECT_TRUE((*PrepareScatter(ScatterCall()))->name().empty());
}

TEST(ChooseTest, ABackwardThatIsNotTakenFallsToTheNextFamily) {
  AttentionProblem problem = ProblemOf(DType::kBFloat16, 64);
  problem.bands = {Band{}};
  BackwardCall call;
  call.problem = &problem;
  call.q_rows = 64;
  call.q_pieces = {Piece{0, 64, 0, 0, 1}};
  call.blocks = {{64, {Piece{0, 64, 0, 0, 2}}}};  // keys of every other position
  const auto prepared = PrepareBackward(call, kH200);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  EXPECT_EQ((*prepared)->family(), "sm80");
  problem.deterministic = true;  // the order of sm80's sums varies
  EXPECT_EQ((*PrepareBackward(call, kH200))->family(), "simt");
  if (!HaveHopper()) return;
  const auto refused = PrepareBackward(call, kH200, {.family = "sm90"});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("from these pieces"));
}

TEST(ChooseTest, TheHopperBackwardTakesNoOddHeadDim) {
  if (!HaveHopper()) GTEST_SKIP() << "built without sm_90a";
  EXPECT_TRUE(ChooseBackward(ProblemOf(DType::kBFloat16, 136), kH200, {.family = "sm90"}).ok());
  const auto refused = ChooseBackward(ProblemOf(DType::kBFloat16, 130), kH200, {.family = "sm90"});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("no sm90 kernel computes a backward"));
}

TEST(ChooseTest, ProblemsOutsideTheLimitsAreRefused) {
  AttentionProblem problem = ProblemOf(DType::kBFloat16, 577);
  EXPECT_EQ(ChooseForward(problem, kH200, {}).status().code(), absl::StatusCode::kInvalidArgument);
  problem = ProblemOf(DType::kBFloat16, 64);
  problem.num_heads = 65536;
  EXPECT_EQ(ChooseForward(problem, kH200, {}).status().code(), absl::StatusCode::kInvalidArgument);
  problem.num_heads = 3;
  problem.num_kv_heads = 2;
  EXPECT_EQ(ChooseForward(problem, kH200, {}).status().code(), absl::StatusCode::kInvalidArgument);
  problem = ProblemOf(DType::kBFloat16, 64);
  problem.batch = 65535;  // the grid's third dimension
  EXPECT_TRUE(ChooseBackward(problem, kH200, {}).ok());
  problem.batch = 65536;
  EXPECT_EQ(ChooseBackward(problem, kH200, {}).status().code(), absl::StatusCode::kInvalidArgument);
}

// The chosen family prepares the kernel, and the kernel has its name.
TEST(ChooseTest, PreparedKernelsNameTheirFamily) {
  for (const auto& [dtype, name] :
       {std::pair(DType::kBFloat16, "sm80"), std::pair(DType::kFloat32, "simt")}) {
    AttentionProblem problem = ProblemOf(dtype, 64);
    problem.bands = {Band{}};
    const Piece piece{.length = 300};
    ForwardCall forward;
    forward.problem = &problem;
    forward.q_rows = 300;
    forward.q_pieces = {piece};
    forward.blocks = {{300, {piece}}};
    forward.initial = forward.final = true;
    const auto prepared = PrepareForward(forward, kH200);
    ASSERT_TRUE(prepared.ok()) << prepared.status();
    const bool hopper = HaveHopper() && dtype != DType::kFloat32;
    EXPECT_EQ((*prepared)->family(), hopper ? "sm90" : name);
    EXPECT_GT((*prepared)->table_bytes(), 0);
    EXPECT_EQ((*prepared)->table_bytes() % 256, 0);
    BackwardCall backward;
    backward.problem = &problem;
    backward.q_rows = 300;
    backward.q_pieces = {piece};
    backward.blocks = {{300, {piece}}};
    const auto prepared_backward = PrepareBackward(backward, kH200);
    ASSERT_TRUE(prepared_backward.ok()) << prepared_backward.status();
    EXPECT_EQ((*prepared_backward)->family(), hopper ? "sm90" : name);
  }
}

// One kernel computes a backward and the gradient of its bias if the family has such a kernel and
// both calls have the same operands.
TEST(ChooseTest, BothGradientsByOneKernelWhereThereIsOne) {
  AttentionProblem problem = ProblemOf(DType::kBFloat16, 128);
  problem.num_heads = 4;
  problem.bands = {Band{.upper = 0}};
  problem.terms.shifts = {0};
  problem.terms.columns = 304;
  problem.terms.bias = BiasForm{.per_head = true, .gradient = true};
  const Piece piece{.length = 304};
  BackwardCall backward;
  backward.problem = &problem;
  backward.q_rows = 304;
  backward.q_pieces = {piece};
  backward.blocks = {{304, {piece}}};
  BiasGradientCall gradient;
  gradient.problem = &problem;
  gradient.q_rows = 304;
  gradient.q_pieces = {piece};
  gradient.blocks = {{304, {piece}}};
  const auto joined = [&](const DeviceInfo& device, const std::string& family = "") {
    const auto both = PrepareGradients(backward, gradient, device, {.family = family});
    EXPECT_TRUE(both.ok()) << both.status();
    EXPECT_EQ(both->backward == nullptr, both->bias_gradient == nullptr);
    if (both->backward == nullptr) return false;
    EXPECT_EQ(both->backward->name(), both->bias_gradient->name());
    EXPECT_EQ(both->bias_gradient->table_bytes() + both->bias_gradient->scratch_bytes(), 0);
    return true;
  };
  for (bool deterministic : {false, true}) {
    problem.deterministic = deterministic;
    EXPECT_EQ(joined(kH200), HaveHopper());
    EXPECT_FALSE(joined(kH200, "simt"));
    EXPECT_FALSE(joined(kA100));
  }
  problem.terms.bias->float32 = true;
  EXPECT_FALSE(joined(kH200));
  problem.terms.bias->float32 = false;
  gradient.q_pieces[0].position = 1;
  EXPECT_FALSE(joined(kH200));
  gradient.q_pieces = backward.q_pieces;
  gradient.terms.bias = &problem;
  EXPECT_FALSE(joined(kH200));
  gradient.terms = {};
  EXPECT_EQ(joined(kH200), HaveHopper());
}

// Every kernel that is launched with more than 48 KB of shared memory has a raised limit when it is
// loaded, on devices with enough shared memory.
TEST(ChooseTest, LoadedKernelsFitTheDevice) {
  const AttentionProblem usual = ProblemOf(DType::kBFloat16, 128);
  for (const DeviceInfo& device : {kH200, kA100}) {
    for (const KernelFamily& family : Families()) {
      EXPECT_EQ(family.entries(device).empty(), !family.serves_forward(usual, device));
      for (const KernelEntry& entry : family.entries(device)) {
        EXPECT_NE(entry.address, nullptr);
        EXPECT_LE(entry.shared_bytes, device.shared_bytes_per_block) << family.name;
      }
    }
  }
}

}  // namespace
}  // namespace ringattn::worker::cuda
