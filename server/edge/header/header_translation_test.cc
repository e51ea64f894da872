#include "server/edge/header/header_translation.h"

#include <string>

#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

// Four tokens of one fp32 head of size 4; each input has 64 bytes.
v1::ForwardRequest Request(const std::string& id, char fill, int inputs) {
  v1::ForwardRequest request;
  v1::ForwardHeader* header = request.mutable_header();
  header->set_request_id(id);
  header->set_dtype(v1::DATA_TYPE_FLOAT32);
  v1::AttentionShape* shape = header->mutable_shape();
  shape->set_batch(1);
  shape->set_seq_len_q(4);
  shape->set_seq_len_kv(4);
  shape->set_num_heads(1);
  shape->set_head_dim(4);
  const v1::TensorId tensors[] = {v1::TENSOR_ID_Q, v1::TENSOR_ID_K, v1::TENSOR_ID_V};
  for (int i = 0; i < inputs; ++i) {
    header->add_inline_tensors()->set_tensor(tensors[i]);
    header->mutable_inline_tensors(i)->set_data(std::string(64, fill));
  }
  return request;
}

HeaderRequest Read(v1::ForwardRequest first) {
  auto header = ReadHeader(std::move(first), Limits());
  EXPECT_TRUE(std::holds_alternative<HeaderRequest>(header));
  return std::get<HeaderRequest>(std::move(header));
}

// A retry has equal tensors, so a reused id is found. Plans depend on the recipe only.
TEST(HeaderTranslationTest, EqualRecipesDifferInTheirTensors) {
  const HeaderRequest first = Read(Request("a", 'x', 3));
  const HeaderRequest retry = Read(Request("b", 'x', 3));
  EXPECT_EQ(first.fingerprint, retry.fingerprint);
  const HeaderRequest other = Read(Request("a", 'y', 3));
  EXPECT_NE(first.fingerprint, other.fingerprint);
  EXPECT_EQ(first.recipe_fingerprint, other.recipe_fingerprint);
  v1::ForwardRequest causal = Request("a", 'x', 3);
  causal.mutable_header()->mutable_options()->set_causal(true);
  EXPECT_NE(Read(causal).recipe_fingerprint, first.recipe_fingerprint);
}

// The plan of a prepared request serves its runs with every form of reply.
TEST(HeaderTranslationTest, EqualRecipesDifferInPrepareAndTheFormOfTheReply) {
  const HeaderRequest plain = Read(Request("a", 'x', 0));
  v1::ForwardRequest prepare = Request("a", 'x', 0);
  prepare.mutable_header()->mutable_prepare();
  const HeaderRequest prepared = Read(prepare);
  EXPECT_EQ(prepared.recipe_fingerprint, plain.recipe_fingerprint);
  EXPECT_NE(prepared.fingerprint, plain.fingerprint);
  EXPECT_TRUE(prepared.has_all_inputs());
  v1::ForwardRequest single = Request("a", 'x', 0);
  v1::ReplyOptions* reply = single.mutable_header()->mutable_reply();
  reply->set_single_message(true);
  reply->set_max_chunk_bytes(1 << 20);
  reply->set_with_timeline(true);
  EXPECT_EQ(Read(single).recipe_fingerprint, plain.recipe_fingerprint);
  EXPECT_NE(Read(single).fingerprint, plain.fingerprint);
  reply->set_output_dtype(v1::DATA_TYPE_FLOAT32);
  EXPECT_NE(Read(single).recipe_fingerprint, plain.recipe_fingerprint);
}

TEST(HeaderTranslationTest, InlineTensorsMoveToTheRequest) {
  const HeaderRequest all = Read(Request("a", 'x', 3));
  EXPECT_TRUE(all.has_all_inputs());
  ASSERT_EQ(all.inline_tensors->size(), 3u);
  EXPECT_EQ(all.inline_tensors->at(2).tensor, TensorId::kV);
  EXPECT_EQ(all.inline_tensors->at(2).bytes, std::string(64, 'x'));
  EXPECT_FALSE(Read(Request("a", 'x', 2)).has_all_inputs());
  EXPECT_TRUE(Read(Request("a", 'x', 0)).inline_tensors->empty());
}

}  // namespace
}  // namespace ringattn::server
