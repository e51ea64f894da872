#include "common/program/lane_check.h"

#include "gtest/gtest.h"

namespace ringattn {
namespace {

using Kind = Transfer::Kind;

constexpr int kSteps = 4;
constexpr BufferId kOuter = 0, kInner = 1;
constexpr int64_t kBytes = 64;

ComputeCall ZeroOf(const ByteRange& target) {
  ComputeCall call;
  call.op = ComputeCall::Op::kZero;
  call.target = target;
  return call;
}

// Ranks 0 and 1 are on one host, rank 2 is on another one. Rank 0 sends its outer buffer to rank 2,
// which may take three steps. Ranks 0 and 1 exchange their inner buffers in every step.
std::vector<Program> Programs() {
  std::vector<Program> programs(3);
  for (int rank = 0; rank < 3; ++rank) {
    programs[rank].rank = rank;
    programs[rank].buffers = {{"outer", kBytes}, {"inner", kBytes}};
    programs[rank].steps.resize(kSteps);
  }
  const ByteRange outer{kOuter, 0, kBytes};
  programs[0].steps[0].transfers.push_back({Kind::kSend, 2, outer, Lane::kBetween, 3});
  programs[2].steps[0].transfers.push_back({Kind::kReceive, 0, outer, Lane::kBetween, 3});
  for (int step = 0; step < kSteps; ++step) {
    for (int rank : {0, 1}) {
      programs[rank].steps[step].transfers.push_back(
          {Kind::kSend, 1 - rank, {kInner, 0, kBytes / 2}});
      programs[rank].steps[step].transfers.push_back(
          {Kind::kReceive, 1 - rank, {kInner, kBytes / 2, kBytes / 2}});
    }
  }
  return programs;
}

// Return the violation if `rank` also has this call or transfer in `step`.
std::string WithCall(int rank, int step, const ByteRange& target) {
  std::vector<Program> programs = Programs();
  programs[rank].steps[step].calls.push_back(ZeroOf(target));
  return CheckLanes(programs);
}
std::string WithInnerTransfer(int rank, int step, Kind kind, const ByteRange& range) {
  std::vector<Program> programs = Programs();
  programs[rank].steps[step].transfers.push_back({kind, rank == 2 ? 1 : 1 - rank, range});
  return CheckLanes(programs);
}

TEST(LaneCheck, AcceptsSlowTransferNextToOthers) {
  EXPECT_EQ(CheckLanes(Programs()), "");
  EXPECT_EQ(WithCall(0, 1, {kInner, 0, kBytes}), "");
  // Others may read the bytes that are being sent.
  EXPECT_EQ(WithInnerTransfer(0, 1, Kind::kSend, {kOuter, 0, kBytes}), "");
}

TEST(LaneCheck, FindsReuseOfSentBytes) {
  const std::string violation = WithInnerTransfer(0, 2, Kind::kReceive, {kOuter, 8, 4});
  EXPECT_EQ(violation,
            "rank 0, step 0: the send to rank 2 may be in flight for 3 steps, but a transfer of "
            "step 2 uses its bytes of buffer outer");
  EXPECT_NE(WithInnerTransfer(0, 0, Kind::kReceive, {kOuter, 8, 4}), "") << "in its own step";
  EXPECT_EQ(WithInnerTransfer(0, 3, Kind::kReceive, {kOuter, 8, 4}), "") << "after its last step";
  EXPECT_NE(WithCall(0, 1, {kOuter, 0, 4}), "");
  EXPECT_EQ(WithCall(0, 2, {kOuter, 0, 4}), "") << "calls follow the transfers of their step";
}

TEST(LaneCheck, FindsUseOfBytesThatHaveNotArrived) {
  EXPECT_NE(WithInnerTransfer(2, 1, Kind::kSend, {kOuter, 0, 4}), "");
  EXPECT_NE(WithInnerTransfer(2, 2, Kind::kReceive, {kOuter, 0, 4}), "");
  EXPECT_NE(WithCall(2, 1, {kOuter, 0, 4}), "");
  EXPECT_EQ(WithCall(2, 2, {kOuter, 0, 4}), "");
  EXPECT_EQ(WithInnerTransfer(2, 3, Kind::kSend, {kOuter, 0, 4}), "");
}

TEST(LaneCheck, OneLanePerPairOfRanks) {
  std::vector<Program> programs = Programs();
  programs[2].steps[0].transfers[0].lane = Lane::kInside;
  programs[2].steps[0].transfers[0].steps = 1;
  EXPECT_EQ(CheckLanes(programs),
            "rank 2, step 0: the receive from rank 0 is in another lane than an earlier transfer");
}

TEST(LaneCheck, BoundsSteps) {
  std::vector<Program> programs = Programs();
  programs[0].steps[0].transfers[0].steps = 2;
  EXPECT_EQ(CheckLanes(programs),
            "the sends of rank 0 to rank 2 and their receives may take different numbers of steps");
  for (int steps : {0, kSteps + 1}) {
    programs = Programs();
    programs[0].steps[0].transfers[0].steps = steps;
    EXPECT_NE(CheckLanes(programs), "") << steps;
  }
  programs = Programs();
  programs[1].steps[0].transfers[0].steps = 2;
  EXPECT_EQ(CheckLanes(programs),
            "rank 1, step 0: the send to rank 0 may take 2 steps; 1 is accepted inside a host, and "
            "at least 1 between hosts");
}

TEST(LaneCheck, TransfersEndInTheirLastStep) {
  const std::vector<Program> programs = Programs();
  EXPECT_EQ(EndingAt(programs[2], 0).size(), 0u);
  EXPECT_EQ(EndingAt(programs[2], 2).size(), 1u);
  EXPECT_EQ(EndingAt(programs[0], 0).size(), 2u);
  EXPECT_EQ(EndingAt(programs[0], 2).size(), 3u);
}

TEST(Lanes, FollowHosts) {
  std::vector<Program> programs = Programs();
  AssignLanes({}, programs[0]);
  EXPECT_EQ(programs[0].SentBytes(Lane::kBetween), 0);
  AssignLanes({0, 0, 1}, programs[0]);
  EXPECT_EQ(programs[0].SentBytes(Lane::kBetween), kBytes);
  EXPECT_EQ(programs[0].SentBytes(Lane::kInside), kSteps * kBytes / 2);
  AssignLanes({0, 1, 2}, programs[0]);
  EXPECT_EQ(programs[0].SentBytes(Lane::kInside), 0);
}

}  // namespace
}  // namespace ringattn
