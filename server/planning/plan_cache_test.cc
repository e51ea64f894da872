#include "server/planning/plan_cache.h"

#include <utility>

#include "common/base/limits.h"
#include "gtest/gtest.h"
#include "server/core/requests/plan_summary.h"

namespace ringattn::server {
namespace {

PlanThis Ask(uint64_t fingerprint, int64_t tokens) {
  auto spec = std::make_shared<AttentionSpec>();
  spec->shape.seq_len_q = tokens;
  spec->shape.cu_seqlens_q = {0, tokens};
  PlanThis ask;
  ask.fingerprint = fingerprint;
  ask.spec = std::move(spec);
  return ask;
}

std::shared_ptr<const Plan> Saying(const char* reason) {
  auto plan = std::make_shared<Plan>();
  plan->reason = reason;
  return plan;
}

TEST(PlanCacheTest, FindsEqualKeys) {
  PlanCache cache(kMiB);
  cache.Put(Ask(1, 8), Saying("eight"));
  ASSERT_TRUE(cache.Find(Ask(1, 8)).has_value());
  EXPECT_EQ((**cache.Find(Ask(1, 8)))->reason, "eight");
}

// The fingerprint only finds candidates.
TEST(PlanCacheTest, AllInputsMustBeEqual) {
  PlanCache cache(kMiB);
  cache.Put(Ask(1, 8), Saying("eight"));
  EXPECT_FALSE(cache.Find(Ask(1, 9)).has_value());
  EXPECT_FALSE(cache.Find(Ask(2, 8)).has_value());
  PlanThis ask = Ask(1, 8);
  ask.inputs.ready_workers = 3;
  EXPECT_FALSE(cache.Find(ask).has_value());
  ask = Ask(1, 8);
  ask.choice.stripe = 2;
  EXPECT_FALSE(cache.Find(ask).has_value());
  ask = Ask(1, 8);
  ask.direction = Direction::kBackward;
  EXPECT_FALSE(cache.Find(ask).has_value());
  cache.Put(Ask(1, 9), Saying("nine"));
  EXPECT_EQ((**cache.Find(Ask(1, 8)))->reason, "eight");
  EXPECT_EQ((**cache.Find(Ask(1, 9)))->reason, "nine");
}

TEST(PlanCacheTest, ErrorsAreCached) {
  PlanCache cache(kMiB);
  cache.Put(Ask(1, 8), absl::InvalidArgumentError("no"));
  EXPECT_EQ(cache.Find(Ask(1, 8))->status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(PlanCacheTest, IsBoundedAndEvictsTheLeastRecentlyUsed) {
  const int64_t one = KeyBytes(*Ask(1, 8).spec) + BytesOf(*Saying(""));
  PlanCache cache(3 * one + one / 2);
  for (uint64_t i = 1; i <= 3; ++i) cache.Put(Ask(i, 8), Saying(""));
  EXPECT_EQ(cache.size(), 3u);
  EXPECT_TRUE(cache.Find(Ask(1, 8)).has_value());  // marks it as used
  cache.Put(Ask(4, 8), Saying(""));
  EXPECT_EQ(cache.size(), 3u);
  EXPECT_FALSE(cache.Find(Ask(2, 8)).has_value());
  EXPECT_TRUE(cache.Find(Ask(1, 8)).has_value());
  cache.Put(Ask(4, 8), Saying(""));  // replaces the entry
  EXPECT_EQ(cache.size(), 3u);
  EXPECT_LE(cache.bytes(), 3 * one + one / 2);
}

TEST(PlanCacheTest, OversizedPlansAreNotStored) {
  PlanCache cache(1000);
  PlanThis ask = Ask(1, 8);
  auto spec = std::make_shared<AttentionSpec>(*ask.spec);
  spec->shape.cu_seqlens_q.assign(1000, 0);
  ask.spec = spec;
  cache.Put(ask, Saying(""));
  EXPECT_EQ(cache.size(), 0u);
  EXPECT_EQ(cache.bytes(), 0);
}

}  // namespace
}  // namespace ringattn::server
