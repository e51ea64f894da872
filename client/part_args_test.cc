#include "client/part_args.h"

#include <numeric>

#include "client/transfer/tensor_bytes.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

v1::AttentionShape ShapeOf(uint64_t batch, uint64_t sq, uint64_t sk) {
  v1::AttentionShape shape;
  shape.set_batch(batch);
  shape.set_seq_len_q(sq);
  shape.set_seq_len_kv(sk);
  shape.set_num_heads(4);
  shape.set_num_kv_heads(2);
  shape.set_head_dim(8);
  shape.set_head_dim_v(16);
  return shape;
}

std::vector<uint8_t> BufferFor(const v1::AttentionShape& shape, v1::TensorId tensor) {
  return std::vector<uint8_t>(*TensorBytes(shape, v1::DATA_TYPE_BFLOAT16, tensor));
}

// Buffers without content: only where the parts lie matters.
struct Buffers {
  explicit Buffers(const v1::AttentionShape& shape)
      : q(BufferFor(shape, v1::TENSOR_ID_Q)),
        k(BufferFor(shape, v1::TENSOR_ID_K)),
        v(BufferFor(shape, v1::TENSOR_ID_V)),
        out(BufferFor(shape, v1::TENSOR_ID_OUT)),
        lse(BufferFor(shape, v1::TENSOR_ID_LSE)) {}

  std::vector<uint8_t> q, k, v, out, lse;
};

// With out from `results` and all else from `in`.
BackwardArgs BackwardOf(const v1::AttentionShape& shape, const Buffers& in,
                        const Buffers& results) {
  return {.shape = shape,
          .dtype = v1::DATA_TYPE_BFLOAT16,
          .q = BytesOf(in.q),
          .k = BytesOf(in.k),
          .v = BytesOf(in.v),
          .dout = BytesOf(in.out),
          .has_forward_result = true,
          .out = BytesOf(results.out),
          .lse = BytesOf(in.lse)};
}

BackwardResults GradientsOf(Buffers& results) {
  return {.dq = MutableBytesOf(results.q),
          .dk = MutableBytesOf(results.k),
          .dv = MutableBytesOf(results.v)};
}

template <typename Bytes>
void ExpectPiece(const Bytes& piece, const std::vector<uint8_t>& whole, size_t begin, size_t end) {
  EXPECT_EQ(piece.data() - whole.data(), static_cast<ptrdiff_t>(begin));
  EXPECT_EQ(piece.size(), end - begin);
  EXPECT_TRUE(piece.in_one_piece());
}

TEST(PartArgs, ABlockOfQueriesIsPiecesOfTheBuffers) {
  const v1::AttentionShape shape = ShapeOf(1, 100, 120);
  Buffers buffers(shape);
  ForwardArgs args{.shape = shape,
                   .dtype = v1::DATA_TYPE_BFLOAT16,
                   .q = BytesOf(buffers.q),
                   .k = BytesOf(buffers.k),
                   .v = BytesOf(buffers.v)};
  args.options.mutable_window()->set_left(10);
  args.options.mutable_window()->set_right(0);
  args.plan.set_world_size(3);
  const auto parts = SplitForward(shape, args.options, 4);
  ASSERT_TRUE(parts.ok());
  const CallPart& part = (*parts)[2];
  const auto made = PartOf(args, part);
  EXPECT_EQ(made.shape.seq_len_q(), part.q.size());
  EXPECT_EQ(made.plan.world_size(), 3u);
  ExpectPiece(made.q, buffers.q, part.q.begin * 64, part.q.end * 64);
  ExpectPiece(made.k, buffers.k, part.kv.begin * 32, part.kv.end * 32);
  ExpectPiece(made.v, buffers.v, part.kv.begin * 64, part.kv.end * 64);
  const ForwardPartResults results =
      PartOf(args, {.out = MutableBytesOf(buffers.out), .lse = MutableBytesOf(buffers.lse)}, part);
  ExpectPiece(results.results.out, buffers.out, part.q.begin * 128, part.q.end * 128);
  EXPECT_EQ(results.results.lse.size(), part.q.size() * 4 * sizeof(float));
}

TEST(PartArgs, LseIsScatteredByHead) {
  const v1::AttentionShape shape = ShapeOf(1, 10, 10);
  Buffers buffers(shape);
  const ForwardArgs args{.shape = shape, .dtype = v1::DATA_TYPE_BFLOAT16};
  const ForwardResults results{.out = MutableBytesOf(buffers.out),
                               .lse = MutableBytesOf(buffers.lse)};
  const auto parts = SplitForward(shape, {}, 3);
  ASSERT_TRUE(parts.ok());
  for (const CallPart& part : *parts) {
    const ForwardPartResults made = PartOf(args, results, part);
    auto* lse = reinterpret_cast<float*>(made.results.lse.data());
    for (uint64_t head = 0; head < 4; ++head) {
      for (uint64_t row = 0; row < part.q.size(); ++row) {
        lse[head * part.q.size() + row] = 100.0f * head + part.q.begin + row;
      }
    }
    made.collect();
  }
  const auto* lse = reinterpret_cast<const float*>(buffers.lse.data());
  for (uint64_t head = 0; head < 4; ++head) {
    for (uint64_t row = 0; row < 10; ++row) EXPECT_EQ(lse[head * 10 + row], 100.0f * head + row);
  }
}

TEST(PartArgs, BatchRowsAreInPlace) {
  const v1::AttentionShape shape = ShapeOf(3, 10, 6);
  Buffers in(shape), results(shape);
  BackwardArgs args = BackwardOf(shape, in, results);
  const auto parts = SplitBackward(shape, {}, 2);
  ASSERT_TRUE(parts.ok());
  const CallPart& last = (*parts)[1];  // batch row 2
  auto made = PartOf(args, last).args;
  EXPECT_EQ(made.shape.batch(), 1u);
  ExpectPiece(made.q, in.q, 2 * 640, 3 * 640);
  ExpectPiece(made.k, in.k, 2 * 192, 3 * 192);
  ExpectPiece(made.v, in.v, 2 * 384, 3 * 384);
  ExpectPiece(made.dout, in.out, 2 * 1280, 3 * 1280);
  ExpectPiece(made.out, results.out, 2 * 1280, 3 * 1280);
  ExpectPiece(made.lse, in.lse, 2 * 160, 3 * 160);
  EXPECT_TRUE(made.has_forward_result);
  const auto gradients = PartOf(args, GradientsOf(results), last);
  ExpectPiece(gradients.dq, results.q, 2 * 640, 3 * 640);
  ExpectPiece(gradients.dk, results.k, 2 * 192, 3 * 192);
  ExpectPiece(gradients.dv, results.v, 2 * 384, 3 * 384);

  args.has_forward_result = false;
  args.out = args.lse = {};
  made = PartOf(args, last).args;
  EXPECT_TRUE(made.out.empty());
  EXPECT_TRUE(made.lse.empty());

  const ForwardPartResults forward =
      PartOf(ForwardArgs{.shape = shape, .dtype = v1::DATA_TYPE_BFLOAT16},
             {.out = MutableBytesOf(results.out), .lse = MutableBytesOf(results.lse)}, (*parts)[0]);
  ExpectPiece(forward.results.lse, results.lse, 0, 2 * 160);
  EXPECT_FALSE(forward.collect);
}

// Every byte of a tensor is in the part whose head it belongs to, in order.
TEST(PartArgs, GroupsOfHeadsAreViewsOfTheBuffers) {
  v1::AttentionShape shape = ShapeOf(1, 5, 7);
  shape.set_num_heads(6);
  shape.set_num_kv_heads(3);
  Buffers in(shape), results(shape);
  const BackwardArgs args = BackwardOf(shape, in, results);
  const auto expect_heads = [](const auto& view, const std::vector<uint8_t>& whole, uint64_t rows,
                               uint64_t row_bytes, uint64_t begin, uint64_t end) {
    ASSERT_EQ(view.size(), rows * (end - begin));
    EXPECT_FALSE(view.in_one_piece());
    uint64_t at = 0;
    view.ForEachPiece(0, view.size(), [&](const uint8_t* data, uint64_t bytes) {
      EXPECT_EQ(static_cast<uint64_t>(data - whole.data()),
                at / (end - begin) * row_bytes + begin + at % (end - begin));
      at += bytes;
    });
    EXPECT_EQ(at, view.size());
  };
  const auto parts = SplitBackward(shape, {}, 2);
  ASSERT_TRUE(parts.ok());
  ASSERT_EQ(parts->size(), 2u);  // K/V heads 0, 1 and 2
  for (const CallPart& part : *parts) {
    const auto made = PartOf(args, part).args;
    const uint64_t h = part.heads.begin, end = part.heads.end;
    const uint64_t k = part.kv_heads.begin, k_end = part.kv_heads.end;
    EXPECT_EQ(made.shape.num_heads(), end - h);
    EXPECT_EQ(made.shape.num_kv_heads(), k_end - k);
    expect_heads(made.q, in.q, 5, 6 * 16, h * 16, end * 16);
    expect_heads(made.dout, in.out, 5, 6 * 32, h * 32, end * 32);
    expect_heads(made.out, results.out, 5, 6 * 32, h * 32, end * 32);
    expect_heads(made.k, in.k, 7, 3 * 16, k * 16, k_end * 16);
    expect_heads(made.v, in.v, 7, 3 * 32, k * 32, k_end * 32);
    ExpectPiece(made.lse, in.lse, h * 5 * 4, end * 5 * 4);
    const auto gradients = PartOf(args, GradientsOf(results), part);
    expect_heads(gradients.dq, results.q, 5, 6 * 16, h * 16, end * 16);
    expect_heads(gradients.dk, results.k, 7, 3 * 16, k * 16, k_end * 16);
    expect_heads(gradients.dv, results.v, 7, 3 * 32, k * 32, k_end * 32);
  }
}

TEST(PartArgs, LseOfDocumentsIsGatheredByHead) {
  v1::AttentionShape shape = ShapeOf(1, 10, 8);
  for (const uint64_t at : {0, 4, 10}) shape.mutable_packed()->add_cu_seqlens_q(at);
  for (const uint64_t at : {0, 5, 8}) shape.mutable_packed()->add_cu_seqlens_k(at);
  Buffers in(shape), results(shape);
  auto* lse = reinterpret_cast<float*>(in.lse.data());
  std::iota(lse, lse + 40, 0.0f);
  const BackwardArgs args = BackwardOf(shape, in, results);
  const auto parts = SplitBackward(shape, {}, 2);
  ASSERT_TRUE(parts.ok());
  const BackwardPartArgs made = PartOf(args, (*parts)[1]);
  ExpectPiece(made.args.q, in.q, 4 * 64, 10 * 64);
  ExpectPiece(made.args.k, in.k, 5 * 32, 8 * 32);
  ExpectPiece(made.args.out, results.out, 4 * 128, 10 * 128);
  ASSERT_EQ(made.args.lse.size(), 4 * 6 * sizeof(float));
  const auto* gathered = reinterpret_cast<const float*>(made.args.lse.data());
  for (int head = 0; head < 4; ++head) {
    for (int row = 0; row < 6; ++row) EXPECT_EQ(gathered[head * 6 + row], head * 10 + 4 + row);
  }
}

}  // namespace
}  // namespace ringattn::client
