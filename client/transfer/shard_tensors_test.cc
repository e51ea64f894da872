#include "client/transfer/shard_tensors.h"

#include <numeric>
#include <random>

#include "common/attention/attention_spec.h"
#include "common/wire/crc32c.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

using testing::HasSubstr;
using Tickets = google::protobuf::RepeatedPtrField<v1::ShardTicket>;

AttentionSpec SpecOf(int64_t q, int64_t kv) {
  AttentionSpec spec;
  spec.shape.batch = 2;
  spec.shape.seq_len_q = q;
  spec.shape.seq_len_kv = kv;
  spec.shape.num_heads = 3;
  spec.shape.num_kv_heads = 1;
  spec.shape.head_dim = spec.shape.head_dim_v = 5;
  spec.shape.cu_seqlens_q = {0, q};
  spec.shape.cu_seqlens_k = {0, kv};
  return spec;
}

void AddSpans(const Shard& shard, google::protobuf::RepeatedPtrField<v1::TokenSpan>* spans) {
  for (const Span& span : shard) {
    v1::TokenSpan* added = spans->Add();
    added->set_begin(span.begin);
    added->set_count(span.length);
    added->set_stride(span.stride);
  }
}

Tickets TicketsOf(const ShardPlan& plan) {
  Tickets tickets;
  for (int rank = 0; rank < plan.world_size; ++rank) {
    v1::ShardTicket* ticket = tickets.Add();
    ticket->set_rank(rank);
    ticket->add_endpoints("host:1");
    ticket->set_token("t");
    AddSpans(plan.q[rank], ticket->mutable_q());
    AddSpans(plan.kv[rank], ticket->mutable_kv());
  }
  return tickets;
}

std::vector<uint8_t> RandomBytes(int64_t bytes) {
  std::vector<uint8_t> data(bytes);
  std::minstd_rand random(static_cast<unsigned>(bytes));
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(random());
  return data;
}

v1::TensorId Number(TensorId id) { return static_cast<v1::TensorId>(id); }

// The inputs cut for members equal the shards of the planner's own map. Outputs that members return
// in other pieces end up in their places.
TEST(ShardTensors, EveryLayoutIsSplitAndReassembled) {
  for (const Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kStriped}) {
    for (const int world : {1, 2, 3, 7}) {
      const AttentionSpec spec = SpecOf(41, 6);
      const ShardPlan plan = MakeShardPlan(spec, layout, world, layout == Layout::kStriped ? 2 : 1);
      const auto q = RandomBytes(BytesOf(spec, TensorId::kQ));
      const auto k = RandomBytes(BytesOf(spec, TensorId::kK));
      const auto sinks = RandomBytes(12);
      std::vector<uint8_t> out(BytesOf(spec, TensorId::kOut)), lse(BytesOf(spec, TensorId::kLse));
      TensorLayout replicated{1, 3, 4, Axis::kReplicated};
      auto made =
          ShardTensors::Make(TicketsOf(plan),
                             {{Number(TensorId::kQ), ConstBytes(q), LayoutOf(spec, TensorId::kQ)},
                              {Number(TensorId::kK), ConstBytes(k), LayoutOf(spec, TensorId::kK)},
                              {v1::TENSOR_ID_SINKS, ConstBytes(sinks), replicated}},
                             {{Number(TensorId::kOut), MutableBytes(out.data(), out.size()),
                               LayoutOf(spec, TensorId::kOut)},
                              {Number(TensorId::kLse), MutableBytes(lse.data(), lse.size()),
                               LayoutOf(spec, TensorId::kLse)}},
                             37);
      ASSERT_TRUE(made.ok()) << made.status();
      ShardTensors& tensors = **made;
      EXPECT_EQ(tensors.bytes_up(), q.size() + k.size() + world * sinks.size());
      EXPECT_EQ(tensors.bytes_down(), out.size() + lse.size());
      const auto answer = RandomBytes(out.size());
      for (int rank = 0; rank < world; ++rank) {
        std::map<int, std::vector<uint8_t>> cut;
        while (const auto chunk = tensors.Next(rank)) {
          EXPECT_LE(chunk->bytes, 37u);
          std::vector<uint8_t>& to = cut[chunk->tensor];
          EXPECT_EQ(chunk->offset, to.size());
          for (const ConstBytes& piece : chunk->pieces) {
            to.insert(to.end(), piece.begin(), piece.end());
          }
        }
        EXPECT_EQ(cut[v1::TENSOR_ID_SINKS], sinks);
        const ShardMap map(spec, plan, TensorId::kQ);
        std::vector<uint8_t> expected(map.local_bytes(rank));
        for (const ByteRun& run : map.FromLocal(rank, 0, map.local_bytes(rank))) {
          std::copy_n(q.begin() + run.global_offset, run.bytes,
                      expected.begin() + run.local_offset);
        }
        EXPECT_EQ(cut[v1::TENSOR_ID_Q], expected);

        const ShardMap down(spec, plan, TensorId::kOut);
        std::vector<uint8_t> local(down.local_bytes(rank));
        for (const ByteRun& run : down.FromLocal(rank, 0, down.local_bytes(rank))) {
          std::copy_n(answer.begin() + run.global_offset, run.bytes,
                      local.begin() + run.local_offset);
        }
        for (size_t at = 0; at < local.size(); at += 29) {
          const size_t bytes = std::min<size_t>(29, local.size() - at);
          const wire::Fragment pieces[] = {{local.data() + at, bytes / 2},
                                           {local.data() + at + bytes / 2, bytes - bytes / 2}};
          ASSERT_TRUE(tensors
                          .Add(rank, {v1::TENSOR_ID_OUT, at, wire::Crc32c(&local[at], bytes)},
                               pieces, bytes)
                          .ok());
        }
        EXPECT_FALSE(tensors.complete());
        const std::vector<uint8_t> zeros(ShardMap(spec, plan, TensorId::kLse).local_bytes(rank));
        const wire::Fragment all[] = {{zeros.data(), zeros.size()}};
        ASSERT_TRUE(tensors.Add(rank, {v1::TENSOR_ID_LSE, 0}, all, zeros.size()).ok());
      }
      EXPECT_EQ(tensors.dealt_bytes(), tensors.bytes_up());
      EXPECT_TRUE(tensors.complete());
      EXPECT_EQ(out, answer);
    }
  }
}

// The queries' layout and the schedule determine it, which is what a call knows.
TEST(ShardTensors, PairTensorsAreSplitByKeysIfThePlanSaysSo) {
  AttentionSpec spec = SpecOf(11, 13);
  spec.options.bias = BiasForm{.per_head = true, .gradient = true};
  const TensorLayout by_queries = LayoutOf(spec, TensorId::kBias);
  for (const Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kStriped}) {
    ShardPlan plan = MakeShardPlan(spec, layout, 3);
    plan.pair_axis = Axis::kKv;
    const auto bias = RandomBytes(BytesOf(spec, TensorId::kBias));
    std::vector<uint8_t> dbias(bias.size());
    auto made = ShardTensors::Make(
        TicketsOf(plan), {{v1::TENSOR_ID_BIAS, ConstBytes(bias), by_queries}},
        {{v1::TENSOR_ID_DBIAS, MutableBytes(dbias.data(), dbias.size()), by_queries}}, 1 << 20,
        /*pairs_by_keys=*/true);
    ASSERT_TRUE(made.ok()) << made.status();
    ShardTensors& tensors = **made;
    for (int rank = 0; rank < 3; ++rank) {
      const auto chunk = tensors.Next(rank);
      ASSERT_TRUE(chunk.has_value());
      std::vector<uint8_t> cut;
      for (const ConstBytes& piece : chunk->pieces) {
        cut.insert(cut.end(), piece.begin(), piece.end());
      }
      const ShardMap map(spec, plan, TensorId::kBias);
      std::vector<uint8_t> expected(map.local_bytes(rank));
      for (const ByteRun& run : map.FromLocal(rank, 0, map.local_bytes(rank))) {
        std::copy_n(bias.begin() + run.global_offset, run.bytes,
                    expected.begin() + run.local_offset);
      }
      EXPECT_EQ(cut, expected);
      const wire::Fragment all[] = {{cut.data(), cut.size()}};
      ASSERT_TRUE(tensors.Add(rank, {v1::TENSOR_ID_DBIAS, 0}, all, cut.size()).ok());
    }
    EXPECT_EQ(dbias, bias);
    // Twelve keys cannot have thirteen columns, and a bit mask cannot be split by keys.
    const ShardPlan fewer = MakeShardPlan(SpecOf(11, 12), layout, 3);
    EXPECT_FALSE(ShardTensors::Make(TicketsOf(fewer),
                                    {{v1::TENSOR_ID_BIAS, ConstBytes(bias), by_queries}}, {}, 100,
                                    /*pairs_by_keys=*/true)
                     .ok());
    const TensorLayout bits{1, 11, 2, Axis::kQ};
    EXPECT_FALSE(ShardTensors::Make(TicketsOf(plan), {{v1::TENSOR_ID_MASK, ConstBytes(bias), bits}},
                                    {}, 100, /*pairs_by_keys=*/true)
                     .ok());
  }
}

// A chunk of very short runs is still one piece; a chunk of long runs is the caller's memory.
TEST(ShardTensors, ShortRunsAreGatheredAndLongOnesAreNot) {
  AttentionSpec spec = SpecOf(256, 2048);
  spec.options.mask = MaskForm{};
  const auto mask = RandomBytes(BytesOf(spec, TensorId::kMask));
  const TensorLayout by_queries = LayoutOf(spec, TensorId::kMask);
  for (const Layout layout : {Layout::kContiguous, Layout::kStriped}) {
    for (const bool by_keys : {false, true}) {
      ShardPlan plan = MakeShardPlan(spec, layout, 2);
      if (by_keys) plan.pair_axis = Axis::kKv;
      auto made =
          ShardTensors::Make(TicketsOf(plan), {{v1::TENSOR_ID_MASK, ConstBytes(mask), by_queries}},
                             {}, 1 << 20, by_keys);
      ASSERT_TRUE(made.ok()) << made.status();
      const auto chunk = (*made)->Next(1);
      ASSERT_TRUE(chunk.has_value());
      EXPECT_EQ(chunk->bytes, mask.size() / 2);
      ASSERT_EQ(chunk->pieces.size(), 1u);
      EXPECT_EQ(chunk->gathered == nullptr, layout == Layout::kContiguous && !by_keys);
      const ShardMap map(spec, plan, TensorId::kMask);
      for (const ByteRun& run : map.FromLocal(1, 0, map.local_bytes(1))) {
        ASSERT_TRUE(std::equal(mask.begin() + run.global_offset,
                               mask.begin() + run.global_offset + run.bytes,
                               chunk->pieces[0].begin() + run.local_offset));
      }
    }
  }
}

AttentionSpec PackedSpecOf(int64_t q, int64_t kv, Packing packing) {
  AttentionSpec spec = SpecOf(q, kv);
  spec.shape.num_kv_heads = 3;
  spec.shape.packing = packing;
  return spec;
}

// A packed tensor is sharded by tokens, as any other, and not by its components.
TEST(ShardTensors, PackedInputsAreSentWhole) {
  const AttentionSpec spec = PackedSpecOf(41, 41, Packing::kQkv);
  const ShardPlan plan = MakeShardPlan(spec, Layout::kZigzag, 3);
  const TensorLayout layout = LayoutOf(spec, TensorId::kQkv);
  const auto qkv = RandomBytes(BytesOf(spec, TensorId::kQkv));
  auto tensors = ShardTensors::Make(TicketsOf(plan), {{v1::TENSOR_ID_QKV, ConstBytes(qkv), layout}},
                                    {}, 1 << 20);
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  const ShardMap rows(spec, plan, TensorId::kQ);  // a third of a token's bytes
  for (int rank = 0; rank < 3; ++rank) {
    std::vector<uint8_t> expected(3 * rows.local_bytes(rank));
    for (const ByteRun& run : rows.FromLocal(rank, 0, rows.local_bytes(rank))) {
      std::copy_n(qkv.begin() + 3 * run.global_offset, 3 * run.bytes,
                  expected.begin() + 3 * run.local_offset);
    }
    std::vector<uint8_t> cut;
    while (const auto chunk = (*tensors)->Next(rank)) {
      EXPECT_EQ(chunk->tensor, v1::TENSOR_ID_QKV);
      for (const ConstBytes& piece : chunk->pieces) {
        cut.insert(cut.end(), piece.begin(), piece.end());
      }
    }
    EXPECT_EQ(cut, expected);
  }
}

TEST(ShardTensors, ComponentsWithDifferentShardsAreRejected) {
  const AttentionSpec spec = PackedSpecOf(40, 40, Packing::kQkv);
  ShardPlan plan = MakeShardPlan(spec, Layout::kContiguous, 2);
  plan.kv = MakeShardPlan(spec, Layout::kZigzag, 2).kv;
  const auto qkv = RandomBytes(BytesOf(spec, TensorId::kQkv));
  const auto made = ShardTensors::Make(
      TicketsOf(plan), {{v1::TENSOR_ID_QKV, ConstBytes(qkv), LayoutOf(spec, TensorId::kQkv)}}, {},
      1 << 20);
  EXPECT_THAT(made.status().message(), HasSubstr("shard the components of qkv differently"));
  // k and v have the same shards, whatever q has.
  const AttentionSpec apart = PackedSpecOf(40, 40, Packing::kKv);
  const auto kv = RandomBytes(BytesOf(apart, TensorId::kKv));
  EXPECT_TRUE(ShardTensors::Make(
                  TicketsOf(plan),
                  {{v1::TENSOR_ID_KV, ConstBytes(kv), LayoutOf(apart, TensorId::kKv)}}, {}, 1 << 20)
                  .ok());
}

class Damaged : public testing::Test {
 protected:
  Damaged() : plan_(MakeShardPlan(spec_, Layout::kZigzag, 2)), tickets_(TicketsOf(plan_)) {}

  absl::StatusOr<std::unique_ptr<ShardTensors>> Make() {
    return ShardTensors::Make(tickets_,
                              {{v1::TENSOR_ID_Q, ConstBytes(q_), LayoutOf(spec_, TensorId::kQ)}},
                              {{v1::TENSOR_ID_OUT, MutableBytes(out_.data(), out_.size()),
                                LayoutOf(spec_, TensorId::kOut)}},
                              64);
  }
  std::string WhyNot() { return std::string(Make().status().message()); }

  const AttentionSpec spec_ = SpecOf(8, 8);
  const std::vector<uint8_t> q_ = RandomBytes(BytesOf(spec_, TensorId::kQ));
  std::vector<uint8_t> out_ = std::vector<uint8_t>(BytesOf(spec_, TensorId::kOut));
  const ShardPlan plan_;
  Tickets tickets_;
};

TEST_F(Damaged, MismatchedTicketsAreRejected) {
  EXPECT_TRUE(Make().ok());
  tickets_[0].mutable_q(0)->set_count(1);
  EXPECT_THAT(WhyNot(), HasSubstr("do not cover each token of q once"));
  tickets_[0].mutable_q(0)->set_count(2);
  tickets_[1].mutable_q(0)->set_begin(1);
  EXPECT_THAT(WhyNot(), HasSubstr("do not cover each token"));
  tickets_[1].mutable_q(0)->set_begin(2);
  tickets_[1].mutable_q(0)->set_stride(3);
  EXPECT_THAT(WhyNot(), HasSubstr("do not cover each token"));
  tickets_[1].mutable_q(0)->set_stride(uint64_t{1} << 63);
  EXPECT_THAT(WhyNot(), HasSubstr("out of range"));
  tickets_[1].mutable_q(0)->set_stride(1);
  EXPECT_TRUE(Make().ok());
  tickets_[1].set_rank(0);
  EXPECT_THAT(WhyNot(), HasSubstr("the ticket of rank 1 is malformed"));
  tickets_.Clear();
  EXPECT_THAT(WhyNot(), HasSubstr("without tickets"));
}

TEST_F(Damaged, MismatchedChunksAreRejected) {
  auto tensors = Make();
  ASSERT_TRUE(tensors.ok());
  const uint8_t bytes[16] = {};
  const wire::Fragment payload[] = {{bytes, 16}};
  const auto add = [&](const wire::ChunkHeader& header) {
    return (*tensors)->Add(1, header, payload, 16);
  };
  EXPECT_TRUE(add({v1::TENSOR_ID_OUT, 0}).ok());
  EXPECT_THAT(add({v1::TENSOR_ID_OUT, 8}).message(), HasSubstr("overlaps an earlier chunk"));
  EXPECT_THAT(add({v1::TENSOR_ID_OUT, out_.size()}).message(), HasSubstr("beyond its"));
  EXPECT_THAT(add({v1::TENSOR_ID_Q, 0}).message(), HasSubstr("not an output"));
  EXPECT_TRUE(absl::IsDataLoss(add({v1::TENSOR_ID_OUT, 16, 1})));
}

}  // namespace
}  // namespace ringattn::client
