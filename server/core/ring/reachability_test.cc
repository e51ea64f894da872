#include "server/core/ring/reachability.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "common/wire/durations.h"
#include "gtest/gtest.h"
#include "server/core/ring/reachable_set.h"

namespace ringattn::server {
namespace {

class ReachabilityTest : public testing::Test {
 protected:
  ReachabilityTest() { batch_.Begin(now_); }

  // Adds the worker "w<connection>".
  void Join(ConnectionId connection, const std::string& host, uint64_t memory = 1,
            bool probed = true) {
    v1::Register registration;
    registration.set_name("w" + std::to_string(connection));
    registration.mutable_location()->set_host(host);
    registration.set_memory_bytes(memory);
    if (probed) registration.set_probe_address(registration.name() + ":3");
    roster_.Add(connection, registration, now_);
  }

  void Pass(absl::Duration time) {
    now_ += time;
    batch_.Begin(now_);
    reach_.Advance();
  }

  struct Sent {
    ConnectionId to = 0;
    v1::Probe probe;
  };
  std::vector<Sent> Probes() {
    std::vector<Sent> sent;
    for (const Action& action : batch_.Take()) {
      const auto* send = std::get_if<SendToWorker>(&action);
      if (send != nullptr) sent.push_back({send->connection, send->message.probe()});
    }
    return sent;
  }

  void Answer(const Sent& sent, const std::vector<uint32_t>& unreached = {}) {
    v1::Probed probed;
    probed.set_id(sent.probe.id());
    for (uint32_t index : unreached) probed.add_unreached(index);
    reach_.OnProbed(sent.to, probed);
  }

  std::vector<ConnectionId> Largest() { return reach_.LargestReachable(roster_.Staying()); }

  CoordinatorConfig config_;
  absl::Time now_ = absl::FromUnixSeconds(1000);
  Roster roster_;
  ActionBatch batch_;
  Reachability reach_{&config_, &roster_, &batch_};
};

using Connections = std::vector<ConnectionId>;

TEST_F(ReachabilityTest, WithoutCutsAllReachEachOther) {
  Join(1, "x");
  Join(2, "y");
  EXPECT_EQ(Largest(), (Connections{1, 2}));
  EXPECT_FALSE(reach_.TakeChanged());
  Pass(absl::Hours(1));
  EXPECT_TRUE(Probes().empty());
}

TEST_F(ReachabilityTest, ACutPartsHosts) {
  Join(1, "x", 5);
  Join(2, "y", 4);
  Join(3, "y", 2);
  reach_.OnUnreached(1, {2}, "late");
  EXPECT_TRUE(reach_.TakeChanged());
  EXPECT_EQ(Largest(), (Connections{2, 3}));
  EXPECT_EQ(reach_.PartedFrom(1), (std::vector<std::string>{"y"}));
  EXPECT_EQ(reach_.PartedFrom(3), (std::vector<std::string>{"x"}));
  // Hosts without workers are not listed.
  roster_.Remove(1);
  EXPECT_TRUE(reach_.PartedFrom(3).empty());
  EXPECT_EQ(Largest(), (Connections{2, 3}));
}

TEST_F(ReachabilityTest, WorkersOfOneHostArePartedOneByOne) {
  Join(1, "x");
  Join(2, "x");
  Join(3, "x");
  reach_.OnUnreached(3, {1}, "");
  reach_.OnUnreached(2, {1}, "");
  EXPECT_EQ(Largest(), (Connections{2, 3}));
}

TEST_F(ReachabilityTest, WorkersWithoutAHostArePartedOneByOne) {
  Join(1, "");
  Join(2, "");
  Join(3, "");
  reach_.OnUnreached(1, {3}, "");
  EXPECT_EQ(Largest(), (Connections{1, 2}));
}

TEST_F(ReachabilityTest, ProbesInBothDirectionsCloseACut) {
  Join(1, "x");
  Join(2, "y");
  reach_.OnUnreached(1, {2}, "");
  Pass(config_.probe_interval - absl::Milliseconds(1));
  EXPECT_TRUE(Probes().empty());
  Pass(absl::Milliseconds(1));
  std::vector<Sent> sent = Probes();
  ASSERT_EQ(sent.size(), 2u);
  EXPECT_EQ(sent[0].to, 1u);
  EXPECT_EQ(sent[0].probe.addresses(0), "w2:3");
  EXPECT_EQ(ToDuration(sent[0].probe.timeout()), config_.probe_timeout);
  EXPECT_EQ(sent[1].to, 2u);
  EXPECT_EQ(sent[1].probe.addresses(0), "w1:3");
  // One direction is not enough.
  Answer(sent[0]);
  Answer(sent[1], {0});
  EXPECT_TRUE(reach_.has_cuts());
  Pass(config_.probe_interval);
  sent = Probes();
  ASSERT_EQ(sent.size(), 2u);
  Answer(sent[0]);
  Answer(sent[0]);  // a repeated answer does not count
  EXPECT_TRUE(reach_.has_cuts());
  Answer(sent[1]);
  EXPECT_FALSE(reach_.has_cuts());
  EXPECT_EQ(Largest(), (Connections{1, 2}));
}

TEST_F(ReachabilityTest, ProbesWithoutAnswersAreRepeated) {
  Join(1, "x");
  Join(2, "y");
  reach_.OnUnreached(1, {2}, "");
  Pass(config_.probe_interval);
  EXPECT_EQ(Probes().size(), 2u);
  Pass(2 * config_.probe_timeout);
  EXPECT_TRUE(Probes().empty());
  Pass(config_.probe_interval);
  EXPECT_EQ(Probes().size(), 2u);
}

TEST_F(ReachabilityTest, ProbesUseDifferentWorkersInTurn) {
  Join(1, "x");
  Join(2, "y");
  Join(3, "y");
  reach_.OnUnreached(1, {2}, "");
  for (const ConnectionId expected : {2, 3, 2}) {
    Pass(config_.probe_interval);
    const std::vector<Sent> sent = Probes();
    ASSERT_EQ(sent.size(), 2u);
    EXPECT_EQ(sent[1].to, expected);
    Answer(sent[0], {0});
    Answer(sent[1], {0});
  }
}

// Each forming that fails although probes passed doubles the pause, which is bounded.
TEST_F(ReachabilityTest, FailedFormingsPutProbesOff) {
  Join(1, "x", 1, /*probed=*/false);
  Join(2, "y", 1, /*probed=*/false);
  absl::Duration pause = config_.probe_interval;
  for (int i = 0; i < 10; ++i) {
    reach_.OnUnreached(1, {2}, "");
    EXPECT_TRUE(reach_.has_cuts());
    Pass(pause - absl::Milliseconds(1));
    EXPECT_TRUE(reach_.has_cuts()) << i;
    Pass(absl::Milliseconds(1));
    EXPECT_FALSE(reach_.has_cuts()) << i;
    pause = std::min(2 * pause, config_.parted_retry_max);
  }
  // A ring over both forgets them.
  reach_.OnFormed({1, 2});
  reach_.OnUnreached(1, {2}, "");
  Pass(config_.probe_interval);
  EXPECT_FALSE(reach_.has_cuts());
}

TEST_F(ReachabilityTest, RepeatedFailuresWithoutACausePartHosts) {
  Join(1, "x");
  Join(2, "y");
  for (int i = 1; i < Reachability::kUnexplainedFormings; ++i) {
    reach_.OnUnexplained({1, 2});
    EXPECT_FALSE(reach_.has_cuts());
  }
  reach_.OnUnexplained({1, 2});
  EXPECT_TRUE(reach_.has_cuts());
  EXPECT_EQ(Largest(), (Connections{1}));
}

TEST_F(ReachabilityTest, OneHostCannotBeParted) {
  Join(1, "x");
  Join(2, "x");
  for (int i = 0; i < 10; ++i) reach_.OnUnexplained({1, 2});
  EXPECT_FALSE(reach_.has_cuts());
}

TEST_F(ReachabilityTest, ABrokenRingHasItsHostsProbedOnce) {
  Join(1, "x");
  Join(2, "y");
  Join(3, "y");
  reach_.Suspect({1, 2, 3});
  EXPECT_FALSE(reach_.Settled());
  EXPECT_FALSE(reach_.has_cuts());
  Pass(config_.tick_interval);
  std::vector<Sent> sent = Probes();
  ASSERT_EQ(sent.size(), 2u);
  Answer(sent[0]);
  EXPECT_FALSE(reach_.Settled());
  Answer(sent[1]);
  EXPECT_TRUE(reach_.Settled());
  EXPECT_FALSE(reach_.TakeChanged());
  Pass(config_.probe_interval);
  EXPECT_TRUE(Probes().empty());

  reach_.Suspect({1, 2, 3});
  Pass(config_.tick_interval);
  sent = Probes();
  ASSERT_EQ(sent.size(), 2u);
  Answer(sent[0]);
  Answer(sent[1], {0});
  EXPECT_TRUE(reach_.Settled());
  EXPECT_TRUE(reach_.has_cuts());
  EXPECT_EQ(Largest(), (Connections{2, 3}));
  // The cut is probed like any other.
  Pass(config_.probe_interval);
  sent = Probes();
  ASSERT_EQ(sent.size(), 2u);
  Answer(sent[0]);
  Answer(sent[1]);
  EXPECT_FALSE(reach_.has_cuts());
}

TEST_F(ReachabilityTest, AProbeWithoutAnAnswerAccusesNoLink) {
  Join(1, "x");
  Join(2, "y");
  reach_.Suspect({1, 2});
  Pass(config_.tick_interval);
  const std::vector<Sent> sent = Probes();
  ASSERT_EQ(sent.size(), 2u);
  Answer(sent[0], {0});
  Pass(2 * config_.probe_timeout);
  EXPECT_TRUE(reach_.Settled());
  EXPECT_FALSE(reach_.has_cuts());
  Pass(config_.probe_interval);
  EXPECT_TRUE(Probes().empty());
}

TEST_F(ReachabilityTest, NothingIsSuspectedInsideAHostOrBeyondProbes) {
  Join(1, "x");
  Join(2, "x");
  reach_.Suspect({1, 2});
  EXPECT_TRUE(reach_.Settled());
  Join(3, "y", 1, /*probed=*/false);
  Join(4, "z", 1, /*probed=*/false);
  reach_.Suspect({3, 4});
  Pass(config_.tick_interval);
  EXPECT_TRUE(reach_.Settled());
  EXPECT_FALSE(reach_.has_cuts());
  // A worker that is gone cannot be asked.
  Join(5, "u");
  reach_.Suspect({1, 5});
  roster_.Remove(5);
  Pass(config_.tick_interval);
  EXPECT_TRUE(reach_.Settled());
  EXPECT_FALSE(reach_.has_cuts());
}

// Returns hosts of one worker each that all reach each other except for `cuts`.
std::vector<ReachVertex> Vertices(int count, const std::vector<std::pair<int, int>>& cuts) {
  std::vector<ReachVertex> vertices(count);
  for (int i = 0; i < count; ++i) {
    vertices[i].host = "h" + std::to_string(i);
    vertices[i].lowest_name = std::string(1, static_cast<char>('a' + i));
    vertices[i].workers = 1;
    vertices[i].reaches.assign(count, true);
    vertices[i].reaches[i] = false;
  }
  for (const auto& [a, b] : cuts) vertices[a].reaches[b] = vertices[b].reaches[a] = false;
  return vertices;
}

TEST(ReachableSetTest, MostHostsThenMemoryThenWorkersThenName) {
  EXPECT_EQ(LargestReachableSet(Vertices(1, {})), (std::vector<int>{0}));
  EXPECT_EQ(LargestReachableSet(Vertices(4, {})), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(LargestReachableSet(Vertices(4, {{0, 1}, {0, 2}, {0, 3}})),
            (std::vector<int>{1, 2, 3}));
  // {0, 1} and {2, 3} have two hosts each.
  std::vector<ReachVertex> halves = Vertices(4, {{0, 2}, {0, 3}, {1, 2}, {1, 3}});
  EXPECT_EQ(LargestReachableSet(halves), (std::vector<int>{0, 1}));
  halves[3].workers = 2;
  EXPECT_EQ(LargestReachableSet(halves), (std::vector<int>{2, 3}));
  halves[0].memory_bytes = 1;
  EXPECT_EQ(LargestReachableSet(halves), (std::vector<int>{0, 1}));
}

// Every host lacks one other: 2^16 sets of equal size.
TEST(ReachableSetTest, TheSearchIsBounded) {
  std::vector<std::pair<int, int>> cuts;
  for (int i = 0; i < 32; i += 2) cuts.emplace_back(i, i + 1);
  EXPECT_EQ(LargestReachableSet(Vertices(32, cuts)).size(), 16u);
}

}  // namespace
}  // namespace ringattn::server
