#include "server/core/loss/blame.h"

#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

RankState At(int rank, uint32_t step, uint64_t progress, bool owes = true) {
  RankState state;
  state.rank = rank;
  state.step = step;
  state.progress = progress;
  state.owes_progress = owes;
  return state;
}

RankState Silent(int rank, absl::Duration silence) {
  RankState state = At(rank, 9, 9);
  state.silent = true;
  state.silence = silence;
  return state;
}

TEST(BlameTest, NoRankWithoutEvidence) {
  EXPECT_EQ(RankToBlame({}), std::nullopt);
  EXPECT_EQ(RankToBlame({At(0, 1, 1, false), At(1, 0, 0, false)}), std::nullopt);
}

TEST(BlameTest, LeastAdvancedByStepThenProgressThenRank) {
  EXPECT_EQ(RankToBlame({At(0, 2, 1), At(1, 1, 9), At(2, 1, 8)}), 2);
  EXPECT_EQ(RankToBlame({At(0, 1, 8), At(1, 1, 8)}), 0);
}

TEST(BlameTest, AWaitingRankIsNeverBlamed) {
  EXPECT_EQ(RankToBlame({At(0, 0, 0, false), At(1, 5, 5)}), 1);
}

TEST(BlameTest, SilenceOutweighsProgress) {
  EXPECT_EQ(RankToBlame({At(0, 0, 0), Silent(1, absl::Seconds(2)), Silent(2, absl::Seconds(3))}),
            2);
}

}  // namespace
}  // namespace ringattn::server
