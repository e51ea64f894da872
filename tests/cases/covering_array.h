// A covering array drawn greedily: each row takes up pairs of levels that have
// been met least so far, so that all compatible pairs are met, then met again.
#ifndef RINGATTN_TESTS_CASES_COVERING_ARRAY_H_
#define RINGATTN_TESTS_CASES_COVERING_ARRAY_H_

#include <cstdint>
#include <functional>
#include <vector>

namespace ringattn::tests {

// The same sequence on every platform.
class Random {
 public:
  Random(uint64_t seed, uint64_t stream) : seed_(seed), stream_(stream) {}
  uint64_t Bits();
  // Uniform in [low, high]. REQUIRES: low <= high.
  int64_t Between(int64_t low, int64_t high);

 private:
  uint64_t seed_;
  uint64_t stream_;
  uint64_t next_ = 0;
};

class CoveringArray {
 public:
  using Compatible = std::function<bool(int factor_a, int level_a, int factor_b, int level_b)>;

  // level_counts[f] levels of factor f. REQUIRES: any compatible choice for some
  // of the factors can be completed.
  CoveringArray(std::vector<int> level_counts, Compatible compatible, uint64_t seed);

  // The next row: one level per factor.
  std::vector<int> Next();

 private:
  struct Pair {
    int a, level_a, b, level_b;
  };
  int64_t& CountOf(int a, int level_a, int b, int level_b);
  std::vector<int> Candidate(Random& random);
  // Higher where the row's pairs have been met less often.
  int64_t Novelty(const std::vector<int>& row);

  std::vector<int> level_counts_;
  std::vector<int> first_level_;  // of each factor, in one numbering of all levels
  int total_levels_ = 0;
  Compatible compatible_;
  uint64_t seed_;
  uint64_t row_ = 0;
  std::vector<Pair> pairs_;      // all compatible ones
  std::vector<int64_t> counts_;  // [total_levels][total_levels]
};

}  // namespace ringattn::tests

#endif  // RINGATTN_TESTS_CASES_COVERING_ARRAY_H_
