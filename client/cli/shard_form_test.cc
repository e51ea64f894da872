#include "client/cli/shard_form.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client::cli {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

AttentionSpec Documents() {
  AttentionSpec spec;
  spec.shape = {true, 1, 3, 3, 2, 2, 1, 1, {0, 1, 1, 3}, {0, 1, 1, 3}};
  return spec;
}

std::vector<float> Floats(const std::vector<uint8_t>& bytes) {
  const auto* begin = reinterpret_cast<const float*>(bytes.data());
  return {begin, begin + bytes.size() / sizeof(float)};
}

TEST(ShardForm, ComponentsOfAPackedTensor) {
  AttentionSpec spec = Documents();
  spec.shape.packing = Packing::kQkv;
  // [3 tokens, 3 components, 2 heads, 1]
  std::vector<float> qkv;
  for (int i = 0; i < 18; ++i) qkv.push_back(static_cast<float>(i));
  const auto part = [&](TensorId id) { return Floats(PartOfPacked(spec, id, BytesOf(qkv))); };
  EXPECT_THAT(part(TensorId::kQ), ElementsAre(0, 1, 6, 7, 12, 13));
  EXPECT_THAT(part(TensorId::kV), ElementsAre(4, 5, 10, 11, 16, 17));
  spec.shape.packing = Packing::kKv;
  qkv.resize(12);
  EXPECT_THAT(part(TensorId::kDk), ElementsAre(0, 1, 4, 5, 8, 9));
}

TEST(ShardForm, LseOfDocuments) {
  AttentionSpec spec = Documents();
  spec.lse_per_document = true;
  constexpr float kHole = -std::numeric_limits<float>::infinity();
  // [3 documents, 2 heads, 2]
  std::vector<float> lse = {1, kHole, 2, kHole, kHole, kHole, kHole, kHole, 3, 4, 5, 6};
  const auto flat = FlatOfDocuments(spec, TensorId::kLse, BytesOf(lse), true);
  ASSERT_TRUE(flat.ok()) << flat.status();
  EXPECT_THAT(Floats(*flat), ElementsAre(1, 3, 4, 2, 5, 6));
  lse[3] = 0;
  const auto wrong = FlatOfDocuments(spec, TensorId::kLse, BytesOf(lse), true);
  EXPECT_THAT(wrong.status().message(), HasSubstr("lse has 0 after the end of document 0, head 1"));
  EXPECT_TRUE(FlatOfDocuments(spec, TensorId::kDlse, BytesOf(lse), false).ok());
}

}  // namespace
}  // namespace ringattn::client::cli
