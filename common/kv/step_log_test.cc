#include "common/kv/step_log.h"

#include "common/kv/kv_error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

class KvStepLogTest : public ::testing::Test {
 protected:
  KvStepLogTest() : log_(Spec(), {1, 1}) {
    EXPECT_TRUE(log_.Open(1).ok());
    EXPECT_TRUE(log_.Settle(1, 0).ok());
  }

  static KvCacheSpec Spec() {
    KvCacheSpec spec;
    spec.block_tokens = 16;
    spec.blocks = 8;
    spec.groups.resize(1);
    spec.groups[0].layers = {3, 5};
    return spec;
  }

  static KvStep MakeStep(uint64_t number, int64_t expected, int64_t append) {
    return {number, {}, {{1, expected, expected, append, 1, {}}}};
  }

  void Begin(uint64_t number, int64_t expected, int64_t append = 1) {
    const auto begun = log_.Begin(1, MakeStep(number, expected, append));
    ASSERT_TRUE(begun.ok()) << begun.status();
    ASSERT_TRUE(begun->refusals.empty());
  }

  void Call(uint64_t step, uint32_t layer, bool appends = true) {
    ASSERT_TRUE(log_.StartCall(log_.epoch(), step, layer, appends).ok());
    log_.FinishCall(layer, appends);
  }
  void CallAll(uint64_t step) {
    Call(step, 3);
    Call(step, 5);
  }

  void ExpectError(const absl::Status& status, absl::StatusCode code, const std::string& reason) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(KvErrorReason(status), reason) << status;
  }

  KvStepLog log_;
};

constexpr auto kAborted = absl::StatusCode::kAborted;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

TEST_F(KvStepLogTest, StepsFollowOneAnother) {
  ExpectError(log_.Begin(1, MakeStep(2, 0, 1)).status(), kPrecondition, "STEP_ORDER");
  Begin(1, 0);
  EXPECT_EQ(log_.complete(), 0u);
  ExpectError(log_.Begin(1, MakeStep(2, 1, 1)).status(), kPrecondition, "STEP_ORDER");
  Call(1, 3);
  ExpectError(log_.Begin(1, MakeStep(2, 1, 1)).status(), kPrecondition, "STEP_ORDER");
  Call(1, 5);
  EXPECT_EQ(log_.complete(), 1u);
  EXPECT_EQ(log_.committed(), 0u);
  Begin(2, 1);
  EXPECT_EQ(log_.committed(), 1u);
  ExpectError(log_.Begin(1, MakeStep(1, 0, 1)).status(), kPrecondition, "STEP_ORDER");
  ExpectError(log_.StartCall(1, 1, 3, true), kPrecondition, "STEP_ORDER");
}

TEST_F(KvStepLogTest, EverythingOfTheStepMayBeRepeated) {
  Begin(1, 0);
  CallAll(1);
  const auto again = log_.Begin(1, MakeStep(1, 0, 1));
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(again->repeated);
  ExpectError(log_.Begin(1, MakeStep(1, 0, 2)).status(), kPrecondition, "STEP_CONFLICT");
  CallAll(1);
  EXPECT_EQ(log_.complete(), 1u);
  EXPECT_TRUE(log_.Commit(1, 1).ok());
  EXPECT_TRUE(log_.Commit(1, 1).ok());
  ExpectError(log_.Commit(1, 2), kPrecondition, "STEP_ORDER");
  EXPECT_EQ(log_.committed(), 1u);
}

TEST_F(KvStepLogTest, ARefusedStepLeavesItsNumberFreeAndTheOneBeforeCommitted) {
  Begin(1, 0);
  CallAll(1);
  const auto refused = log_.Begin(1, MakeStep(2, 7, 1));
  ASSERT_TRUE(refused.ok());
  ASSERT_EQ(refused->refusals.size(), 1u);
  EXPECT_EQ(log_.committed(), 1u);
  ExpectError(log_.StartCall(1, 2, 3, true), kPrecondition, "STEP_ORDER");
  Begin(2, 1);
}

TEST_F(KvStepLogTest, ReadsNeedTheLayersAppend) {
  Begin(1, 0);
  ExpectError(log_.StartCall(1, 1, 3, false), kInvalid, "BAD_CALL");
  ExpectError(log_.StartCall(1, 1, 4, true), kInvalid, "BAD_CALL");
  CallAll(1);
  Call(1, 3, false);
  Begin(2, 1, 0);
  EXPECT_EQ(log_.complete(), 2u);  // nothing to append
  Call(2, 5, false);
}

TEST_F(KvStepLogTest, ACallInFlightIsNotComplete) {
  Begin(1, 0);
  CallAll(1);
  ASSERT_TRUE(log_.StartCall(1, 1, 3, true).ok());
  EXPECT_EQ(log_.complete(), 0u);
  log_.FinishCall(3, true);
  EXPECT_EQ(log_.complete(), 1u);
}

TEST_F(KvStepLogTest, ANewWriterFencesTheOldOne) {
  Begin(1, 0);
  ASSERT_TRUE(log_.Open(2).ok());
  ExpectError(log_.StartCall(1, 1, 3, true), kAborted, "KV_FENCED");
  ExpectError(log_.Begin(2, MakeStep(1, 0, 1)).status(), kAborted, "KV_FENCED");
  ExpectError(log_.Open(1), kPrecondition, "KV_FENCED");
  ExpectError(log_.Settle(1, 0), kPrecondition, "KV_FENCED");
  ASSERT_TRUE(log_.Open(2).ok());
  ASSERT_TRUE(log_.Settle(2, 0).ok());
  ExpectError(log_.Commit(1, 0), kAborted, "KV_FENCED");
  EXPECT_EQ(log_.blocks().num_sequences(), 0);
}

TEST_F(KvStepLogTest, SettlingCommitsOrUndoes) {
  Begin(1, 0, 20);
  CallAll(1);
  Begin(2, 20);
  CallAll(2);
  ASSERT_TRUE(log_.Open(2).ok());
  ExpectError(log_.Settle(2, 3), kPrecondition, "KV_INCONSISTENT");
  ExpectError(log_.Settle(2, 0), kPrecondition, "KV_INCONSISTENT");
  ASSERT_TRUE(log_.Settle(2, 2).ok());
  EXPECT_EQ(log_.committed(), 2u);
  EXPECT_THAT(log_.blocks().sequences(), ElementsAre(Pair(1, 21)));

  ASSERT_TRUE(log_.Begin(2, MakeStep(3, 21, 5)).ok());
  Call(3, 3);
  ASSERT_TRUE(log_.Open(3).ok());
  ExpectError(log_.Settle(3, 3), kPrecondition, "KV_INCONSISTENT");  // layer 5 is missing
  ASSERT_TRUE(log_.Settle(3, 2).ok());
  EXPECT_THAT(log_.blocks().sequences(), ElementsAre(Pair(1, 21)));
  ASSERT_TRUE(log_.Begin(3, MakeStep(3, 21, 1)).ok());
  // A repeated settlement does not undo what came after it.
  ASSERT_TRUE(log_.Settle(3, 2).ok());
  ExpectError(log_.Settle(3, 3), kPrecondition, "KV_INCONSISTENT");
  EXPECT_TRUE(log_.begun_step().has_value());
}

}  // namespace
}  // namespace ringattn
