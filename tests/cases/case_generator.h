// Cases: attention problems drawn so that every two choices of different kinds
// meet (pairwise, again and again), the same ones for the same seed everywhere.
// The in-process sweep and the end-to-end suite share them.
#ifndef RINGATTN_TESTS_CASES_CASE_GENERATOR_H_
#define RINGATTN_TESTS_CASES_CASE_GENERATOR_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/layout/shard_plan.h"
#include "common/oracle/generator.h"
#include "common/schedule/schedule.h"

namespace ringattn::tests {

enum Factor {
  kDTypeFactor,
  kWorldSizeFactor,
  kLayoutFactor,
  kCausalFactor,
  kWindowFactor,
  kSoftcapFactor,
  kScaleFactor,
  kHeadsFactor,
  kHeadDimFactor,
  kHeadDimVFactor,
  kBatchFactor,
  kPackedFactor,
  kRelationFactor,
  kLengthFactor,
  kDirectionFactor,
  kDataFactor,
  kFactorCount,
};

// A choice of one level per factor; levels are indices into LevelNames.
using Levels = std::array<int, kFactorCount>;

const char* FactorName(Factor factor);
const std::vector<std::string>& LevelNames(Factor factor);

// False for choices that contradict each other, e.g. packed with batch 2.
bool Compatible(Factor a, int level_a, Factor b, int level_b);

struct Case {
  int64_t index = 0;
  Levels levels = {};
  AttentionSpec spec;
  Layout layout = Layout::kContiguous;
  int64_t stripe = 1;
  int world_size = 1;
  ScheduleKind schedule = ScheduleKind::kRing;  // over more than one rank
  int64_t heads_per_step = 0;                   // of kAllGather; 0: all at once
  int64_t group_size = 0;                       // of kDoubleRing
  Direction direction = Direction::kForward;
  bool recompute_forward = false;  // backward without out and lse
  oracle::DataKind data = oracle::DataKind::kNormal;
  uint64_t data_seed = 0;
};

// One line that says everything about the case.
std::string ToString(const Case& c);

// How large a case may be, where its kind of length leaves a choice: batch * heads *
// sq * sk * (head_dim + head_dim_v), whether visible or not. At this limit the
// oracle takes about 0.2 s with gradients, and 5 ms on average.
inline constexpr int64_t kDefaultCaseCost = 24'000'000;

// The first `count` cases of `seed`. Case i does not depend on `count`.
std::vector<Case> GenerateCases(uint64_t seed, int64_t count, int64_t max_cost = kDefaultCaseCost);

// Adds to a case what only some requests have, drawn by the case's seed and number: attention
// sinks and, backward, a gradient of lse; with `score_terms` also a bias, a mask, segment ids,
// ALiBi and dropout; the schedule, of those that take what the case has; and dilated levels, where
// there are as many queries as keys. Every other choice stays.
// With `float8` some forwards are computed in e4m3, which have no score terms and head dims of
// multiples of 8.
void AddOptions(Case& c, bool score_terms = true, bool float8 = true);

// Requests the probabilities of some drawn rows, in every second forward case that has rows.
void AddProbabilityRows(Case& c);

// Cuts the ring to at most `max_world_size` ranks, for a service of so few workers. The groups of a
// double ring shrink to what divides the new size.
void CutRing(Case& c, int max_world_size);

struct Coverage {
  int64_t pairs = 0;  // compatible pairs of levels of different factors
  int64_t covered_pairs = 0;
  int64_t fewest_per_pair = 0;
  int64_t triples = 0;
  int64_t covered_triples = 0;
};
Coverage CoverageOf(const std::vector<Case>& cases);
std::string ToString(const Coverage& coverage);

}  // namespace ringattn::tests

#endif  // RINGATTN_TESTS_CASES_CASE_GENERATOR_H_
