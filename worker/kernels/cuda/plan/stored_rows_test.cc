#include "worker/kernels/cuda/plan/stored_rows.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn::worker::cuda {
namespace {

using Pairs = std::set<std::pair<int64_t, int64_t>>;  // ScoreTerms' PairRow and PairColumn

AttentionProblem ProblemOf(std::vector<Band> bands) {
  AttentionProblem problem;
  problem.terms.bias = BiasForm{};
  problem.bands = std::move(bands);
  return problem;
}

BiasGradientCall CallOf(const AttentionProblem& problem, std::vector<Piece> queries,
                        std::vector<Piece> keys) {
  BiasGradientCall call;
  call.problem = &problem;
  for (const Piece& piece : queries) call.q_rows += piece.length;
  call.q_pieces = std::move(queries);
  call.blocks = {{0, std::move(keys)}};
  return call;
}

// The pairs that the calls store by their contract.
Pairs SeenBy(const std::vector<const BiasGradientCall*>& calls) {
  Pairs pairs;
  for (const BiasGradientCall* call : calls) {
    for (const Piece& q : call->q_pieces) {
      const Band& band = call->problem->bands[q.document];
      for (const Piece& k : call->blocks[0].pieces) {
        if (k.document != q.document) continue;
        for (int64_t i = 0; i < q.length; ++i) {
          for (int64_t j = 0; j < k.length; ++j) {
            const int64_t away = k.PositionOf(j) - q.PositionOf(i);
            if (away < band.lower || away > band.upper) continue;
            const ScoreTerms& terms = call->problem->terms;
            pairs.emplace(terms.PairRow(q.local_begin + i, q.PositionOf(i)),
                          terms.PairColumn(k.local_begin + j, k.PositionOf(j)));
          }
        }
      }
    }
  }
  return pairs;
}

Pairs PairsOf(const std::vector<StoredRows>& rows) {
  Pairs pairs;
  for (const StoredRows& stored : rows) {
    for (int64_t r = 0; r < stored.count; ++r) {
      const int64_t begin = std::max(stored.low, stored.first + r);
      for (int64_t j = begin; j < std::min(stored.high, stored.end + r); ++j) {
        EXPECT_TRUE(pairs.emplace(stored.begin + r, j).second);
      }
    }
  }
  return pairs;
}

TEST(StoredRowsTest, NothingWithoutCalls) { EXPECT_TRUE(StoredRowsOf({}).empty()); }

TEST(StoredRowsTest, AllThatTheBandShows) {
  for (const Band& band : {Band{}, Band{.upper = 0}, Band{.lower = -3, .upper = 2},
                           Band{.lower = 5}, Band{.upper = -30}}) {
    const AttentionProblem problem = ProblemOf({band});
    const BiasGradientCall call = CallOf(problem, {{.length = 20}}, {{.length = 24}});
    EXPECT_EQ(PairsOf(StoredRowsOf({&call})), SeenBy({&call}));
  }
}

// The steps of one rank in a ring: in zigzag layout the order of keys differs from that of
// positions.
TEST(StoredRowsTest, StepsTogether) {
  const AttentionProblem problem = ProblemOf({{.upper = 0}});
  const std::vector<Piece> queries = {{.length = 8, .position = 8},
                                      {.local_begin = 8, .length = 8, .position = 16}};
  const BiasGradientCall own =
      CallOf(problem, queries, {{.length = 8, .position = 8}, {.length = 8, .position = 16}});
  const BiasGradientCall other =
      CallOf(problem, queries, {{.length = 8}, {.length = 8, .position = 24}});
  EXPECT_EQ(PairsOf(StoredRowsOf({&own, &other})), SeenBy({&own, &other}));
  EXPECT_EQ(PairsOf(StoredRowsOf({&own})), SeenBy({&own}));
}

TEST(StoredRowsTest, OfKeysWithGapsOneRun) {
  const AttentionProblem problem = ProblemOf({{}});
  const BiasGradientCall call =
      CallOf(problem, {{.length = 2}}, {{.length = 3}, {.length = 5, .position = 4}});
  const std::vector<StoredRows> rows = StoredRowsOf({&call});
  ASSERT_EQ(rows.size(), 1);
  EXPECT_EQ(rows[0].low, 4);
  EXPECT_EQ(rows[0].high, 9);
}

TEST(StoredRowsTest, DocumentsApart) {
  const AttentionProblem problem = ProblemOf({{.upper = 0}, {}, {}});
  const BiasGradientCall call =
      CallOf(problem,
             {{.length = 5, .document = 0},
              {.local_begin = 5, .length = 4, .document = 1},
              {.local_begin = 9, .length = 3, .document = 2}},
             {{.length = 6, .document = 0}, {.length = 2, .document = 1}});
  EXPECT_EQ(PairsOf(StoredRowsOf({&call})), SeenBy({&call}));
}

TEST(StoredRowsTest, LeavesOutWhatItCannotSay) {
  const AttentionProblem problem = ProblemOf({{}});
  const BiasGradientCall rows = CallOf(problem, {{.length = 4, .stride = 2}}, {{.length = 4}});
  EXPECT_TRUE(StoredRowsOf({&rows}).empty());
  const BiasGradientCall keys = CallOf(problem, {{.length = 4}}, {{.length = 4, .stride = 2}});
  EXPECT_TRUE(StoredRowsOf({&keys}).empty());
  const BiasGradientCall plain = CallOf(problem, {{.length = 4}}, {{.length = 4}});
  const BiasGradientCall others = CallOf(problem, {{.length = 3}}, {{.length = 9}});
  EXPECT_EQ(PairsOf(StoredRowsOf({&plain, &others})), SeenBy({&plain}));
}

// The steps of one rank with a bias sharded by keys: the same keys and different queries in each
// step.
TEST(StoredRowsTest, StepsOfABiasThatIsCutByKeys) {
  for (const Band& band : {Band{.upper = 0}, Band{}, Band{.lower = -9, .upper = 2}}) {
    AttentionProblem problem = ProblemOf({band});
    problem.terms.by_keys = true;
    problem.terms.rows = 32;
    problem.terms.columns = 16;
    const std::vector<Piece> near = {{.length = 8, .position = 8},
                                     {.local_begin = 8, .length = 8, .position = 16}};
    const std::vector<Piece> far = {{.length = 8}, {.local_begin = 8, .length = 8, .position = 24}};
    const BiasGradientCall own = CallOf(problem, near, near);
    const BiasGradientCall other = CallOf(problem, far, near);
    EXPECT_EQ(PairsOf(StoredRowsOf({&own, &other})), SeenBy({&own, &other}));
    // Keys with a gap: one run, at the columns of its keys.
    const BiasGradientCall gap = CallOf(problem, near, far);
    const Pairs stored = PairsOf(StoredRowsOf({&gap})), seen = SeenBy({&gap});
    EXPECT_TRUE(std::includes(seen.begin(), seen.end(), stored.begin(), stored.end()));
    EXPECT_FALSE(stored.empty());
    // Consecutive positions in columns that are not consecutive: no run.
    const std::vector<Piece> turned = {{.length = 8, .position = 16},
                                       {.local_begin = 8, .length = 8, .position = 8}};
    const BiasGradientCall back = CallOf(problem, near, turned);
    const Pairs some = PairsOf(StoredRowsOf({&back})), all = SeenBy({&back});
    EXPECT_TRUE(std::includes(all.begin(), all.end(), some.begin(), some.end()));
    const BiasGradientCall strided = CallOf(problem, {{.length = 9, .stride = 3}}, near);
    EXPECT_TRUE(StoredRowsOf({&strided}).empty());
    std::optional<PartlyStored> partly = PartlyStoredOf({nullptr, 32 * 16 * 4}, {&own, &other});
    ASSERT_TRUE(partly.has_value());
    EXPECT_EQ(partly->rows, 32);
    EXPECT_EQ(partly->columns, 16);
  }
}

TEST(PartlyStoredTest, IsOfTheWholeGradient) {
  AttentionProblem problem = ProblemOf({{.upper = 0}});
  problem.dtype = DType::kFloat16;
  problem.batch = 3;
  problem.num_heads = 2;
  problem.terms.columns = 24;
  problem.terms.bias = BiasForm{.per_batch = true, .per_head = true, .gradient = true};
  const BiasGradientCall call = CallOf(problem, {{.length = 20}}, {{.length = 24}});
  std::optional<PartlyStored> partly = PartlyStoredOf({nullptr, 6 * 20 * 24 * 2}, {&call});
  ASSERT_TRUE(partly.has_value());
  EXPECT_EQ(partly->planes, 6);
  EXPECT_EQ(partly->rows, 20);
  EXPECT_EQ(partly->columns, 24);
  EXPECT_EQ(partly->element_bytes, 2);
  EXPECT_EQ(PairsOf(partly->stored), SeenBy({&call}));
  problem.terms.bias->float32 = true;
  problem.terms.bias->per_batch = false;
  partly = PartlyStoredOf({nullptr, 2 * 20 * 24 * 4}, {&call});
  ASSERT_TRUE(partly.has_value());
  EXPECT_EQ(partly->planes, 2);
  EXPECT_EQ(partly->element_bytes, 4);
}

TEST(PartlyStoredTest, ElseAllIsZeroed) {
  AttentionProblem problem = ProblemOf({{}});
  problem.terms.columns = 4;
  const BiasGradientCall call = CallOf(problem, {{.length = 4}}, {{.length = 4}});
  EXPECT_TRUE(PartlyStoredOf({nullptr, 64}, {&call}).has_value());
  EXPECT_FALSE(PartlyStoredOf({nullptr, 64}, {}).has_value());
  EXPECT_FALSE(PartlyStoredOf({nullptr, 32}, {&call}).has_value()) << "half of the gradient";
  const BiasGradientCall strided = CallOf(problem, {{.length = 4, .stride = 2}}, {{.length = 4}});
  EXPECT_FALSE(PartlyStoredOf({nullptr, 64}, {&strided}).has_value());
  problem.terms.bias.reset();
  EXPECT_FALSE(PartlyStoredOf({nullptr, 64}, {&call}).has_value()) << "no bias";
}

}  // namespace
}  // namespace ringattn::worker::cuda
