// The exact set of pairs that dropout keeps, read out of results and gradients: the oracle's, by
// every layout, ring, schedule and type.
#include <cmath>
#include <string>
#include <vector>

#include "common/oracle/numeric.h"
#include "common/oracle/pair_terms.h"
#include "gtest/gtest.h"
#include "tests/sweep/solve.h"

namespace ringattn::tests {
namespace {

constexpr int64_t kBatch = 2, kHeads = 4, kKvHeads = 2, kDim = 8;
// Also the value's dimension: a one-hot row says of which token it is.
constexpr int64_t kTokens = 200;
constexpr int64_t kPairs = kBatch * kHeads * kTokens * kTokens;

AttentionSpec SpecOf(DType dtype, double rate) {
  AttentionSpec spec;
  spec.dtype = dtype;
  spec.fp32_results = dtype != DType::kFloat32;
  spec.shape = {.batch = kBatch,
                .seq_len_q = kTokens,
                .seq_len_kv = kTokens,
                .num_heads = kHeads,
                .num_kv_heads = kKvHeads,
                .head_dim = kDim,
                .head_dim_v = kTokens,
                .cu_seqlens_q = {0, kTokens},
                .cu_seqlens_k = {0, kTokens}};
  spec.options.dropout.threshold = static_cast<uint32_t>(std::round(rate * 65536));
  spec.options.dropout.seed = 0x123456789abcdefu;
  return spec;
}

// [kBatch, kTokens, heads, kTokens], each token's rows with a one at its own place.
std::vector<uint8_t> OneHot(DType dtype, int64_t heads) {
  std::vector<uint8_t> bytes(kBatch * kTokens * heads * kTokens * ElementBytes(dtype), 0);
  for (int64_t row = 0; row < kBatch * kTokens * heads; ++row) {
    oracle::Store(dtype, bytes.data(), row * kTokens + row / heads % kTokens, 1.0);
  }
  return bytes;
}

// With q = 0 every pair that is seen has the same weight, so a one-hot v shows in out which are
// kept, and a one-hot dout in dv.
class KeepSets {
 public:
  explicit KeepSets(double rate, DType dtype = DType::kFloat32) : spec_(SpecOf(dtype, rate)) {
    inputs_ = ToTensorMap(oracle::GenerateInputs(spec_, oracle::DataKind::kNormal, 11, true));
    inputs_[TensorId::kQ].assign(inputs_[TensorId::kQ].size(), 0);
    inputs_[TensorId::kV] = OneHot(dtype, kKvHeads);
    inputs_[TensorId::kDout] = OneHot(dtype, kHeads);
  }

  // The number of kept pairs; every one of them as the oracle has it, both ways.
  int64_t Check(const Placement& placement) {
    const TensorMap outputs = SolveBoth(spec_, inputs_, placement);
    const std::vector<float> out = Floats(outputs.at(TensorId::kOut));
    const std::vector<float> dv = Floats(outputs.at(TensorId::kDv));
    EXPECT_EQ(out.size(), static_cast<size_t>(kPairs));
    if (out.size() != static_cast<size_t>(kPairs)) return 0;
    const double scale = 65536.0 / (65536.0 - spec_.options.dropout.threshold);
    int64_t kept = 0, wrong = 0;
    for (int64_t b = 0; b < kBatch; ++b) {
      for (int64_t i = 0; i < kTokens; ++i) {
        double seen = 0;
        for (int64_t j = 0; j < kTokens; ++j) seen += Times(i, j);
        for (int64_t j = 0; j < kTokens; ++j) {
          const double each = scale / seen;
          int64_t of_group[kKvHeads] = {};
          for (int64_t h = 0; h < kHeads; ++h) {
            const int64_t times =
                oracle::Keeps(spec_.options.dropout, b, h, i, j) ? Times(i, j) : 0;
            const float weight = out[((b * kTokens + i) * kHeads + h) * kTokens + j];
            wrong += std::llround(weight / each) != times || (times == 0 && weight != 0.0f);
            of_group[h / (kHeads / kKvHeads)] += times;
            kept += times != 0;
          }
          for (int64_t kv = 0; kv < kKvHeads; ++kv) {
            const float sum = dv[((b * kTokens + j) * kKvHeads + kv) * kTokens + i];
            wrong += std::llround(sum / each) != of_group[kv];
          }
        }
      }
    }
    EXPECT_EQ(wrong, 0);
    return kept;
  }

  AttentionSpec& spec() { return spec_; }

 private:
  // How many levels have the pair; without levels once.
  int64_t Times(int64_t i, int64_t j) const {
    if (spec_.options.dilation_levels.empty()) return 1;
    int64_t times = 0;
    for (const DilationLevel& level : spec_.options.dilation_levels) {
      const int64_t w = level.segment_length, r = level.dilation_rate;
      times += i / w == j / w && i % w % r == *level.offset && j % w % r == *level.offset;
    }
    return times;
  }

  AttentionSpec spec_;
  TensorMap inputs_;
};

std::vector<Placement> EverySchedule() {
  std::vector<Placement> placements = {{Layout::kContiguous, 1, 1, ScheduleKind::kSingle}};
  for (const Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kStriped}) {
    for (const ScheduleKind schedule : {ScheduleKind::kRing, ScheduleKind::kAllGather,
                                        ScheduleKind::kPassQ, ScheduleKind::kReplicatedQ}) {
      placements.push_back({layout, 3, 1, schedule});
    }
  }
  return placements;
}

std::string NameOf(const Placement& placement) {
  return std::string(ScheduleKindName(placement.schedule)) + " " + LayoutName(placement.layout) +
         " over " + std::to_string(placement.world_size);
}

TEST(KeepSet, AThresholdOfNothingIsNoDropout) {
  AttentionSpec spec = SpecOf(DType::kFloat32, 0.0);
  spec.shape.head_dim_v = 24;
  const TensorMap inputs =
      ToTensorMap(oracle::GenerateInputs(spec, oracle::DataKind::kNormal, 10, true));
  const Placement placement = {Layout::kZigzag, 3};
  const TensorMap seeded = SolveBoth(spec, inputs, placement);
  spec.options.dropout = {};
  EXPECT_EQ(SolveBoth(spec, inputs, placement), seeded);
}

TEST(KeepSet, IsTheSameWhereverPairsAreComputed) {
  KeepSets sets(0.3);
  const int64_t kept = sets.Check({Layout::kContiguous, 1, 1, ScheduleKind::kSingle});
  // Within five standard deviations of a binomial distribution.
  const double rate = 1 - 19661 / 65536.0;
  EXPECT_NEAR(static_cast<double>(kept), rate * static_cast<double>(kPairs),
              5 * std::sqrt(static_cast<double>(kPairs) * rate * (1 - rate)));
  for (const int world_size : {2, 3, 8}) {
    for (const Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kStriped}) {
      EXPECT_EQ(sets.Check({layout, world_size}), kept);
    }
  }
  EXPECT_EQ(sets.Check({Layout::kStriped, 4, 7}), kept);
}

TEST(KeepSet, IsTheSameByEveryScheduleInEveryType) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    KeepSets sets(0.3, dtype);
    const int64_t kept = KeepSets(0.3).Check({Layout::kContiguous, 1, 1, ScheduleKind::kSingle});
    for (const Placement& placement : EverySchedule()) {
      SCOPED_TRACE(NameOf(placement) + " in " + std::string(DTypeName(dtype)));
      EXPECT_EQ(sets.Check(placement), kept);
    }
    EXPECT_EQ(sets.Check({Layout::kZigzag, 3, 1, ScheduleKind::kAllGather, 1}), kept);
  }
}

// A pair that two levels have is kept in both or in none.
TEST(KeepSet, IsThatOfPositionsInDilatedLevelsToo) {
  KeepSets sets(0.3);
  sets.spec().options.dilation_levels = {
      {kTokens, 1, 0, 0, kHeads}, {100, 2, 1, 0, kHeads}, {70, 3, 1, 0, kHeads}};
  int64_t kept = -1;
  for (const Placement& placement : EverySchedule()) {
    SCOPED_TRACE(NameOf(placement));
    const int64_t here = sets.Check(placement);
    if (kept < 0) kept = here;
    EXPECT_EQ(here, kept);
  }
}

// A request that is a part of a larger one keeps what the whole would.
TEST(KeepSet, MovesWithItsOrigins) {
  KeepSets sets(0.5);
  sets.spec().options.dropout.first_batch = 3;
  sets.spec().options.dropout.first_head = 9;
  sets.spec().options.dropout.first_query = 1000;
  sets.spec().options.dropout.first_key = 45;
  sets.Check({Layout::kZigzag, 3});
}

}  // namespace
}  // namespace ringattn::tests
