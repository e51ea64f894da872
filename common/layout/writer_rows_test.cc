#include "common/layout/writer_rows.h"

#include <vector>

#include <gtest/gtest.h>

namespace ringattn {
namespace {

AttentionSpec SpecOf(int64_t tokens) {
  AttentionSpec spec;
  spec.shape.batch = 2;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = tokens;
  spec.shape.num_heads = 4;
  spec.shape.num_kv_heads = 2;
  spec.shape.head_dim = spec.shape.head_dim_v = 8;
  spec.dtype = DType::kFloat32;
  return spec;
}

TEST(CheckCoverTest, AcceptsPartitions) {
  EXPECT_EQ(CheckCover({{{0, 5}}, {{5, 5}}}, 10), "");
  EXPECT_EQ(CheckCover({{{0, 2}, {8, 2}}, {{2, 6}}}, 10), "");
  EXPECT_EQ(CheckCover({{{0, 4, 3}}, {{1, 3, 3}}, {{2, 3, 3}}}, 10), "");
  EXPECT_EQ(CheckCover({{{0, 10}}, {}}, 10), "");
  EXPECT_EQ(CheckCover({{}, {}}, 0), "");
}

TEST(CheckCoverTest, NamesTheToken) {
  EXPECT_EQ(CheckCover({{{0, 4}}, {{5, 5}}}, 10), "no shard has token 4");
  EXPECT_EQ(CheckCover({{{0, 5}}, {{5, 4}}}, 10), "no shard has token 9");
  EXPECT_EQ(CheckCover({{{0, 6}}, {{5, 5}}}, 10),
            "shard 1 has token 5, which another span has too");
  EXPECT_EQ(CheckCover({{{0, 5}}, {{5, 6}}}, 10),
            "shard 1 has token 10, but the axis has 10 tokens");
  EXPECT_EQ(CheckCover({{{0, 5, 2}}, {{1, 4, 2}}}, 10),
            "the span of shard 1 at token 1 with stride 2 has 4 tokens; of 10 it must have 5");
  EXPECT_EQ(CheckCover({{{0, 5, 2}}, {{1, 5}}}, 10),
            "the span of shard 1 at token 1 has stride 1, others have 2");
  EXPECT_EQ(CheckCover({{{0, 5, 2}}, {{1, 5, 2}, {2, 4, 2}}}, 10),
            "the span of shard 1 with stride 2 begins at token 2, not below its stride");
  EXPECT_EQ(CheckCover({{{0, 5, 2}}}, 10), "no shard has token 1");
}

TEST(RestOfTest, CompletesAPartition) {
  EXPECT_EQ(RestOf({{2, 3}, {8, 1}}, 10), (Shard{{0, 2}, {5, 3}, {9, 1}}));
  EXPECT_EQ(RestOf({{1, 3, 4}}, 10), (Shard{{0, 3, 4}, {2, 2, 4}, {3, 2, 4}}));
  EXPECT_EQ(RestOf({}, 10), (Shard{{0, 10}}));
  EXPECT_EQ(RestOf({{0, 10}}, 10), Shard());
  for (const Shard& shard : {Shard{{2, 3}, {8, 1}}, Shard{{1, 3, 4}}, Shard{{3, 2, 4}}}) {
    EXPECT_EQ(CheckCover({shard, RestOf(shard, 10)}, 10), "");
  }
}

TEST(WriterRowsTest, SizesAreThoseOfItsOwnTokens) {
  const AttentionSpec spec = SpecOf(10);
  const WriterRows rows{{{0, 3}}, {{0, 2}, {8, 2}}};
  EXPECT_EQ(DimensionsOf(spec, rows, TensorId::kQ), (std::vector<int64_t>{2, 3, 4, 8}));
  EXPECT_EQ(DimensionsOf(spec, rows, TensorId::kK), (std::vector<int64_t>{2, 4, 2, 8}));
  EXPECT_EQ(DimensionsOf(spec, rows, TensorId::kLse), (std::vector<int64_t>{2, 4, 3}));
  EXPECT_EQ(BytesOf(spec, rows, TensorId::kQ), 2 * 3 * 4 * 8 * 4);
  EXPECT_EQ(BytesOf(spec, rows, TensorId::kV), 2 * 4 * 2 * 8 * 4);
  EXPECT_EQ(BytesOf(spec, rows, TensorId::kLse), 2 * 4 * 3 * 4);
  EXPECT_FALSE(IsSplitByWriters(TensorId::kSinks));
  EXPECT_EQ(BytesOf(spec, rows, TensorId::kSinks), BytesOf(spec, TensorId::kSinks));
}

TEST(WriterRowsTest, RangesOfAWriterInAShard) {
  const AttentionSpec spec = SpecOf(12);
  const ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 2);
  const std::vector<WriterRows> zigzag = {{{{0, 3}, {9, 3}}, {{0, 12}}}, {{{3, 6}}, {}}};
  const ShardMap shards(spec, plan, TensorId::kLse);
  const ShardMap writers = MapToWriters(spec, zigzag, TensorId::kLse);
  // Rank 0 has tokens 0 to 5 of each of the eight rows [batch, head]: writer 0 has three of them.
  const std::vector<WriterRange> ranges = RangesOfWriter(shards, 0, writers, 0, 0);
  ASSERT_EQ(ranges.size(), 8u);
  EXPECT_EQ(ranges[0], (WriterRange{0, 12}));
  EXPECT_EQ(ranges[1], (WriterRange{24, 36}));
  EXPECT_EQ(RangesOfWriter(shards, 0, writers, 1, 0)[0], (WriterRange{12, 24}));
  EXPECT_EQ(RangesOfWriter(shards, 0, writers, 0, 12),
            (std::vector<WriterRange>{{0, 7 * 24 + 12}}));
}

// Every byte of every shard belongs to the ranges of exactly one writer.
TEST(WriterRowsTest, RangesCoverEachByteOnce) {
  const AttentionSpec spec = SpecOf(24);
  for (Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kStriped}) {
    const ShardPlan plan = MakeShardPlan(spec, layout, 3);
    for (const std::vector<Shard>& cut :
         {MakeShardPlan(spec, Layout::kZigzag, 2).q, MakeShardPlan(spec, Layout::kStriped, 4).q}) {
      std::vector<WriterRows> rows;
      for (const Shard& shard : cut) rows.push_back({shard, shard});
      ASSERT_EQ(CheckCover(cut, 24), "");
      for (TensorId id : {TensorId::kQ, TensorId::kLse, TensorId::kV}) {
        const ShardMap shards(spec, plan, id);
        const ShardMap writers = MapToWriters(spec, rows, id);
        for (int rank = 0; rank < 3; ++rank) {
          std::vector<int> covered(shards.local_bytes(rank));
          for (int writer = 0; writer < static_cast<int>(rows.size()); ++writer) {
            for (const WriterRange& range : RangesOfWriter(shards, rank, writers, writer, 0)) {
              for (int64_t at = range.begin; at < range.end; ++at) ++covered[at];
            }
          }
          EXPECT_EQ(covered, std::vector<int>(covered.size(), 1));
        }
      }
    }
  }
}

}  // namespace
}  // namespace ringattn
