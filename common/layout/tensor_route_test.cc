#include "common/layout/tensor_route.h"

#include <cstring>
#include <limits>
#include <map>
#include <string>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

struct Case {
  std::string name;
  AttentionSpec spec;
  TensorId tensor;
};

AttentionSpec Spec(bool packed, std::vector<int64_t> q, std::vector<int64_t> k) {
  AttentionSpec spec;
  spec.dtype = DType::kBFloat16;
  spec.shape = {packed, packed ? 1 : 2, q.back(), k.back(), 4, 2, 6, 6, q, k};
  return spec;
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  const auto add = [&](std::string name, AttentionSpec spec, TensorId tensor) {
    cases.push_back({std::move(name), std::move(spec), tensor});
  };
  for (const bool packed : {false, true}) {
    const std::vector<int64_t> documents =
        packed ? std::vector<int64_t>{0, 7, 7, 50, 203} : std::vector<int64_t>{0, 203};
    AttentionSpec qkv = Spec(packed, documents, documents);
    qkv.shape.num_kv_heads = 4;
    qkv.shape.packing = Packing::kQkv;
    add("qkv", qkv, TensorId::kQkv);
    add("dqkv", qkv, TensorId::kDqkv);
    AttentionSpec kv = Spec(packed, {0, 5}, {0, 211});
    if (packed) kv = Spec(true, {0, 3, 3, 5}, {0, 11, 100, 211});
    kv.shape.packing = Packing::kKv;
    add("q beside kv", kv, TensorId::kQ);
    add("kv", kv, TensorId::kKv);
    add("dkv", kv, TensorId::kDkv);
  }
  for (const std::vector<int64_t>& documents : {std::vector<int64_t>{0, 7, 7, 50, 203},
                                                {0, 0, 3, 4},
                                                {0, 2000},
                                                {0, 0},
                                                {0, 600, 1200, 1210, 1900}}) {
    AttentionSpec spec = Spec(true, documents, documents);
    spec.lse_per_document = true;
    add("lse", spec, TensorId::kLse);
    add("dlse", spec, TensorId::kDlse);
    add("q beside lse", spec, TensorId::kQ);
  }
  return cases;
}

// Builds the client's tensor by definition from whole tensors of the parts; holes are 0xee.
std::string Whole(const Case& c, const std::map<TensorId, std::string>& parts) {
  const AttentionShape& shape = c.spec.shape;
  std::string whole;
  if (IsPerDocument(c.spec, c.tensor)) {
    for (int64_t d = 0; d < shape.num_documents(); ++d) {
      const int64_t begin = shape.cu_seqlens_q[d], length = shape.cu_seqlens_q[d + 1] - begin;
      for (int64_t h = 0; h < shape.num_heads; ++h) {
        whole += parts.at(c.tensor).substr((h * shape.seq_len_q + begin) * 4, length * 4);
        whole += std::string((LongestQueries(shape) - length) * 4, '\xee');
      }
    }
    return whole;
  }
  const TensorLayout layout = LayoutOf(c.spec, PartsOf(c.tensor)[0]);
  for (int64_t row = 0; row < layout.outer * layout.rows; ++row) {
    for (TensorId part : PartsOf(c.tensor)) {
      whole += parts.at(part).substr(row * layout.inner_bytes, layout.inner_bytes);
    }
  }
  return whole;
}

std::string Numbered(int64_t bytes, uint32_t seed) {
  std::string data(bytes, '\0');
  for (char& c : data) c = static_cast<char>((seed = seed * 1664525 + 1013904223) >> 24);
  return data;
}

template <typename Check>
void ForEachPlan(const Case& c, const Check& check) {
  for (Layout layout :
       {Layout::kContiguous, Layout::kZigzag, Layout::kStriped, Layout::kZigzagPerDocument}) {
    for (int world_size : {1, 2, 3, 8}) {
      for (int64_t stripe : {1, 3}) {
        if (stripe != 1 && layout != Layout::kStriped) continue;
        SCOPED_TRACE(testing::Message()
                     << c.name << " " << LayoutName(layout) << " " << world_size << " " << stripe);
        check(MakeShardPlan(c.spec, layout, world_size, stripe));
      }
    }
  }
}

TEST(TensorRoute, EveryByteLiesWhereTheDefinitionHasIt) {
  for (const Case& c : Cases()) {
    std::map<TensorId, std::string> parts;
    for (TensorId part : PartsOf(c.tensor)) {
      parts[part] = Numbered(LayoutOf(c.spec, part).bytes(), static_cast<uint32_t>(part));
    }
    const std::string whole = Whole(c, parts);
    ASSERT_EQ(static_cast<int64_t>(whole.size()), BytesOf(c.spec, c.tensor)) << c.name;
    ForEachPlan(c, [&](const ShardPlan& plan) {
      const TensorRoute route(c.spec, plan, c.tensor);
      ASSERT_EQ(route.global_bytes(), static_cast<int64_t>(whole.size()));
      // The shards, by the parts' maps, which have their own tests.
      std::map<std::pair<size_t, int>, std::string> local;
      for (size_t p = 0; p < route.parts().size(); ++p) {
        const ShardMap map(c.spec, plan, route.parts()[p]);
        for (int rank = 0; rank < plan.world_size; ++rank) {
          std::string& bytes = local[{p, rank}];
          bytes.resize(route.local_bytes(p, rank));
          for (const ByteRun& run : map.FromLocal(rank, 0, bytes.size())) {
            bytes.replace(run.local_offset, run.bytes,
                          parts[route.parts()[p]].substr(run.global_offset, run.bytes));
          }
        }
      }
      // Upload in chunks of an odd size.
      constexpr int64_t kPiece = 333;
      for (int64_t at = 0; at < route.global_bytes(); at += kPiece) {
        const int64_t bytes = std::min(kPiece, route.global_bytes() - at);
        int64_t next = at;
        for (const ByteRun& run : route.FromGlobal(at, bytes)) {
          ASSERT_EQ(run.global_offset, next);
          next += run.bytes;
          const std::string expected =
              run.rank == kNoRank ? std::string(run.bytes, '\xee')
                                  : local[{run.part, run.rank}].substr(run.local_offset, run.bytes);
          ASSERT_EQ(whole.substr(run.global_offset, run.bytes), expected);
        }
        ASSERT_EQ(next, at + bytes);
      }
      // Download, including the holes.
      std::string back(whole.size(), '\0');
      for (const auto& [place, bytes] : local) {
        for (size_t at = 0; at < bytes.size(); at += kPiece) {
          const int64_t size = std::min<int64_t>(kPiece, bytes.size() - at);
          for (const ByteRun& run : route.FromLocal(place.first, place.second, at, size)) {
            back.replace(run.global_offset, run.bytes, bytes.substr(run.local_offset, run.bytes));
          }
        }
      }
      route.ForEachHole(
          [&](int64_t offset, int64_t bytes) { back.replace(offset, bytes, bytes, '\xee'); });
      ASSERT_EQ(back, whole);
    });
  }
}

// An uploaded packed tensor has the shards of one tensor, [outer, local rows, parts, heads, dim].
TEST(TensorRoute, UploadsOfPackedTensorsStayWhole) {
  for (const Case& c : Cases()) {
    ForEachPlan(c, [&](const ShardPlan& plan) {
      ASSERT_TRUE(IsCutAsOne(plan, c.tensor));
      const TensorRoute route = TensorRoute::ForUpload(c.spec, plan, c.tensor);
      ASSERT_EQ(route.parts(), std::vector{c.tensor});
      ASSERT_EQ(route.global_bytes(), BytesOf(c.spec, c.tensor));
      const TensorRoute by_parts(c.spec, plan, c.tensor);
      if (by_parts.parts().size() == 1) return;
      const int64_t count = by_parts.parts().size();
      const int64_t inner = LayoutOf(c.spec, by_parts.parts()[0]).inner_bytes;
      for (const ByteRun& run : by_parts.FromGlobal(0, by_parts.global_bytes())) {
        const auto whole = route.FromGlobal(run.global_offset, run.bytes);
        ASSERT_EQ(whole.size(), 1u);
        ASSERT_EQ(whole[0].rank, run.rank);
        const int64_t row = run.local_offset / inner;
        ASSERT_EQ(whole[0].local_offset, (row * count + static_cast<int64_t>(run.part)) * inner +
                                             run.local_offset % inner);
      }
    });
  }
}

TEST(TensorRoute, PartsThatAreCutDifferentlyTravelApart) {
  AttentionSpec spec = Spec(false, {0, 40}, {0, 40});
  spec.shape.num_kv_heads = 4;
  spec.shape.packing = Packing::kQkv;
  ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 2);
  plan.kv = MakeShardPlan(spec, Layout::kZigzag, 2).kv;
  EXPECT_FALSE(IsCutAsOne(plan, TensorId::kQkv));
  EXPECT_TRUE(IsCutAsOne(plan, TensorId::kKv));
  EXPECT_TRUE(IsCutAsOne(plan, TensorId::kQ));
  EXPECT_EQ(TensorRoute::ForUpload(spec, plan, TensorId::kQkv).parts(), PartsOf(TensorId::kQkv));
}

// A rank sends each byte of its shard once, and a receiver that assembles the tensor buffers
// little.
TEST(TensorRoute, StreamsAreNearlyInTheOrderOfTheWhole) {
  for (const Case& c : Cases()) {
    ForEachPlan(c, [&](const ShardPlan& plan) {
      const TensorRoute route(c.spec, plan, c.tensor);
      for (int rank = 0; rank < plan.world_size; ++rank) {
        std::vector<std::vector<bool>> sent(route.parts().size());
        for (size_t p = 0; p < sent.size(); ++p) sent[p].resize(route.local_bytes(p, rank));
        // The client's offset of each byte, in the order sent.
        std::vector<int64_t> offsets;
        for (const LocalRange& range : route.StreamOrder(rank)) {
          ASSERT_GT(range.bytes, 0);
          for (int64_t at = range.offset; at < range.offset + range.bytes; ++at) {
            ASSERT_FALSE(sent[range.part][at]);
            sent[range.part][at] = true;
          }
          for (const ByteRun& run : route.FromLocal(range.part, rank, range.offset, range.bytes)) {
            for (int64_t i = 0; i < run.bytes; ++i) offsets.push_back(run.global_offset + i);
          }
        }
        for (const std::vector<bool>& part : sent) {
          ASSERT_EQ(std::count(part.begin(), part.end(), false), 0);
        }
        // Bytes that wait for one that is due: sent before it, needed after it.
        std::vector<int64_t> order = offsets;
        std::sort(order.begin(), order.end());
        std::map<int64_t, size_t> sent_at;
        for (size_t i = 0; i < offsets.size(); ++i) sent_at[offsets[i]] = i;
        for (size_t due = 0; due < order.size(); ++due) {
          const auto waiting =
              static_cast<int64_t>(sent_at[order[due]]) - static_cast<int64_t>(due);
          ASSERT_LE(waiting, 3 * kStreamBlockBytes);
        }
      }
    });
  }
}

}  // namespace
}  // namespace ringattn
