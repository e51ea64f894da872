#include "tests/cases/long_cases.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "common/oracle/generator.h"
#include "tests/cases/covering_array.h"

namespace ringattn::tests {
namespace {

enum LongFactor {
  kDTypes,
  kWorldSizes,
  kLayouts,
  kCausal,
  kWindows,
  kSoftcaps,
  kHeads,
  kHeadDims,
  kBatches,
  kPacked,
  kRelations,
  kRecompute,
};

// Levels before it are Layout's values.
constexpr int kStripedBlocks = 4;
constexpr int kWorldSizeLevels[] = {2, 3, 4, 8};
constexpr int64_t kHeadLevels[][2] = {{1, 1}, {2, 2}, {2, 1}};
constexpr int64_t kHeadDimLevels[] = {8, 16, 33, 64};

void ChooseWindow(int level, int64_t length, int64_t shard, Random& random,
                  AttentionOptions& options) {
  switch (level) {
    case 1:  // inside one shard
      options.window_left = random.Between(0, shard / 2);
      options.window_right = random.Between(0, shard / 4);
      return;
    case 2:  // over several shards
      options.window_left = random.Between(shard, length - 1);
      options.window_right = random.Between(0, length - 1);
      return;
    case 3:  // one side
      options.window_left = random.Between(1, shard);
      return;
    default:
      return;
  }
}

LongCase MakeLongCase(int64_t index, const std::vector<int>& levels, uint64_t seed) {
  Random random(seed ^ 0x10C0, static_cast<uint64_t>(index));
  LongCase c;
  c.index = index;
  c.world_size = kWorldSizeLevels[levels[kWorldSizes]];
  const bool striped_blocks = levels[kLayouts] == kStripedBlocks;
  c.layout = striped_blocks ? Layout::kStriped : static_cast<Layout>(levels[kLayouts]);
  c.stripe = striped_blocks ? random.Between(2, 200) : 1;
  c.recompute_forward = levels[kRecompute] == 1;
  c.data_seed = random.Bits();
  c.spec.dtype = static_cast<DType>(levels[kDTypes]);

  AttentionShape& shape = c.spec.shape;
  shape.batch = levels[kBatches] + 1;
  shape.num_heads = kHeadLevels[levels[kHeads]][0];
  shape.num_kv_heads = kHeadLevels[levels[kHeads]][1];
  shape.head_dim = kHeadDimLevels[levels[kHeadDims]];
  shape.head_dim_v = random.Bits() % 2 == 0 ? shape.head_dim : random.Between(5, 40);
  // 520 and more rows per shard make at least two parts.
  const int64_t shard = random.Between(520, c.world_size <= 3 ? 1100 : 620);
  const int64_t length = shard * c.world_size + random.Between(0, c.world_size - 1);
  shape.seq_len_q = levels[kRelations] == 1 ? length / 2 : length;
  shape.seq_len_kv = levels[kRelations] == 2 ? length / 2 : length;
  shape.cu_seqlens_q = {0, shape.seq_len_q};
  shape.cu_seqlens_k = {0, shape.seq_len_kv};
  if (levels[kPacked] == 1) {
    const int64_t documents = random.Between(2, 6);
    shape.packed = true;
    shape.cu_seqlens_q = oracle::SplitDocuments(shape.seq_len_q, documents, true, c.data_seed);
    shape.cu_seqlens_k = oracle::SplitDocuments(shape.seq_len_kv, documents, true, c.data_seed);
  }
  AttentionOptions& options = c.spec.options;
  options.causal = levels[kCausal] == 1;
  options.softcap = levels[kSoftcaps] == 1 ? 5.0 : 0.0;
  options.softmax_scale = 1.0 / std::sqrt(static_cast<double>(shape.head_dim));
  ChooseWindow(levels[kWindows], length, shard, random, options);
  return c;
}

}  // namespace

std::string ToString(const LongCase& c) {
  const AttentionShape& shape = c.spec.shape;
  const AttentionOptions& options = c.spec.options;
  char text[512];
  std::snprintf(text, sizeof(text),
                "--long_case=%lld: backward%s dtype %d W=%d %s stripe %lld B=%lld Sq=%lld Sk=%lld "
                "H=%lld/%lld D=%lld Dv=%lld%s window=(%lld,%lld) softcap=%g documents=%lld%s",
                static_cast<long long>(c.index), c.recompute_forward ? " recompute" : "",
                static_cast<int>(c.spec.dtype), c.world_size, LayoutName(c.layout),
                static_cast<long long>(c.stripe), static_cast<long long>(shape.batch),
                static_cast<long long>(shape.seq_len_q), static_cast<long long>(shape.seq_len_kv),
                static_cast<long long>(shape.num_heads), static_cast<long long>(shape.num_kv_heads),
                static_cast<long long>(shape.head_dim), static_cast<long long>(shape.head_dim_v),
                options.causal ? " causal" : "", static_cast<long long>(options.window_left),
                static_cast<long long>(options.window_right), options.softcap,
                static_cast<long long>(shape.num_documents()), shape.packed ? " packed" : "");
  return text;
}

std::vector<LongCase> GenerateLongCases(uint64_t seed, int64_t count) {
  CoveringArray array(
      {3, 4, 5, 2, 4, 2, 3, 4, 2, 2, 3, 2},
      [](int a, int level_a, int b, int level_b) {
        // Packed problems have no batch.
        return !(a == kBatches && level_a > 0 && b == kPacked && level_b > 0) &&
               !(b == kBatches && level_b > 0 && a == kPacked && level_a > 0);
      },
      seed);
  std::vector<LongCase> cases;
  for (int64_t index = 0; index < count; ++index) {
    cases.push_back(MakeLongCase(index, array.Next(), seed));
  }
  return cases;
}

}  // namespace ringattn::tests
