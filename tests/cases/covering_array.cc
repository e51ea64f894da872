#include "tests/cases/covering_array.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/oracle/generator.h"

namespace ringattn::tests {
namespace {

// More candidates than this hardly shorten the array.
constexpr int kCandidates = 8;

}  // namespace

uint64_t Random::Bits() { return oracle::RandomBits(seed_, stream_, next_++); }

int64_t Random::Between(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(Bits() % static_cast<uint64_t>(high - low + 1));
}

CoveringArray::CoveringArray(std::vector<int> level_counts, Compatible compatible, uint64_t seed)
    : level_counts_(std::move(level_counts)), compatible_(std::move(compatible)), seed_(seed) {
  for (const int count : level_counts_) {
    first_level_.push_back(total_levels_);
    total_levels_ += count;
  }
  counts_.assign(static_cast<size_t>(total_levels_) * total_levels_, 0);
  const int factors = static_cast<int>(level_counts_.size());
  for (int a = 0; a < factors; ++a) {
    for (int b = a + 1; b < factors; ++b) {
      for (int level_a = 0; level_a < level_counts_[a]; ++level_a) {
        for (int level_b = 0; level_b < level_counts_[b]; ++level_b) {
          if (compatible_(a, level_a, b, level_b)) pairs_.push_back({a, level_a, b, level_b});
        }
      }
    }
  }
}

int64_t& CoveringArray::CountOf(int a, int level_a, int b, int level_b) {
  if (a > b) {
    std::swap(a, b);
    std::swap(level_a, level_b);
  }
  const size_t row = first_level_[a] + level_a, column = first_level_[b] + level_b;
  return counts_[row * total_levels_ + column];
}

std::vector<int> CoveringArray::Candidate(Random& random) {
  const int factors = static_cast<int>(level_counts_.size());
  // Start from a pair met least often, any of them.
  int64_t fewest = CountOf(pairs_[0].a, pairs_[0].level_a, pairs_[0].b, pairs_[0].level_b);
  std::vector<const Pair*> rarest;
  for (const Pair& pair : pairs_) {
    const int64_t count = CountOf(pair.a, pair.level_a, pair.b, pair.level_b);
    if (count < fewest) rarest.clear();
    fewest = std::min(fewest, count);
    if (count == fewest) rarest.push_back(&pair);
  }
  const Pair& start = *rarest[random.Between(0, static_cast<int64_t>(rarest.size()) - 1)];
  std::vector<int> row(factors, -1);
  row[start.a] = start.level_a;
  row[start.b] = start.level_b;

  std::vector<int> order(factors);
  std::iota(order.begin(), order.end(), 0);
  for (int i = factors - 1; i > 0; --i) std::swap(order[i], order[random.Between(0, i)]);
  for (const int factor : order) {
    if (row[factor] >= 0) continue;
    // The level that meets the most rare pairs; the first of a rotated order
    // among equals.
    int64_t best = -1;
    const int rotation = static_cast<int>(random.Between(0, level_counts_[factor] - 1));
    for (int turn = 0; turn < level_counts_[factor]; ++turn) {
      const int level = (turn + rotation) % level_counts_[factor];
      int64_t gain = 0;
      bool fits = true;
      for (int other = 0; other < factors && fits; ++other) {
        if (row[other] < 0) continue;
        fits = compatible_(factor, level, other, row[other]);
        gain += CountOf(factor, level, other, row[other]) == fewest ? 1 : 0;
      }
      if (fits && gain > best) {
        best = gain;
        row[factor] = level;
      }
    }
  }
  return row;
}

int64_t CoveringArray::Novelty(const std::vector<int>& row) {
  int64_t novelty = 0;
  for (size_t a = 0; a < row.size(); ++a) {
    for (size_t b = a + 1; b < row.size(); ++b) {
      novelty -= CountOf(static_cast<int>(a), row[a], static_cast<int>(b), row[b]);
    }
  }
  return novelty;
}

std::vector<int> CoveringArray::Next() {
  Random random(seed_, row_++);
  std::vector<int> best = Candidate(random);
  for (int attempt = 1; attempt < kCandidates; ++attempt) {
    std::vector<int> row = Candidate(random);
    if (Novelty(row) > Novelty(best)) best = std::move(row);
  }
  for (size_t a = 0; a < best.size(); ++a) {
    for (size_t b = a + 1; b < best.size(); ++b) {
      ++CountOf(static_cast<int>(a), best[a], static_cast<int>(b), best[b]);
    }
  }
  return best;
}

}  // namespace ringattn::tests
