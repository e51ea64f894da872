#include "client/merged_report.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

using ::testing::ElementsAre;

constexpr std::chrono::steady_clock::time_point kStart{std::chrono::seconds(1000)};

CallReport Part(double began, const char* worker) {
  CallReport part;
  part.times = {.began = kStart + std::chrono::milliseconds(static_cast<int>(began * 1000)),
                .accepted_seconds = 1,
                .uploaded_seconds = 3,
                .first_output_seconds = 5,
                .finished_seconds = 6};
  part.accepted.set_generation(7);
  v1::PlanReport* plan = part.accepted.mutable_plan();
  plan->set_schedule(v1::SCHEDULE_SINGLE);
  plan->set_layout(v1::LAYOUT_CONTIGUOUS);
  plan->set_world_size(1);
  plan->add_members(worker);
  plan->set_predicted_compute_seconds(0.5);
  plan->add_ranks()->set_tiles(10);
  for (const auto& [name, seconds] : std::initializer_list<std::pair<const char*, double>>{
           {"queue", 0.5}, {"upload", 2}, {"compute", 1}, {"download", 0.25}}) {
    v1::StageTime* stage = part.summary.add_stages();
    stage->set_stage(name);
    stage->set_seconds(seconds);
  }
  part.summary.set_compute_seconds(1);
  part.summary.set_flops(100);
  part.summary.set_bytes_up(30);
  part.summary.set_bytes_down(20);
  part.summary.set_attempts(1);
  v1::RankReport* rank = part.summary.add_ranks();
  rank->set_worker(worker);
  rank->set_compute_seconds(0.75);
  v1::TimelineEvent* event = rank->add_timeline();
  event->set_begin_seconds(2);
  event->set_end_seconds(3);
  return part;
}

TEST(MergedReport, FromTheFirstBeginToTheLastEnd) {
  CallReport late = Part(2, "b");
  late.summary.set_attempts(3);
  late.accepted.set_generation(9);
  const CallReport merged = MergeReports("call", {Part(0, "a"), late});
  EXPECT_EQ(merged.times.began, kStart);
  EXPECT_DOUBLE_EQ(merged.times.accepted_seconds, 1);
  EXPECT_DOUBLE_EQ(merged.times.uploaded_seconds, 5);
  EXPECT_DOUBLE_EQ(merged.times.first_output_seconds, 5);
  EXPECT_DOUBLE_EQ(merged.times.finished_seconds, 8);
  ASSERT_EQ(merged.summary.stages_size(), 4);
  std::vector<double> seconds;
  for (const v1::StageTime& stage : merged.summary.stages()) seconds.push_back(stage.seconds());
  // Two seconds apart: queue 0.5..1 and 2.5..3, upload 1..3 and 3..5, and so on.
  EXPECT_THAT(seconds, ElementsAre(2.5, 4, 3, 2.25));
  EXPECT_DOUBLE_EQ(merged.summary.compute_seconds(), 3);
  EXPECT_EQ(merged.summary.flops(), 200);
  EXPECT_EQ(merged.summary.bytes_up(), 60u);
  EXPECT_EQ(merged.summary.bytes_down(), 40u);
  EXPECT_EQ(merged.summary.attempts(), 3u);
  EXPECT_EQ(merged.accepted.request_id(), "call");
  EXPECT_EQ(merged.accepted.generation(), 9u);
  EXPECT_EQ(merged.streams(), 2u);
  EXPECT_EQ(CallReport().streams(), 1u);
}

TEST(MergedReport, WorkersAreSummedAndTheirTimelinesShifted) {
  const CallReport merged = MergeReports("call", {Part(0, "a"), Part(2, "b"), Part(3, "a")});
  ASSERT_EQ(merged.summary.ranks_size(), 2);
  const v1::RankReport& a = merged.summary.ranks(0);
  EXPECT_EQ(a.worker(), "a");
  EXPECT_DOUBLE_EQ(a.compute_seconds(), 1.5);
  ASSERT_EQ(a.timeline_size(), 2);
  EXPECT_DOUBLE_EQ(a.timeline(0).begin_seconds(), 2);
  EXPECT_DOUBLE_EQ(a.timeline(1).begin_seconds(), 5);
  EXPECT_DOUBLE_EQ(a.timeline(1).end_seconds(), 6);
}

TEST(MergedReport, APlanSaysWhatAllPartsHaveInCommon) {
  CallReport other = Part(0, "b");
  other.accepted.mutable_plan()->set_layout(v1::LAYOUT_ZIGZAG);
  const v1::PlanReport plan = MergeReports("call", {Part(0, "a"), other}).accepted.plan();
  EXPECT_EQ(plan.schedule(), v1::SCHEDULE_SINGLE);
  EXPECT_EQ(plan.layout(), v1::LAYOUT_UNSPECIFIED);
  EXPECT_EQ(plan.world_size(), 1u);
  EXPECT_THAT(plan.members(), ElementsAre("a", "b"));
  EXPECT_DOUBLE_EQ(plan.predicted_compute_seconds(), 1);
  ASSERT_EQ(plan.ranks_size(), 1);
  EXPECT_EQ(plan.ranks(0).tiles(), 20u);
}

}  // namespace
}  // namespace ringattn::client
