#include "server/planning/plan_cache.h"

#include <utility>

#include "common/base/limits.h"
#include "gtest/gtest.h"
#include "server/core/requests/plan_summary.h"

namespace ringattn::server {
namespace {

PlanKey Key(uint64_t fingerprint, int64_t tokens) {
  auto spec = std::make_shared<AttentionSpec>();
  spec->shape.seq_len_q = tokens;
  spec->shape.cu_seqlens_q = {0, tokens};
  PlanKey key;
  key.fingerprint = fingerprint;
  key.spec = std::move(spec);
  return key;
}

PlanThis AskFor(const PlanKey& key) {
  PlanThis ask;
  ask.fingerprint = key.fingerprint;
  ask.spec = key.spec;
  ask.direction = key.direction;
  ask.choice = key.choice;
  ask.inputs = key.inputs;
  return ask;
}

std::shared_ptr<const Plan> Saying(const char* reason) {
  auto plan = std::make_shared<Plan>();
  plan->reason = reason;
  return plan;
}

TEST(PlanCacheTest, FindsEqualKeys) {
  PlanCache cache(kMiB);
  cache.Put(Key(1, 8), Saying("eight"));
  ASSERT_TRUE(cache.Find(AskFor(Key(1, 8))).has_value());
  EXPECT_EQ((**cache.Find(AskFor(Key(1, 8))))->reason, "eight");
}

// The fingerprint only finds candidates.
TEST(PlanCacheTest, AllInputsMustBeEqual) {
  PlanCache cache(kMiB);
  cache.Put(Key(1, 8), Saying("eight"));
  EXPECT_FALSE(cache.Find(AskFor(Key(1, 9))).has_value());
  EXPECT_FALSE(cache.Find(AskFor(Key(2, 8))).has_value());
  PlanKey key = Key(1, 8);
  key.inputs.ready_workers = 3;
  EXPECT_FALSE(cache.Find(AskFor(key)).has_value());
  key = Key(1, 8);
  key.choice.stripe = 2;
  EXPECT_FALSE(cache.Find(AskFor(key)).has_value());
  key = Key(1, 8);
  key.direction = Direction::kBackward;
  EXPECT_FALSE(cache.Find(AskFor(key)).has_value());
  cache.Put(Key(1, 9), Saying("nine"));
  EXPECT_EQ((**cache.Find(AskFor(Key(1, 8))))->reason, "eight");
  EXPECT_EQ((**cache.Find(AskFor(Key(1, 9))))->reason, "nine");
}

TEST(PlanCacheTest, ErrorsAreCached) {
  PlanCache cache(kMiB);
  cache.Put(Key(1, 8), absl::InvalidArgumentError("no"));
  EXPECT_EQ(cache.Find(AskFor(Key(1, 8)))->status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(PlanCacheTest, IsBoundedAndEvictsTheLeastRecentlyUsed) {
  const int64_t one = BytesOf(Key(1, 8)) + BytesOf(*Saying(""));
  PlanCache cache(3 * one + one / 2);
  for (uint64_t i = 1; i <= 3; ++i) cache.Put(Key(i, 8), Saying(""));
  EXPECT_EQ(cache.size(), 3u);
  EXPECT_TRUE(cache.Find(AskFor(Key(1, 8))).has_value());  // marks it as used
  cache.Put(Key(4, 8), Saying(""));
  EXPECT_EQ(cache.size(), 3u);
  EXPECT_FALSE(cache.Find(AskFor(Key(2, 8))).has_value());
  EXPECT_TRUE(cache.Find(AskFor(Key(1, 8))).has_value());
  cache.Put(Key(4, 8), Saying(""));  // replaces the entry
  EXPECT_EQ(cache.size(), 3u);
  EXPECT_LE(cache.bytes(), 3 * one + one / 2);
}

TEST(PlanCacheTest, OversizedPlansAreNotStored) {
  PlanCache cache(1000);
  PlanKey key = Key(1, 8);
  auto spec = std::make_shared<AttentionSpec>(*key.spec);
  spec->shape.cu_seqlens_q.assign(1000, 0);
  key.spec = spec;
  cache.Put(key, Saying(""));
  EXPECT_EQ(cache.size(), 0u);
  EXPECT_EQ(cache.bytes(), 0);
}

}  // namespace
}  // namespace ringattn::server
