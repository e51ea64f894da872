#include "worker/kernels/cuda/sm90/launch/call_bias.h"

#include <cstdint>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace ringattn::worker::cuda::sm90 {
namespace {

AttentionProblem ProblemOf(int64_t columns, BiasForm form = {}) {
  AttentionProblem problem;
  problem.dtype = DType::kBFloat16;
  problem.batch = 2;
  problem.num_heads = 4;
  problem.num_kv_heads = 2;
  problem.head_dim = problem.head_dim_v = 64;
  problem.terms.bias = form;
  problem.terms.columns = columns;
  return problem;
}

std::vector<KvBlock> BlockOf(std::vector<Piece> pieces) {
  KvBlock block;
  for (const Piece& piece : pieces) block.rows += piece.length;
  block.pieces = std::move(pieces);
  return {block};
}

// Mirrors the kernels' BiasColumn.
int64_t ColumnOf(const BiasCopyParams& copy, int64_t position) {
  const int64_t from = position - copy.first;
  return from % copy.stride * copy.class_columns + from / copy.stride;
}

TEST(CallBiasTest, RowsOfWholeVectorsAreReadWhereTheyLie) {
  for (bool fp32 : {false, true}) {
    for (int64_t columns : {1000, 1001, 1002, 1004, 1008}) {
      CallBias bias;
      const AttentionProblem problem = ProblemOf(columns, {.float32 = fp32});
      ASSERT_TRUE(bias.Init(problem, {}, 100, BlockOf({{.length = columns}}), 1).ok());
      EXPECT_EQ(bias.copies(), columns % (fp32 ? 4 : 8) != 0) << columns;
      EXPECT_EQ(bias.element_bytes(), fp32 ? 4 : 2);
      // A bias that is copied may have any address.
      const TermOperands odd{.bias = reinterpret_cast<const void*>(uintptr_t{258})};
      EXPECT_EQ(TakesBias(problem, odd, BlockOf({{.length = columns}}), 1), bias.copies());
      EXPECT_TRUE(TakesBias(problem, {}, BlockOf({{.length = columns}}), 1));
    }
  }
  CallBias none;
  AttentionProblem plain = ProblemOf(7);
  plain.terms.bias.reset();
  ASSERT_TRUE(none.Init(plain, {}, 100, BlockOf({{.length = 7}}), 3).ok());
  EXPECT_EQ(none.scratch_bytes(), 0);
}

TEST(CallBiasTest, ACopyHasTheColumnsOfTheCallsKeysAlone) {
  CallBias bias;
  const AttentionProblem problem = ProblemOf(1001, {.per_batch = true, .per_head = true});
  const auto blocks = BlockOf(
      {{.length = 100, .position = 300}, {.local_begin = 100, .length = 50, .position = 700}});
  ASSERT_TRUE(bias.Init(problem, {}, 10, blocks, 1).ok());
  EXPECT_EQ(bias.copy().first, 300);
  EXPECT_EQ(bias.copy().end, 750);
  EXPECT_EQ(bias.copy().rows, 2 * 4 * 10);
  EXPECT_EQ(bias.copy().pitch, 456);  // 450 rounded up to eights
  EXPECT_EQ(bias.copy().class_columns, 456);
  EXPECT_EQ(bias.scratch_bytes(), (80 * 456 * 2 + 255) / 256 * 256);
}

// The copy engine reads columns only from multiples of 16 bytes.
TEST(CallBiasTest, PiecesBeginAtWholeVectorsOrTheBiasIsNotTaken) {
  const AttentionProblem problem = ProblemOf(1024);
  const auto copies = [&](std::vector<KvBlock> blocks, int32_t stride) {
    CallBias bias;
    EXPECT_TRUE(bias.Init(problem, {}, 10, blocks, stride).ok());
    return bias.copies();
  };
  const auto odd = BlockOf({{.length = 100, .position = 301}});  // the only block: its copy begins
                                                                 // there
  EXPECT_TRUE(TakesBias(problem, {}, odd, 1));
  EXPECT_TRUE(copies(odd, 1));
  const auto alike = BlockOf({{.length = 100, .position = 301},
                              {.local_begin = 100, .length = 50, .position = 301 + 160}});
  EXPECT_TRUE(TakesBias(problem, {}, alike, 1));
  EXPECT_TRUE(copies(alike, 1));
  const auto others = BlockOf(
      {{.length = 100, .position = 304}, {.local_begin = 100, .length = 50, .position = 700}});
  EXPECT_FALSE(TakesBias(problem, {}, others, 1));
  const auto whole = BlockOf(
      {{.length = 100, .position = 304}, {.local_begin = 100, .length = 50, .position = 704}});
  EXPECT_TRUE(TakesBias(problem, {}, whole, 1));
  EXPECT_FALSE(copies(whole, 1));
  EXPECT_TRUE(TakesBias(problem, {}, BlockOf({{0, 30, 0, 3, 4}, {30, 20, 0, 36, 4}}), 4));
  EXPECT_FALSE(TakesBias(problem, {}, BlockOf({{0, 30, 0, 3, 4}, {30, 20, 0, 44, 4}}), 4));
}

// Consecutive keys of a piece have consecutive columns, and no two keys share a column.
TEST(CallBiasTest, StridesBecomeColumnsThatFollowOneAnother) {
  for (int64_t second : {403, 402}) {  // with and without the first piece's residue
    const auto blocks = BlockOf({{0, 30, 0, 3, 4}, {30, 20, 0, second, 4}});
    const Piece& a = blocks[0].pieces[0];
    const Piece& b = blocks[0].pieces[1];
    ASSERT_EQ(a.PositionOf(1) - a.PositionOf(0), 4);
    CallBias bias;
    ASSERT_TRUE(bias.Init(ProblemOf(1024), {}, 10, blocks, 4).ok());
    ASSERT_TRUE(bias.copies());
    const BiasCopyParams& copy = bias.copy();
    EXPECT_EQ(copy.classes, (second - 3) % 4 == 0 ? 1 : 4);
    std::set<int64_t> seen;
    for (const Piece* piece : {&a, &b}) {
      const int64_t first = ColumnOf(copy, piece->PositionOf(0));
      for (int64_t i = 0; i < piece->length; ++i) {
        const int64_t column = ColumnOf(copy, piece->PositionOf(i));
        EXPECT_EQ(column, first + i);
        EXPECT_TRUE(seen.insert(column).second);
        EXPECT_LT(column, int64_t{copy.classes} * copy.class_columns);
        // The element that the copy kernel stores there.
        EXPECT_EQ(
            copy.first + column / copy.class_columns + copy.stride * (column % copy.class_columns),
            piece->PositionOf(i));
      }
    }
    EXPECT_LE(int64_t{copy.classes} * copy.class_columns, copy.pitch);
  }
}

// With a bias sharded by keys, a key's column is its row in the block, for every position.
TEST(CallBiasTest, OfOneThatIsCutByKeysRowsOfTheBlockCount) {
  AttentionProblem problem = ProblemOf(64, {.per_head = true});
  problem.terms.by_keys = true;
  problem.terms.rows = 1000;
  const auto odd = BlockOf(
      {{.length = 24, .position = 301}, {.local_begin = 24, .length = 40, .position = 703}});
  EXPECT_TRUE(BiasInVectors(problem, odd, 1));
  EXPECT_TRUE(TakesBias(problem, {}, odd, 1));
  EXPECT_FALSE(TakesBias(problem, {}, odd, 2)) << "rows and columns have different steps";
  CallBias bias;
  ASSERT_TRUE(bias.Init(problem, {}, 10, odd, 1).ok());
  EXPECT_FALSE(bias.copies());

  problem.terms.columns = 61;
  const auto short_rows = BlockOf(
      {{.length = 24, .position = 301}, {.local_begin = 24, .length = 37, .position = 703}});
  EXPECT_TRUE(TakesBias(problem, {}, short_rows, 1));
  ASSERT_TRUE(bias.Init(problem, {}, 10, short_rows, 1).ok());
  ASSERT_TRUE(bias.copies());
  EXPECT_EQ(bias.copy().first, 0);
  EXPECT_EQ(bias.copy().end, 61);
  EXPECT_EQ(bias.copy().rows, 4 * 1000);
  const auto between = BlockOf(
      {{.length = 21, .position = 304}, {.local_begin = 21, .length = 40, .position = 704}});
  EXPECT_FALSE(TakesBias(problem, {}, between, 1));

  problem.terms.bias.reset();
  problem.terms.mask = MaskForm{};
  EXPECT_TRUE(TakesBias(problem, {}, between, 1));
  EXPECT_FALSE(TakesBias(problem, {}, between, 2));
}

TEST(CallBiasTest, TooManyColumnsAreRefused) {
  CallBias bias;
  EXPECT_EQ(bias.Init(ProblemOf(int64_t{1} << 32), {}, 10, {}, 1).code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace ringattn::worker::cuda::sm90
