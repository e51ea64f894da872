#include "server/edge/call/call_state.h"

#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

constexpr CallState kAll[] = {CallState::kAwaitingHeader,
                              CallState::kCheckingHeader,
                              CallState::kGathering,
                              CallState::kQueued,
                              CallState::kOpening,
                              CallState::kTransferring,
                              CallState::kGivingUp,
                              CallState::kEnding,
                              CallState::kCutOff,
                              CallState::kFinished,
                              CallState::kDone};

TEST(CallStateTest, TransitionsOnlyMoveForward) {
  for (CallState from : kAll) {
    for (CallState to : kAll) {
      if (to <= from) {
        EXPECT_FALSE(MayFollow(from, to)) << CallStateName(from);
      }
    }
  }
}

TEST(CallStateTest, EveryCallEndsWithExactlyOneStatus) {
  for (CallState from : kAll) {
    EXPECT_EQ(MayFollow(from, CallState::kEnding), from <= CallState::kGivingUp);
    EXPECT_EQ(MayFollow(from, CallState::kFinished),
              from == CallState::kEnding || from == CallState::kCutOff);
    EXPECT_EQ(MayFollow(from, CallState::kDone), from == CallState::kFinished);
  }
}

TEST(CallStateTest, OnlyCallsKnownToTheCoreAreGivenUp) {
  for (CallState from : kAll) {
    EXPECT_EQ(MayFollow(from, CallState::kGivingUp), from == CallState::kQueued ||
                                                         from == CallState::kOpening ||
                                                         from == CallState::kTransferring);
  }
}

TEST(CallStateTest, ASuccessfulCallPassesAllStates) {
  CallLife life;
  for (CallState next : {CallState::kCheckingHeader, CallState::kQueued, CallState::kOpening,
                         CallState::kTransferring}) {
    life.MoveTo(next);
    EXPECT_FALSE(life.over());
    EXPECT_EQ(life.in_core(), next >= CallState::kQueued);
  }
  life.MoveTo(CallState::kGivingUp);
  EXPECT_TRUE(life.over());
  EXPECT_TRUE(life.in_core());
  for (CallState next : {CallState::kEnding, CallState::kFinished, CallState::kDone}) {
    life.MoveTo(next);
    EXPECT_TRUE(life.over());
    EXPECT_FALSE(life.in_core());
  }
}

TEST(CallStateDeathTest, AnInvalidTransitionEndsTheProcess) {
  CallLife life;
  EXPECT_DEATH(life.MoveTo(CallState::kTransferring), "awaiting header");
}

}  // namespace
}  // namespace ringattn::server
