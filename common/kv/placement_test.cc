#include "common/kv/placement.h"

#include "common/attention/tensors.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

KvLayerGroup Group(int64_t heads, int64_t kv_heads, int64_t dim, std::vector<uint32_t> layers) {
  KvLayerGroup group;
  group.layers = std::move(layers);
  group.num_heads = heads;
  group.num_kv_heads = kv_heads;
  group.head_dim = group.head_dim_v = dim;
  return group;
}

TEST(KvPlacementTest, HeadsComeFirst) {
  KvCacheSpec spec;
  spec.groups = {Group(32, 8, 128, {0})};
  EXPECT_EQ(PlaceKvCache(spec, 1), (KvPlacement{1, 1}));
  EXPECT_EQ(PlaceKvCache(spec, 4), (KvPlacement{4, 1}));
  EXPECT_EQ(PlaceKvCache(spec, 3), (KvPlacement{1, 3}));
  EXPECT_EQ(PlaceKvCache(spec, 6), (KvPlacement{2, 3}));
  EXPECT_EQ(PlaceKvCache(spec, 16), (KvPlacement{8, 2}));
  spec.groups.push_back(Group(6, 6, 64, {1}));
  EXPECT_EQ(PlaceKvCache(spec, 8), (KvPlacement{2, 4}));
}

TEST(KvPlacementTest, PartsDivideBlocksOfAtLeastThirtyTwoEntries) {
  KvCacheSpec spec;
  spec.block_tokens = 64;
  EXPECT_EQ(DividedBlockTokens(spec, {8, 1}), 64);
  EXPECT_EQ(DividedBlockTokens(spec, {1, 2}), 32);
  EXPECT_EQ(DividedBlockTokens(spec, {2, 4}), 16);
  EXPECT_EQ(DividedBlockTokens(spec, {1, 8}), 0);
  EXPECT_EQ(DividedBlockTokens(spec, {1, 3}), 0);
  spec.block_tokens = 256;
  EXPECT_EQ(DividedBlockTokens(spec, {1, 16}), 16);
}

TEST(KvPlacementTest, RanksCoverTheHeadsInOrder) {
  const KvLayerGroup group = Group(12, 6, 64, {0});
  const KvPlacement placement{3, 2};
  int64_t next = 0;
  for (int part = 0; part < 3; ++part) {
    for (int position = 0; position < 2; ++position) {
      const KvHeadRange range = KvHeadsOf(group, placement, part * 2 + position);
      EXPECT_EQ(range.begin, next);
      EXPECT_EQ(range.end, next + 4);
      EXPECT_EQ(range.kv_begin, next / 2);
      EXPECT_EQ(range.kv_end, next / 2 + 2);
    }
    next += 4;
  }
}

TEST(KvPlacementTest, EntriesOnPartsAgreeWithTheDefinition) {
  for (const int64_t block : {1, 4, 16}) {
    for (int parts = 1; parts <= 4; ++parts) {
      for (int64_t begin = 0; begin < 70; begin += 3) {
        for (int64_t end = begin; end < 150; end += 7) {
          for (int part = 0; part < parts; ++part) {
            int64_t expected = 0;
            for (int64_t p = begin; p < end; ++p) expected += p / block % parts == part;
            ASSERT_EQ(EntriesOnPart(begin, end, block, parts, part), expected)
                << block << " " << parts << " " << begin << " " << end << " " << part;
          }
        }
      }
    }
  }
}

TEST(KvPlacementTest, MemoryFollowsTheWidestGroupOfEachPlane) {
  KvCacheSpec spec;
  spec.dtype = DType::kBFloat16;
  spec.block_tokens = 16;
  spec.blocks = 10;
  spec.groups = {Group(8, 4, 64, {0, 1}), Group(8, 2, 96, {2, 3, 4})};
  // Planes 0 and 1: 4 * 64 = 256 elements of k and of v; plane 2: 2 * 96.
  EXPECT_EQ(KvBytesOfRank(spec, {1, 1}, 0), (2 * 512 + 384) * 160 * 2);
  EXPECT_EQ(KvBytesOfRank(spec, {2, 2}, 3), (2 * 256 + 192) * 160 * 2);
  EXPECT_EQ(EntriesPerTableEntry(spec, {2, 2}), 32);
}

TEST(KvPlacementTest, TheLargestLegalCacheSaturates) {
  KvCacheSpec spec;
  spec.blocks = int64_t{1} << 24;
  spec.block_tokens = 256;
  std::vector<uint32_t> layers(1024);
  for (uint32_t i = 0; i < layers.size(); ++i) layers[i] = i;
  spec.groups = {Group(1024, 1024, 256, layers)};
  EXPECT_EQ(KvBytesOfRank(spec, {1, 1}, 0), kSaturatedBytes);
}

}  // namespace
}  // namespace ringattn
