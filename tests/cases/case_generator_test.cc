#include "tests/cases/case_generator.h"

#include <array>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "common/base/limits.h"
#include "gtest/gtest.h"

namespace ringattn::tests {
namespace {

TEST(CaseGenerator, EveryPairIsMet) {
  const Coverage coverage = CoverageOf(GenerateCases(1, 300));
  EXPECT_EQ(coverage.covered_pairs, coverage.pairs) << ToString(coverage);
  EXPECT_GE(coverage.fewest_per_pair, 3) << ToString(coverage);
  EXPECT_GT(coverage.covered_triples * 10, coverage.triples * 9) << ToString(coverage);
}

TEST(CaseGenerator, CaseDoesNotDependOnTheCount) {
  const auto few = GenerateCases(7, 20), many = GenerateCases(7, 60);
  for (size_t i = 0; i < few.size(); ++i) EXPECT_EQ(ToString(few[i]), ToString(many[i]));
  EXPECT_NE(ToString(GenerateCases(8, 1)[0]), ToString(few[0]));
}

// What validation.h promises of a spec.
TEST(CaseGenerator, SpecsAreValid) {
  for (const Case& c : GenerateCases(3, 2000)) {
    const AttentionShape& shape = c.spec.shape;
    ASSERT_GE(shape.batch, 1);
    ASSERT_TRUE(!shape.packed || shape.batch == 1) << ToString(c);
    ASSERT_EQ(shape.num_heads % shape.num_kv_heads, 0);
    for (const int64_t dim : {shape.head_dim, shape.head_dim_v}) {
      ASSERT_GE(dim, 1) << ToString(c);
      ASSERT_LE(dim, kMaxHeadDim) << ToString(c);
    }
    ASSERT_EQ(shape.cu_seqlens_q.size(), shape.cu_seqlens_k.size());
    ASSERT_EQ(shape.cu_seqlens_q.back(), shape.seq_len_q);
    ASSERT_EQ(shape.cu_seqlens_k.back(), shape.seq_len_kv);
    if (!shape.packed) {
      ASSERT_EQ(shape.cu_seqlens_q.size(), 2u);
    }
    ASSERT_GE(c.spec.options.window_left, -1);
    ASSERT_GE(c.spec.options.window_right, -1);
  }
}

TEST(CaseGenerator, LevelsMeanWhatTheySay) {
  for (const Case& c : GenerateCases(4, 500)) {
    const AttentionShape& shape = c.spec.shape;
    const int64_t shorter = std::min(shape.seq_len_q, shape.seq_len_kv);
    const std::string& length = LevelNames(kLengthFactor)[c.levels[kLengthFactor]];
    if (length == "uneven") {
      ASSERT_NE(shorter % c.world_size, 0) << ToString(c);
    }
    if (length == "below ring") {
      ASSERT_LT(shorter, c.world_size) << ToString(c);
    }
    const std::string& relation = LevelNames(kRelationFactor)[c.levels[kRelationFactor]];
    ASSERT_EQ(relation == "equal", shape.seq_len_q == shape.seq_len_kv) << ToString(c);
    ASSERT_EQ(relation == "less", shape.seq_len_q < shape.seq_len_kv) << ToString(c);
  }
}

// --- Options ------------------------------------------------------------------

using OptionLevels = std::map<std::string, std::string>;

std::string FormOf(bool per_batch, bool per_head) {
  return per_batch ? (per_head ? "both" : "batch") : (per_head ? "heads" : "one");
}

// Returns for each option the level that the case uses, "no" if none.
OptionLevels OptionLevelsOf(const Case& c) {
  const AttentionOptions& options = c.spec.options;
  const AttentionShape& shape = c.spec.shape;
  const auto yes = [](bool is) { return std::string(is ? "yes" : "no"); };
  OptionLevels levels;
  for (const Factor factor : {kDTypeFactor, kLayoutFactor, kSoftcapFactor, kPackedFactor}) {
    levels[FactorName(factor)] = LevelNames(factor)[c.levels[factor]];
  }
  const bool backward = c.direction == Direction::kBackward;
  levels["direction"] = !backward ? "forward" : c.recompute_forward ? "recompute" : "backward";
  const auto& bias = options.bias;
  levels["bias"] = bias ? FormOf(bias->per_batch, bias->per_head) : "no";
  levels["bias place"] = !bias ? "no" : bias->before_softcap ? "before the cap" : "behind it";
  levels["bias gradient"] = yes(bias && bias->gradient && backward);
  const auto& mask = options.mask;
  levels["mask"] = mask ? FormOf(mask->per_batch, mask->per_head) : "no";
  levels["mask encoding"] = !mask ? "no" : mask->bits ? "bits" : "bytes";
  levels["ids"] = yes(options.segment_ids);
  const auto slopes = static_cast<int64_t>(options.alibi_slopes.size());
  levels["alibi"] = slopes == 0 ? "no" : slopes == shape.num_heads ? "heads" : "batch and heads";
  const uint32_t threshold = options.dropout.threshold;
  levels["dropout"] = threshold == 0 ? "no" : std::to_string(threshold);
  levels["sinks"] = yes(options.sinks);
  levels["dlse"] = yes(c.spec.has_dlse);
  levels["fp32 results"] = yes(c.spec.fp32_results);
  levels["rules"] = yes(!shape.document_rules.empty());
  levels["fp8"] = yes(options.compute_dtype != ComputeDType::kAsInputs);
  levels["probabilities"] = yes(!c.spec.probability_rows.empty());
  levels["schedule"] = c.world_size == 1       ? "single"
                       : c.heads_per_step != 0 ? "by heads"
                                               : ScheduleKindName(c.schedule);
  const std::vector<DilationLevel>& dilation = options.dilation_levels;
  bool split = false;
  for (const DilationLevel& level : dilation) {
    split = split || level.head_end - level.head_begin < shape.num_heads;
  }
  levels["dilation"] = dilation.empty()       ? "no"
                       : split                ? "split"
                       : dilation.size() == 1 ? "one"
                                              : "several";
  return levels;
}

// Pairs that are rejected by name or are impossible: an option, or one level of it, with another.
constexpr std::pair<const char*, const char*> kNever[] = {
    {"schedule=pass_q", "mask encoding=bits"},
    {"schedule=replicated_q", "mask encoding=bits"},
    {"schedule=by heads", "dilation"},
    {"probabilities", "schedule=pass_q"},
    {"probabilities", "schedule=replicated_q"},
    {"probabilities", "schedule=by heads"},
    {"probabilities", "dilation"},
    {"probabilities", "direction=backward"},
    {"probabilities", "direction=recompute"},
    {"probabilities", "bias gradient"},
    {"probabilities", "dlse"},
    {"direction=forward", "bias gradient"},
    {"direction=forward", "dlse"},
    {"fp8", "bias"},
    {"fp8", "mask"},
    {"fp8", "ids"},
    {"fp8", "alibi"},
    {"fp8", "dropout"},
    {"fp8", "dlse"},
    {"fp8", "probabilities"},
    {"fp8", "dtype=fp32"},
    {"fp8", "direction=backward"},
    {"fp8", "direction=recompute"},
    {"dtype=fp32", "fp32 results"},
    {"rules", "packed=no"},
};

std::string FirstWord(const std::string& text) { return text.substr(0, text.find(' ')); }

bool Is(const std::string& option, const std::string& level, const std::string& pattern) {
  if (option + "=" + level == pattern) return true;
  return level != "no" && (option == pattern || FirstWord(option) == pattern);
}

bool MayMeet(const std::string& a, const std::string& level_a, const std::string& b,
             const std::string& level_b) {
  for (const auto& [one, other] : kNever) {
    if (Is(a, level_a, one) && Is(b, level_b, other)) return false;
    if (Is(b, level_b, one) && Is(a, level_a, other)) return false;
  }
  return true;
}

// The cases of attention_sweep_options_test: every level of every option meets every level of every
// other that it may be asked for with.
TEST(CaseGenerator, EveryPairOfOptionsIsMet) {
  std::map<std::string, std::set<std::string>> options;
  std::set<std::array<std::string, 4>> met;
  for (Case& c : GenerateCases(3, 2000)) {
    AddOptions(c);
    AddProbabilityRows(c);
    const OptionLevels levels = OptionLevelsOf(c);
    for (const auto& [a, level_a] : levels) {
      options[a].insert(level_a);
      for (const auto& [b, level_b] : levels) met.insert({a, level_a, b, level_b});
    }
  }
  int64_t pairs = 0;
  for (const auto& [a, levels_a] : options) {
    for (const auto& [b, levels_b] : options) {
      if (a >= b || FirstWord(a) == FirstWord(b)) continue;  // sides of one option
      for (const std::string& level_a : levels_a) {
        for (const std::string& level_b : levels_b) {
          const bool may = MayMeet(a, level_a, b, level_b);
          pairs += may;
          EXPECT_EQ(met.count({a, level_a, b, level_b}) > 0, may)
              << a << " " << level_a << " and " << b << " " << level_b;
        }
      }
    }
  }
  RecordProperty("pairs_of_options", static_cast<int>(pairs));
  std::printf("%lld pairs of options\n", static_cast<long long>(pairs));
  EXPECT_GE(pairs, 1500);
  EXPECT_EQ(options["bias"].size(), 5u);
  EXPECT_EQ(options["mask"].size(), 5u);
  EXPECT_EQ(options["alibi"].size(), 3u);
  EXPECT_EQ(options["dropout"].size(), 4u);
  EXPECT_EQ(options["dilation"].size(), 4u);
  EXPECT_EQ(options["schedule"].size(), 7u);
}

TEST(CaseGenerator, GroupsOfACutRingDivideIt) {
  int cut_groups = 0;
  for (Case& c : GenerateCases(4, 1000)) {
    AddOptions(c);
    const int64_t drawn = c.group_size;
    CutRing(c, 3);
    EXPECT_LE(c.world_size, 3);
    if (drawn == 0) {
      EXPECT_EQ(c.group_size, 0);
      continue;
    }
    ASSERT_GE(c.group_size, 1) << ToString(c);
    EXPECT_EQ(c.world_size % c.group_size, 0) << ToString(c);
    cut_groups += c.group_size != drawn;
  }
  EXPECT_GT(cut_groups, 10);
}

}  // namespace
}  // namespace ringattn::tests
