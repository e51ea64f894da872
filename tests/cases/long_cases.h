// Long problems: shards of many tiles, long enough that schedules cut them into
// parts, and windows shorter than a shard. Drawn pairwise like the short ones
// (case_generator.h); too large to be judged whole.
#ifndef RINGATTN_TESTS_CASES_LONG_CASES_H_
#define RINGATTN_TESTS_CASES_LONG_CASES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/layout/shard_plan.h"

namespace ringattn::tests {

struct LongCase {
  int64_t index = 0;
  AttentionSpec spec;
  Layout layout = Layout::kContiguous;
  int64_t stripe = 1;
  int world_size = 2;
  bool recompute_forward = false;  // of the backward pass
  uint64_t data_seed = 0;
};

std::string ToString(const LongCase& c);

// The first `count` cases of `seed`.
std::vector<LongCase> GenerateLongCases(uint64_t seed, int64_t count);

}  // namespace ringattn::tests

#endif  // RINGATTN_TESTS_CASES_LONG_CASES_H_
