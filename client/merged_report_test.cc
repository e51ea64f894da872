#include "client/merged_report.h"

#include "common/wire/durations.h"
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
  part.accepted.set_traceparent("00-trace");
  v1::PlanReport* plan = part.accepted.mutable_plan();
  plan->set_schedule(v1::SCHEDULE_SINGLE);
  plan->set_layout(v1::LAYOUT_CONTIGUOUS);
  plan->set_world_size(1);
  plan->add_members(worker);
  SetSeconds(0.5, plan->mutable_predicted_compute_time());
  plan->add_ranks()->set_tiles(10);
  for (const auto& [name, seconds] :
       std::initializer_list<std::pair<v1::Stage, double>>{{v1::STAGE_QUEUE, 0.5},
                                                           {v1::STAGE_UPLOAD, 2},
                                                           {v1::STAGE_COMPUTE, 1},
                                                           {v1::STAGE_DOWNLOAD, 0.25}}) {
    v1::StageTime* stage = part.summary.add_stages();
    stage->set_stage(name);
    SetSeconds(seconds, stage->mutable_time());
  }
  SetSeconds(1, part.summary.mutable_compute_time());
  part.summary.set_flops(100);
  part.summary.set_bytes_up(30);
  part.summary.set_bytes_down(20);
  part.summary.set_attempts(1);
  v1::RankReport* rank = part.summary.add_ranks();
  rank->set_worker(worker);
  SetSeconds(0.75, rank->mutable_compute_time());
  for (const char* family : {"sm90", "simt"}) {
    v1::KernelUse* kernel = rank->add_kernels();
    kernel->set_call("forward");
    kernel->set_family(family);
    kernel->set_calls(2);
  }
  v1::TimelineEvent* event = rank->add_timeline();
  SetSeconds(2, event->mutable_begin());
  SetSeconds(3, event->mutable_end());
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
  for (const v1::StageTime& stage : merged.summary.stages()) {
    seconds.push_back(ToSeconds(stage.time()));
  }
  // Two seconds apart: queue 0.5..1 and 2.5..3, upload 1..3 and 3..5, and so on.
  EXPECT_THAT(seconds, ElementsAre(2.5, 4, 3, 2.25));
  EXPECT_DOUBLE_EQ(ToSeconds(merged.summary.compute_time()), 3);
  EXPECT_EQ(merged.summary.flops(), 200);
  EXPECT_EQ(merged.summary.bytes_up(), 60u);
  EXPECT_EQ(merged.summary.bytes_down(), 40u);
  EXPECT_EQ(merged.summary.attempts(), 3u);
  EXPECT_EQ(merged.accepted.request_id(), "call");
  EXPECT_EQ(merged.accepted.traceparent(), "00-trace");
  EXPECT_EQ(merged.accepted.generation(), 9u);
  EXPECT_EQ(merged.streams(), 2u);
  EXPECT_EQ(CallReport().streams(), 1u);
}

TEST(MergedReport, WorkersAreSummedAndTheirTimelinesShifted) {
  const CallReport merged = MergeReports("call", {Part(0, "a"), Part(2, "b"), Part(3, "a")});
  ASSERT_EQ(merged.summary.ranks_size(), 2);
  const v1::RankReport& a = merged.summary.ranks(0);
  EXPECT_EQ(a.worker(), "a");
  EXPECT_DOUBLE_EQ(ToSeconds(a.compute_time()), 1.5);
  ASSERT_EQ(a.kernels_size(), 2);
  EXPECT_EQ(a.kernels(0).family(), "sm90");
  EXPECT_EQ(a.kernels(0).calls(), 4u);
  EXPECT_EQ(a.kernels(1).family(), "simt");
  EXPECT_EQ(a.kernels(1).calls(), 4u);
  ASSERT_EQ(a.timeline_size(), 2);
  EXPECT_DOUBLE_EQ(ToSeconds(a.timeline(0).begin()), 2);
  EXPECT_DOUBLE_EQ(ToSeconds(a.timeline(1).begin()), 5);
  EXPECT_DOUBLE_EQ(ToSeconds(a.timeline(1).end()), 6);
}

TEST(MergedReport, APlanSaysWhatAllPartsHaveInCommon) {
  CallReport other = Part(0, "b");
  other.accepted.mutable_plan()->set_layout(v1::LAYOUT_ZIGZAG);
  const v1::PlanReport plan = MergeReports("call", {Part(0, "a"), other}).accepted.plan();
  EXPECT_EQ(plan.schedule(), v1::SCHEDULE_SINGLE);
  EXPECT_EQ(plan.layout(), v1::LAYOUT_UNSPECIFIED);
  EXPECT_EQ(plan.world_size(), 1u);
  EXPECT_THAT(plan.members(), ElementsAre("a", "b"));
  EXPECT_DOUBLE_EQ(ToSeconds(plan.predicted_compute_time()), 1);
  ASSERT_EQ(plan.ranks_size(), 1);
  EXPECT_EQ(plan.ranks(0).tiles(), 20u);
}

}  // namespace
}  // namespace ringattn::client
