#include "common/layout/shard_plan.h"

#include <algorithm>
#include <chrono>
#include <random>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kZigzag, Layout::kStriped,
                               Layout::kZigzagPerDocument};

AttentionSpec DenseSpec(int64_t sq, int64_t sk) {
  AttentionSpec spec;
  spec.dtype = DType::kBFloat16;
  spec.shape.batch = 2;
  spec.shape.seq_len_q = sq;
  spec.shape.seq_len_kv = sk;
  spec.shape.num_heads = 2;
  spec.shape.head_dim = 3;
  spec.shape.head_dim_v = 3;
  spec.shape.cu_seqlens_q = {0, sq};
  spec.shape.cu_seqlens_k = {0, sk};
  return spec;
}

std::vector<int64_t> TokensOf(const Shard& shard) {
  std::vector<int64_t> tokens;
  for (const Span& span : shard) {
    for (int64_t i = 0; i < span.length; ++i) tokens.push_back(span.begin + i * span.stride);
  }
  return tokens;
}

TEST(ShardPlanTest, EveryTokenHasOneOwner) {
  for (Layout layout : kLayouts) {
    for (int world_size = 1; world_size <= 9; ++world_size) {
      for (int64_t stripe : {1, 2, 5, 16}) {
        for (int64_t tokens : {0, 1, 2, 7, 16, 61, 128, 200}) {
          const ShardPlan plan =
              MakeShardPlan(DenseSpec(tokens, tokens / 2), layout, world_size, stripe);
          ASSERT_EQ(plan.q.size(), static_cast<size_t>(world_size));
          std::vector<int> owners(tokens, 0);
          for (const Shard& shard : plan.q) {
            for (size_t i = 0; i < shard.size(); ++i) {
              EXPECT_GT(shard[i].length, 0);
              if (i > 0) {
                EXPECT_LT(shard[i - 1].begin, shard[i].begin);
              }
            }
            for (int64_t token : TokensOf(shard)) {
              ASSERT_LT(token, tokens);
              ++owners[token];
            }
          }
          EXPECT_EQ(std::count(owners.begin(), owners.end(), 1), tokens);
        }
      }
    }
  }
}

TEST(ShardPlanTest, LayoutsAreWhatTheirNamesSay) {
  const AttentionSpec spec = DenseSpec(16, 16);
  EXPECT_EQ(MakeShardPlan(spec, Layout::kContiguous, 4).q[1], (Shard{{4, 4, 1}}));
  EXPECT_EQ(MakeShardPlan(spec, Layout::kZigzag, 4).q[1], (Shard{{2, 2, 1}, {12, 2, 1}}));
  EXPECT_EQ(MakeShardPlan(spec, Layout::kZigzag, 4).q[3], (Shard{{6, 4, 1}}));
  EXPECT_EQ(MakeShardPlan(spec, Layout::kStriped, 4).q[1], (Shard{{1, 4, 4}}));
  EXPECT_EQ(MakeShardPlan(spec, Layout::kStriped, 2, 4).q[1], (Shard{{4, 4, 1}, {12, 4, 1}}));
}

TEST(ShardPlanTest, LongDocumentsAreCutByThemselves) {
  AttentionSpec spec = DenseSpec(2200, 1700);
  spec.shape.batch = 1;
  spec.shape.packed = true;
  // With 2 ranks a document is long from 512 tokens on: the second one because of its keys, and the
  // last one.
  spec.shape.cu_seqlens_q = {0, 100, 200, 300, 400, 2200};
  spec.shape.cu_seqlens_k = {0, 50, 650, 660, 700, 1700};
  const ShardPlan plan = MakeShardPlan(spec, Layout::kZigzagPerDocument, 2);
  // Units of 100, 100, 200 (two short documents) and 1,800 queries.
  EXPECT_EQ(plan.q[0],
            (Shard{{0, 25, 1}, {75, 50, 1}, {175, 75, 1}, {350, 500, 1}, {1750, 450, 1}}));
  EXPECT_EQ(plan.q[1], (Shard{{25, 50, 1}, {125, 50, 1}, {250, 100, 1}, {850, 900, 1}}));
  EXPECT_EQ(RowsIn(plan.kv[0]) + RowsIn(plan.kv[1]), 1700);
  // 150 of the 600 keys in the second document's first slice, after 12 keys of the first document.
  EXPECT_EQ(plan.kv[0][0], (Span{0, 12, 1}));
  EXPECT_EQ(plan.kv[0][1], (Span{37, 163, 1}));
  EXPECT_EQ(MakeShardPlan(DenseSpec(900, 800), Layout::kZigzagPerDocument, 3).q,
            MakeShardPlan(DenseSpec(900, 800), Layout::kZigzag, 3).q);
}

TEST(ShardPlanTest, ManyDocumentsMakeFewSpans) {
  AttentionSpec spec = DenseSpec(1 << 24, 1 << 24);
  spec.shape.packed = true;
  spec.shape.cu_seqlens_q.clear();
  for (int64_t begin = 0; begin <= 1 << 24; begin += 1 << 11) {
    spec.shape.cu_seqlens_q.push_back(begin);
  }
  spec.shape.cu_seqlens_k = spec.shape.cu_seqlens_q;
  const ShardPlan plan = MakeShardPlan(spec, Layout::kZigzagPerDocument, 2);
  EXPECT_LE(static_cast<int64_t>(plan.q[0].size()), 4 * kMaxUnits);
  EXPECT_EQ(RowsIn(plan.q[0]), 1 << 23);
}

TEST(ShardPlanTest, SlicesDifferByAtMostOneToken) {
  for (int64_t tokens : {0, 3, 17, 100, 1000003}) {
    const ShardPlan plan = MakeShardPlan(DenseSpec(tokens, tokens), Layout::kContiguous, 7);
    int64_t least = tokens, most = 0;
    for (const Shard& shard : plan.kv) {
      least = std::min(least, RowsIn(shard));
      most = std::max(most, RowsIn(shard));
    }
    EXPECT_LE(most - least, 1);
  }
}

TEST(ShardPlanTest, AStripeMayBeAnyLength) {
  const ShardPlan plan =
      MakeShardPlan(DenseSpec(1000, 1000), Layout::kStriped, 4, int64_t{1} << 62);
  EXPECT_EQ(RowsIn(plan.q[0]), 1000);
  EXPECT_TRUE(plan.q[1].empty());
  for (int64_t stripe : {1, 7, 64, 1000, 5000}) {
    const ShardPlan striped =
        MakeShardPlan(DenseSpec(1 << 20, 1 << 20), Layout::kStriped, 4, stripe);
    EXPECT_EQ(striped.q[0].size(), stripe == 1 ? 1 : (((1 << 20) + stripe - 1) / stripe + 3) / 4);
    // Local rows are in the tensor's order for every stripe.
    for (size_t i = 1; i < striped.q[0].size(); ++i) {
      ASSERT_LE(striped.q[0][i - 1].begin + striped.q[0][i - 1].length, striped.q[0][i].begin);
    }
  }
}

TEST(ShardPlanTest, PiecesFollowDocuments) {
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    std::vector<int64_t> cu_seqlens = {0};
    const int documents = random() % 6 + 1;
    for (int d = 0; d < documents; ++d) {
      cu_seqlens.push_back(cu_seqlens.back() + (random() % 3 == 0 ? 0 : random() % 40));
    }
    const int64_t total = cu_seqlens.back();
    const int world_size = random() % 8 + 1;
    const ShardPlan plan = MakeShardPlan(DenseSpec(total, total), kLayouts[random() % 4],
                                         world_size, random() % 6 + 1);
    for (const Shard& shard : plan.q) {
      const std::vector<Piece> pieces = CutIntoPieces(shard, cu_seqlens);
      const std::vector<int64_t> tokens = TokensOf(shard);
      size_t local = 0;
      for (const Piece& piece : pieces) {
        ASSERT_EQ(piece.local_begin, static_cast<int64_t>(local));
        ASSERT_GT(piece.length, 0);
        for (int64_t r = 0; r < piece.length; ++r, ++local) {
          ASSERT_EQ(cu_seqlens[piece.document] + piece.PositionOf(r), tokens[local]);
          ASSERT_LT(tokens[local], cu_seqlens[piece.document + 1]);
        }
      }
      ASSERT_EQ(local, tokens.size());

      const int64_t rows = static_cast<int64_t>(tokens.size());
      const int64_t begin = random() % (rows + 1);
      const int64_t end = begin + random() % (rows - begin + 1);
      int64_t sliced = 0;
      for (const Piece& piece : SlicePieces(pieces, begin, end)) {
        ASSERT_EQ(piece.local_begin, sliced);
        for (int64_t r = 0; r < piece.length; ++r, ++sliced) {
          ASSERT_EQ(cu_seqlens[piece.document] + piece.PositionOf(r), tokens[begin + sliced]);
        }
      }
      ASSERT_EQ(sliced, end - begin);
    }
  }
}

// Computes the local bytes of a tensor by brute force: element [outer, token, byte] is global byte
// (outer * rows + token) * inner + byte.
TEST(ShardMapTest, RunsEqualBruteForce) {
  std::mt19937 random(5);
  for (int round = 0; round < 500; ++round) {
    const int64_t tokens = random() % 50 + 1;
    const int world_size = random() % 8 + 1;
    const AttentionSpec spec = DenseSpec(tokens, tokens);
    const ShardPlan plan =
        MakeShardPlan(spec, kLayouts[random() % 4], world_size, random() % 6 + 1);
    const TensorLayout layout = LayoutOf(spec, random() % 2 == 0 ? TensorId::kQ : TensorId::kLse);
    const ShardMap map(layout, plan.q);

    struct Place {
      int rank;
      int64_t local;
    };
    std::vector<Place> place_of(layout.bytes());
    std::vector<std::vector<int64_t>> global_of(world_size);
    for (int rank = 0; rank < world_size; ++rank) {
      for (int64_t outer = 0; outer < layout.outer; ++outer) {
        for (int64_t token : TokensOf(plan.q[rank])) {
          for (int64_t byte = 0; byte < layout.inner_bytes; ++byte) {
            const int64_t global = (outer * tokens + token) * layout.inner_bytes + byte;
            place_of[global] = {rank, static_cast<int64_t>(global_of[rank].size())};
            global_of[rank].push_back(global);
          }
        }
      }
      ASSERT_EQ(map.local_bytes(rank), static_cast<int64_t>(global_of[rank].size()));
    }

    const int64_t begin = random() % (layout.bytes() + 1);
    const int64_t bytes = random() % (layout.bytes() - begin + 1);
    int64_t at = begin;
    for (const ByteRun& run : map.FromGlobal(begin, bytes)) {
      ASSERT_EQ(run.global_offset, at);
      ASSERT_GT(run.bytes, 0);
      for (int64_t i = 0; i < run.bytes; ++i, ++at) {
        ASSERT_EQ(run.rank, place_of[at].rank);
        ASSERT_EQ(run.local_offset + i, place_of[at].local);
      }
    }
    ASSERT_EQ(at, begin + bytes);

    const int rank = random() % world_size;
    const int64_t local_bytes = map.local_bytes(rank);
    const int64_t local_begin = random() % (local_bytes + 1);
    const int64_t local_end = local_begin + random() % (local_bytes - local_begin + 1);
    at = local_begin;
    for (const ByteRun& run : map.FromLocal(rank, local_begin, local_end - local_begin)) {
      ASSERT_EQ(run.rank, rank);
      ASSERT_EQ(run.local_offset, at);
      for (int64_t i = 0; i < run.bytes; ++i, ++at) {
        ASSERT_EQ(run.global_offset + i, global_of[rank][at]);
      }
    }
    ASSERT_EQ(at, local_end);
  }
}

TEST(ShardMapTest, ChunksOfContiguousLayoutsMapToFewRuns) {
  AttentionSpec spec = DenseSpec(1 << 20, 1 << 20);
  spec.shape.num_heads = 32;
  spec.shape.head_dim = 128;
  const TensorLayout layout = LayoutOf(spec, TensorId::kQ);
  const ShardMap contiguous(layout, MakeShardPlan(spec, Layout::kContiguous, 8).q);
  const ShardMap zigzag(layout, MakeShardPlan(spec, Layout::kZigzag, 8).q);
  const ShardMap single(layout, MakeShardPlan(spec, Layout::kContiguous, 1).q);
  constexpr int64_t kChunk = 1 << 20;
  for (int64_t offset = 0; offset < layout.bytes(); offset += 997 * kChunk) {
    EXPECT_LE(contiguous.FromGlobal(offset, kChunk).size(), 2u);
    EXPECT_LE(zigzag.FromGlobal(offset, kChunk).size(), 2u);
  }
  EXPECT_EQ(single.FromGlobal(0, layout.bytes()).size(), 1u);
  EXPECT_EQ(contiguous.FromGlobal(0, layout.bytes()).size(), 16u);
  EXPECT_EQ(contiguous.FromLocal(3, 0, contiguous.local_bytes(3)).size(), 2u);
}

TEST(ShardMapTest, EmptyTensors) {
  const AttentionSpec spec = DenseSpec(0, 5);
  const ShardMap map(LayoutOf(spec, TensorId::kQ), MakeShardPlan(spec, Layout::kZigzag, 3).q);
  EXPECT_EQ(map.global_bytes(), 0);
  EXPECT_TRUE(map.FromGlobal(0, 0).empty());
  EXPECT_TRUE(map.FromLocal(2, 0, 0).empty());
}

TEST(ShardPlanTest, Prints) {
  const std::string text = ToString(MakeShardPlan(DenseSpec(16, 16), Layout::kZigzag, 4));
  EXPECT_NE(text.find("zigzag, 4 ranks"), std::string::npos) << text;
  EXPECT_NE(text.find("[2,4) [12,14)"), std::string::npos) << text;
}

}  // namespace
}  // namespace ringattn
