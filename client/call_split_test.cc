#include "client/call_split.h"

#include <algorithm>
#include <string>

#include "client/api/call.h"
#include "client/api/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Case {
  uint64_t sq = 0, sk = 0;
  bool causal = false;
  bool has_window = false;
  int64_t left = -1, right = -1;
};

v1::AttentionShape ShapeOf(uint64_t batch, uint64_t sq, uint64_t sk, uint32_t heads = 4,
                           uint32_t kv_heads = 2) {
  v1::AttentionShape shape;
  shape.set_batch(batch);
  shape.set_seq_len_q(sq);
  shape.set_seq_len_kv(sk);
  shape.set_num_heads(heads);
  shape.set_num_kv_heads(kv_heads);
  shape.set_head_dim(16);
  return shape;
}

v1::AttentionOptions OptionsOf(const Case& c) {
  v1::AttentionOptions options;
  options.set_causal(c.causal);
  if (c.has_window) {
    options.mutable_window()->set_left(c.left);
    options.mutable_window()->set_right(c.right);
  }
  return options;
}

// The definition of docs/semantics.md, pair by pair.
bool Sees(const v1::AttentionShape& shape, const v1::AttentionOptions& options, int64_t i,
          int64_t j) {
  const int64_t diagonal =
      i + static_cast<int64_t>(shape.seq_len_kv()) - static_cast<int64_t>(shape.seq_len_q());
  if (options.causal() && j > diagonal) return false;
  if (!options.has_window()) return true;
  const int64_t left = options.window().left(), right = options.window().right();
  return (left < 0 || j >= diagonal - left) && (right < 0 || j <= diagonal + right);
}

// Every query is in one part, and sees there what it sees in the call.
void ExpectSameMask(const v1::AttentionShape& shape, const v1::AttentionOptions& options,
                    const std::vector<CallPart>& parts) {
  uint64_t next = 0;
  for (const CallPart& part : parts) {
    ASSERT_EQ(part.q.begin, next);
    ASSERT_GT(part.q.size(), 0u);
    next = part.q.end;
    ASSERT_EQ(part.shape.seq_len_q(), part.q.size());
    ASSERT_EQ(part.shape.seq_len_kv(), part.kv.size());
    ASSERT_LE(part.kv.end, shape.seq_len_kv());
    if (part.options.has_window()) {
      ASSERT_GE(part.options.window().left(), -1);
      ASSERT_GE(part.options.window().right(), -1);
    }
    for (uint64_t i = part.q.begin; i < part.q.end; ++i) {
      for (uint64_t j = 0; j < shape.seq_len_kv(); ++j) {
        const bool in_call = Sees(shape, options, i, j);
        const bool in_part = j >= part.kv.begin && j < part.kv.end &&
                             Sees(part.shape, part.options, i - part.q.begin, j - part.kv.begin);
        ASSERT_EQ(in_call, in_part)
            << "query " << i << " key " << j << " queries " << part.q.begin << ".." << part.q.end
            << " keys " << part.kv.begin << ".." << part.kv.end;
      }
    }
  }
  EXPECT_EQ(next, shape.seq_len_q());
}

TEST(CallSplit, BlocksOfQueriesSeeWhatTheySaw) {
  for (const auto& [sq, sk] : std::vector<std::pair<uint64_t, uint64_t>>{
           {24, 24}, {7, 24}, {24, 7}, {1, 9}, {9, 1}, {5, 0}, {30, 20}}) {
    for (const bool causal : {false, true}) {
      for (const int64_t left : {-2, -1, 0, 3, 11, 40}) {
        for (const int64_t right : {-1, 0, 2, 13, 40}) {
          for (const int streams : {1, 2, 3, 5, 30}) {
            const Case c{sq, sk, causal, left >= -1, left, right};
            const v1::AttentionShape shape = ShapeOf(1, sq, sk);
            const v1::AttentionOptions options = OptionsOf(c);
            const auto parts = SplitForward(shape, options, streams);
            ASSERT_TRUE(parts.ok()) << parts.status();
            EXPECT_EQ(parts->size(), std::min<uint64_t>(streams, sq));
            SCOPED_TRACE(testing::Message() << sq << " " << sk << " causal " << causal << " window "
                                            << left << "," << right << " streams " << streams);
            ExpectSameMask(shape, options, *parts);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(CallSplit, AWindowCutsKeysOnBothSides) {
  const Case c{.sq = 1000, .sk = 1000, .has_window = true, .left = 10, .right = 5};
  const auto parts = SplitForward(ShapeOf(1, 1000, 1000), OptionsOf(c), 4);
  ASSERT_TRUE(parts.ok());
  ASSERT_EQ(parts->size(), 4u);
  for (const CallPart& part : *parts) EXPECT_LE(part.kv.size(), part.q.size() + 15);
  const CallPart& inner = (*parts)[1];
  EXPECT_EQ(inner.kv, (RowSpan{inner.q.begin - 10, inner.q.end + 5}));
  // The last query now meets the last key, five further on.
  EXPECT_EQ(inner.options.window().left(), 15);
  EXPECT_EQ(inner.options.window().right(), 0);
}

TEST(CallSplit, ACausalBlockHasThePrefixAndTheSameOptions) {
  const Case c{.sq = 100, .sk = 140, .causal = true};
  const auto parts = SplitForward(ShapeOf(1, 100, 140), OptionsOf(c), 3);
  ASSERT_TRUE(parts.ok());
  for (const CallPart& part : *parts) {
    EXPECT_EQ(part.kv, (RowSpan{0, part.q.end + 40}));
    EXPECT_EQ(part.options.SerializeAsString(), OptionsOf(c).SerializeAsString());
  }
}

TEST(CallSplit, BlocksAreAboutEqualInBytes) {
  for (const bool causal : {false, true}) {
    for (const uint32_t kv_heads : {1u, 2u, 8u}) {
      const v1::AttentionShape shape = ShapeOf(1, 1 << 20, 1 << 20, 8, kv_heads);
      const auto parts = SplitForward(shape, OptionsOf({.causal = causal}), 6);
      ASSERT_TRUE(parts.ok());
      ASSERT_EQ(parts->size(), 6u);
      double least = 1e300, most = 0;
      for (const CallPart& part : *parts) {
        const double size = 8.0 * part.q.size() + 2.0 * kv_heads * part.kv.size();
        least = std::min(least, size);
        most = std::max(most, size);
      }
      EXPECT_LT(most / least, 1.001);
      if (causal) {
        EXPECT_GT(parts->front().q.size(), parts->back().q.size());
      }
    }
  }
}

TEST(CallSplit, SmallNumbersOfQueriesAreDealtOutEvenly) {
  const auto parts = SplitForward(ShapeOf(1, 9, 50), {}, 4);
  ASSERT_TRUE(parts.ok());
  std::vector<uint64_t> sizes;
  for (const CallPart& part : *parts) sizes.push_back(part.q.size());
  EXPECT_EQ(sizes, (std::vector<uint64_t>{3, 2, 2, 2}));
}

TEST(CallSplit, SeveralBatchRowsStayWhole) {
  const v1::AttentionOptions options = OptionsOf({.causal = true});
  for (const auto split : {SplitForward, SplitBackward}) {
    const auto parts = split(ShapeOf(5, 100, 70), options, 3);
    ASSERT_TRUE(parts.ok());
    ASSERT_EQ(parts->size(), 3u);
    EXPECT_EQ((*parts)[0].batch, (RowSpan{0, 2}));
    EXPECT_EQ((*parts)[1].batch, (RowSpan{2, 4}));
    EXPECT_EQ((*parts)[2].batch, (RowSpan{4, 5}));
    for (const CallPart& part : *parts) {
      EXPECT_EQ(part.shape.batch(), part.batch.size());
      EXPECT_EQ(part.q, (RowSpan{0, 100}));
      EXPECT_EQ(part.kv, (RowSpan{0, 70}));
    }
    EXPECT_EQ(split(ShapeOf(2, 100, 70), options, 8)->size(), 2u);
  }
}

v1::AttentionShape Packed(const std::vector<uint64_t>& cu_q, const std::vector<uint64_t>& cu_k) {
  v1::AttentionShape shape = ShapeOf(1, cu_q.back(), cu_k.back());
  for (const uint64_t at : cu_q) shape.mutable_packed()->add_cu_seqlens_q(at);
  for (const uint64_t at : cu_k) shape.mutable_packed()->add_cu_seqlens_k(at);
  return shape;
}

TEST(CallSplit, DocumentsStayWhole) {
  const v1::AttentionShape shape = Packed({0, 100, 100, 150, 400, 400}, {0, 50, 60, 60, 310, 400});
  for (const auto split : {SplitForward, SplitBackward}) {
    const auto parts = split(shape, OptionsOf({.causal = true}), 2);
    ASSERT_TRUE(parts.ok()) << parts.status();
    ASSERT_EQ(parts->size(), 2u);
    const CallPart& first = (*parts)[0];
    const CallPart& last = (*parts)[1];
    EXPECT_EQ(first.q, (RowSpan{0, 150}));
    EXPECT_EQ(first.kv, (RowSpan{0, 60}));
    EXPECT_EQ(last.q, (RowSpan{150, 400}));
    EXPECT_EQ(last.kv, (RowSpan{60, 400}));
    EXPECT_EQ(last.shape.seq_len_q(), 250u);
    EXPECT_EQ(last.shape.seq_len_kv(), 340u);
    EXPECT_THAT(last.shape.packed().cu_seqlens_q(), ElementsAre(0, 250, 250));
    EXPECT_THAT(last.shape.packed().cu_seqlens_k(), ElementsAre(0, 250, 340));
    EXPECT_EQ(split(shape, {}, 64)->size(), 5u);
  }
}

// dk and dv are sums over queries, so one batch row is cut between K/V heads.
TEST(CallSplit, BackwardOfOneRowIsCutBetweenHeads) {
  v1::AttentionShape shape = ShapeOf(1, 100, 80);
  shape.set_num_heads(10);
  shape.set_num_kv_heads(5);
  const auto parts = SplitBackward(shape, OptionsOf({.causal = true}), 3);
  ASSERT_TRUE(parts.ok()) << parts.status();
  ASSERT_EQ(parts->size(), 3u);
  const RowSpan kv_heads[] = {{0, 2}, {2, 4}, {4, 5}};
  for (int i = 0; i < 3; ++i) {
    const CallPart& part = (*parts)[i];
    EXPECT_EQ(part.kv_heads, kv_heads[i]);
    EXPECT_EQ(part.heads, (RowSpan{2 * kv_heads[i].begin, 2 * kv_heads[i].end}));
    EXPECT_EQ(part.shape.num_heads(), part.heads.size());
    EXPECT_EQ(part.shape.num_kv_heads(), part.kv_heads.size());
    EXPECT_EQ(part.q, (RowSpan{0, 100}));
    EXPECT_EQ(part.kv, (RowSpan{0, 80}));
    EXPECT_TRUE(part.options.causal());
  }
  EXPECT_EQ(SplitBackward(shape, {}, 64)->size(), 5u);
  // As many K/V heads as query heads, by default.
  shape.clear_num_kv_heads();
  EXPECT_EQ(SplitBackward(shape, {}, 64)->size(), 10u);
  EXPECT_EQ(SplitBackward(shape, {}, 64)->back().shape.num_heads(), 1u);
  // For the server to refuse.
  shape.set_num_kv_heads(3);
  EXPECT_EQ(SplitBackward(shape, {}, 2)->size(), 1u);
}

TEST(CallSplit, DocumentsThatMakeNoSenseAreTheServersToRefuse) {
  v1::AttentionShape wrong_total = Packed({0, 5, 9}, {0, 5, 9});
  wrong_total.set_seq_len_q(10);
  v1::AttentionShape two_rows = Packed({0, 5, 9}, {0, 5, 9});
  two_rows.set_batch(2);
  for (const v1::AttentionShape& shape :
       {wrong_total, two_rows, Packed({0, 7, 5, 9}, {0, 5, 7, 9}), Packed({0, 9}, {0, 5, 9}),
        Packed({1, 9}, {0, 9}), Packed({0}, {0})}) {
    const auto parts = SplitForward(shape, {}, 3);
    ASSERT_TRUE(parts.ok());
    ASSERT_EQ(parts->size(), 1u);
    EXPECT_EQ((*parts)[0].shape.SerializeAsString(), shape.SerializeAsString());
  }
}

TEST(CallSplit, WhatHasNoRowsIsOneRequest) {
  EXPECT_EQ(SplitForward(ShapeOf(1, 0, 10), {}, 4)->size(), 1u);
  EXPECT_EQ(SplitForward(ShapeOf(0, 10, 10), {}, 4)->size(), 1u);
  EXPECT_EQ(SplitBackward(ShapeOf(0, 10, 10), {}, 4)->size(), 1u);
}

TEST(CallSplit, HugeWindowsDoNotOverflow) {
  const Case c{.sq = 12, .sk = 9, .has_window = true, .left = INT64_MAX, .right = INT64_MAX};
  const v1::AttentionShape shape = ShapeOf(1, 12, 9);
  const auto parts = SplitForward(shape, OptionsOf(c), 3);
  ASSERT_TRUE(parts.ok());
  for (const CallPart& part : *parts) {
    EXPECT_EQ(part.kv, (RowSpan{0, 9}));
    EXPECT_EQ(part.options.window().left(), INT64_MAX);
    EXPECT_EQ(part.options.window().right(), INT64_MAX);
  }
}

void ExpectRefused(const absl::Status& status, absl::string_view reason) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(reason)));
  const ErrorDetails details = DetailsOf(status);
  ASSERT_EQ(details.violations.size(), 1u);
  EXPECT_EQ(details.violations[0].field, "streams");
}

TEST(CallSplit, WhatCannotBeSplitIsRefusedByName) {
  const v1::AttentionShape shape = ShapeOf(1, 100, 100);
  ExpectRefused(SplitForward(shape, {}, 0).status(), "is 0, must be in 1..64");
  ExpectRefused(SplitBackward(shape, {}, 65).status(), "is 65");
  v1::AttentionShape one_kv_head = shape;
  one_kv_head.set_num_kv_heads(1);
  ExpectRefused(SplitBackward(one_kv_head, {}, 2).status(), "dk and dv");
  v1::AttentionOptions dropout;
  dropout.mutable_dropout()->set_rate(0.1);
  ExpectRefused(SplitForward(shape, dropout, 2).status(), "options.dropout");
  ExpectRefused(SplitForward(ShapeOf(1, uint64_t{1} << 41, 1), {}, 2).status(), "tokens");
  // One stream is what it always was.
  EXPECT_TRUE(SplitForward(shape, dropout, 1).ok());
  EXPECT_TRUE(SplitBackward(shape, {}, 1).ok());
}

}  // namespace
}  // namespace ringattn::client
