#include "common/layout/dilation.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>

#include "common/attention/band.h"

namespace ringattn {
namespace {

AttentionSpec SpecOf(std::vector<int64_t> cu_seqlens, int64_t num_heads, int64_t num_kv_heads) {
  AttentionSpec spec;
  AttentionShape& shape = spec.shape;
  shape.packed = cu_seqlens.size() > 2;
  shape.seq_len_q = shape.seq_len_kv = cu_seqlens.back();
  shape.cu_seqlens_q = shape.cu_seqlens_k = std::move(cu_seqlens);
  shape.num_heads = num_heads;
  shape.num_kv_heads = num_kv_heads;
  return spec;
}

DilationLevel LevelOf(int64_t length, int64_t rate, int64_t heads,
                      std::optional<int64_t> offset = std::nullopt) {
  return {length, rate, offset, 0, heads};
}

// Returns the whole problem's token of each row of the shard.
std::vector<int64_t> TokensOf(const Shard& shard) {
  std::vector<int64_t> tokens;
  for (const Span& span : shard) {
    for (int64_t i = 0; i < span.length; ++i) tokens.push_back(span.begin + i * span.stride);
  }
  return tokens;
}

// Returns (document, segment, position) of a token.
std::tuple<int64_t, int64_t, int64_t> PlaceOf(const AttentionShape& shape, int64_t token,
                                              int64_t segment_length) {
  int64_t d = 0;
  while (shape.cu_seqlens_q[d + 1] <= token) ++d;
  const int64_t position = token - shape.cu_seqlens_q[d];
  return {d, position / segment_length, position};
}

// Compares every part's rows with the definition: which tokens a level selects, their positions,
// and that the part's documents are segments.
void CheckParts(const AttentionSpec& spec, const ShardPlan& plan, const std::string& what) {
  const std::vector<DilatedPart> parts = DilatedPartsOf(spec, plan);
  std::map<std::tuple<size_t, int64_t, int64_t>, int> times;  // level, head, token
  for (const DilatedPart& part : parts) {
    // A part's level follows from its heads' offsets and its selected tokens; try each.
    ASSERT_FALSE(part.q_heads.empty()) << what;
    const AttentionShape& shape = part.spec.shape;
    ASSERT_EQ(shape.num_heads, static_cast<int64_t>(part.q_heads.size())) << what;
    for (size_t h = 0; h < part.q_heads.size(); ++h) {
      EXPECT_EQ(part.kv_heads[h / shape.group_size()], part.q_heads[h] / spec.shape.group_size())
          << what;
    }
    std::map<int64_t, std::set<std::pair<int64_t, int64_t>>> segments;  // by the part's document
    int64_t rows = 0;
    for (int rank = 0; rank < plan.world_size; ++rank) {
      const std::vector<int64_t> tokens = TokensOf(plan.q[rank]);
      std::map<int64_t, int64_t> whole_row;
      for (const RowRun& run : part.q_rows[rank]) {
        for (int64_t i = 0; i < run.count; ++i) {
          whole_row[run.first + i] = run.begin + i * run.step;
        }
      }
      ASSERT_EQ(static_cast<int64_t>(whole_row.size()), RowsIn(part.plan.q[rank])) << what;
      for (const Piece& piece : QueryPieces(shape, part.plan.q[rank])) {
        for (int64_t i = 0; i < piece.length; ++i, ++rows) {
          const int64_t token = tokens[whole_row.at(piece.local_begin + i)];
          const DocumentPosition& place = shape.places[piece.document];
          const auto [d, segment, position] = PlaceOf(spec.shape, token, int64_t{1} << 40);
          EXPECT_EQ(place.document, d) << what;
          EXPECT_EQ(piece.PositionOf(i), position) << what;
          segments[piece.document].insert({d, position});
        }
      }
    }
    EXPECT_EQ(rows, shape.seq_len_q) << what;
    EXPECT_EQ(shape.num_documents(), static_cast<int64_t>(segments.size())) << what;
  }
}

TEST(DilationTest, PartsHaveTheTokensThatTheirLevelSelects) {
  std::mt19937 random(5);
  const auto draw = [&](int64_t from, int64_t to) {
    return std::uniform_int_distribution<int64_t>(from, to)(random);
  };
  for (int n = 0; n < 400; ++n) {
    std::vector<int64_t> cu_seqlens = {0};
    for (int64_t d = draw(1, 4); d > 0; --d) cu_seqlens.push_back(cu_seqlens.back() + draw(0, 90));
    const int64_t group = draw(1, 3);
    const int64_t kv_heads = draw(1, 3);
    AttentionSpec spec = SpecOf(cu_seqlens, group * kv_heads, kv_heads);
    const int64_t begin = draw(0, spec.shape.num_heads - 1);
    DilationLevel level{draw(1, 60), draw(1, 9), std::nullopt, begin,
                        draw(begin + 1, spec.shape.num_heads)};
    if (draw(0, 1) == 1) level.offset = draw(0, level.dilation_rate - 1);
    spec.options.dilation_levels = {level};
    const auto layout = static_cast<Layout>(draw(0, 3));
    const int world_size = static_cast<int>(draw(1, 5));
    const ShardPlan plan =
        MakeShardPlan(spec, layout, world_size, layout == Layout::kStriped ? draw(1, 7) : 1);
    const std::string what = "case " + std::to_string(n);
    CheckParts(spec, plan, what);
    // By definition, every selected pair of a head and a token is in exactly one part.
    std::set<std::pair<int64_t, int64_t>> selected, expected;
    for (const DilatedPart& part : DilatedPartsOf(spec, plan)) {
      for (int rank = 0; rank < world_size; ++rank) {
        const std::vector<int64_t> tokens = TokensOf(plan.q[rank]);
        for (const RowRun& run : part.q_rows[rank]) {
          for (int64_t i = 0; i < run.count; ++i) {
            for (int32_t h : part.q_heads) {
              EXPECT_TRUE(selected.insert({h, tokens[run.begin + i * run.step]}).second) << what;
            }
          }
        }
      }
    }
    for (int64_t h = level.head_begin; h < level.head_end; ++h) {
      for (int64_t token = 0; token < spec.shape.seq_len_q; ++token) {
        const auto [d, segment, position] = PlaceOf(spec.shape, token, level.segment_length);
        const int64_t offset = level.offset.value_or(h % level.dilation_rate);
        if (position % level.segment_length % level.dilation_rate == offset) {
          expected.insert({h, token});
        }
      }
    }
    EXPECT_EQ(selected, expected) << what;
  }
}

TEST(DilationTest, EvenGroupsOfQueryHeadsShareTheirKeyHeads) {
  AttentionSpec spec = SpecOf({0, 64}, 8, 2);
  spec.options.dilation_levels = {LevelOf(16, 2, 8)};
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 1);
  std::vector<DilatedPart> parts = DilatedPartsOf(spec, plan);
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[1].q_heads, (std::vector<int32_t>{1, 3, 5, 7}));
  EXPECT_EQ(parts[1].kv_heads, (std::vector<int32_t>{0, 1}));
  // Heads 0, 3 and 6 in groups of four: heads 0 and 3 share a key head; 6 has another.
  spec.options.dilation_levels = {LevelOf(16, 3, 8)};
  parts = DilatedPartsOf(spec, plan);
  ASSERT_EQ(parts.size(), 3u);
  EXPECT_EQ(parts[0].q_heads, (std::vector<int32_t>{0, 3, 6}));
  EXPECT_EQ(parts[0].kv_heads, (std::vector<int32_t>{0, 0, 1}));
}

TEST(DilationTest, TermsFollowHeadsAndDocuments) {
  AttentionSpec spec = SpecOf({0, 40, 100}, 4, 4);
  spec.options.alibi_slopes = {1, 2, 3, 4, 5, 6, 7, 8};  // two documents
  spec.options.dropout.threshold = 1;
  spec.options.dropout.first_head = 10;
  spec.options.sinks = true;
  spec.has_dlse = true;
  spec.shape.document_rules = {{true, -1, -1}, {false, 3, 3}};
  spec.options.dilation_levels = {LevelOf(32, 2, 4)};
  const std::vector<DilatedPart> parts =
      DilatedPartsOf(spec, MakeShardPlan(spec, Layout::kZigzag, 2));
  ASSERT_EQ(parts.size(), 2u);
  const AttentionSpec& part = parts[1].spec;
  EXPECT_EQ(part.options.alibi_slopes, (std::vector<float>{2, 4, 6, 8}));
  EXPECT_EQ(part.options.dropout.first_head, 11u);
  EXPECT_EQ(part.options.dropout.head_step, 2u);
  EXPECT_FALSE(part.options.sinks);
  EXPECT_FALSE(part.has_dlse);
  EXPECT_TRUE(part.options.dilation_levels.empty());
  // Segments of 32 and 8 tokens, then 32 and 28: every second token, starting at 1.
  EXPECT_EQ(part.shape.cu_seqlens_q, (std::vector<int64_t>{0, 16, 20, 36, 50}));
  EXPECT_EQ(part.shape.places,
            (std::vector<DocumentPosition>{{0, 1, 2}, {0, 33, 2}, {1, 1, 2}, {1, 33, 2}}));
  ASSERT_EQ(part.shape.document_rules.size(), 4u);
  EXPECT_TRUE(part.shape.document_rules[1].causal);
  EXPECT_EQ(part.shape.document_rules[2].window_left, 3);
}

TEST(DilationTest, CountsPartsAndSegments) {
  const AttentionSpec spec = SpecOf({0, 40, 100}, 4, 4);
  EXPECT_EQ(SegmentCount(spec.shape, LevelOf(32, 1, 4)), 4);
  EXPECT_EQ(SegmentCount(spec.shape, LevelOf(int64_t{1} << 40, 1, 4)), 2);
  AttentionOptions options;
  options.dilation_levels = {LevelOf(8, 3, 4), LevelOf(8, 9, 4), LevelOf(8, 9, 4, 0)};
  EXPECT_EQ(DilatedPartCount(options), 3 + 4 + 1);
}

TEST(DilationTest, SegmentsAreDocumentsOfThePlan) {
  AttentionSpec spec = SpecOf({0, 40, 40, 100}, 4, 4);
  EXPECT_EQ(PlannedDocuments(spec), 3);
  // 5 segments of 8 with 3 offsets and 8 with 4 offsets; 2 segments of the whole with 1 offset.
  spec.options.dilation_levels = {LevelOf(8, 3, 4), LevelOf(8, 9, 4), LevelOf(1000, 9, 4, 0)};
  EXPECT_EQ(PlannedDocuments(spec), 13 * 3 + 13 * 4 + 2);
}

}  // namespace
}  // namespace ringattn
