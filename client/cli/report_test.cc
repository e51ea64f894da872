#include "client/cli/report.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

void AddKernel(v1::RankReport* rank, const char* call, const char* family,
               const char* instructions = "") {
  v1::KernelUse* use = rank->add_kernels();
  use->set_call(call);
  use->set_family(family);
  use->set_kernel_class("plain");
  use->set_instructions(instructions);
  use->set_calls(3);
}

TEST(Report, EqualKernelsOfMembersAreListedOnce) {
  CallReport report;
  for (const char* worker : {"a", "b"}) {
    v1::RankReport* rank = report.summary.add_ranks();
    rank->set_worker(worker);
    AddKernel(rank, "forward", "sm90");
    AddKernel(rank, "probabilities", "simt");
  }
  EXPECT_EQ(KernelsText(report.summary), "forward by sm90/plain; probabilities by simt/plain");
  EXPECT_THAT(CallText(report), HasSubstr("\nran    forward by sm90/plain; prob"));
}

TEST(Report, DifferentKernelsAreListedWithTheirWorkers) {
  CallReport report;
  for (const char* worker : {"a", "b", "c"}) {
    v1::RankReport* rank = report.summary.add_ranks();
    rank->set_worker(worker);
    if (*worker == 'b') {
      AddKernel(rank, "forward", "cpu_bf16", "AVX512_BF16");
    } else {
      AddKernel(rank, "forward", "sm90");
    }
  }
  EXPECT_EQ(KernelsText(report.summary),
            "forward by sm90/plain (a, c), cpu_bf16/plain AVX512_BF16 (b)");
  const Json json = CallJson({}, report);
  EXPECT_EQ(json["ranks"][1]["kernels"], Json::array({{{"call", "forward"},
                                                       {"family", "cpu_bf16"},
                                                       {"class", "plain"},
                                                       {"instructions", "AVX512_BF16"},
                                                       {"calls", 3}}}));
}

TEST(Report, RequestedOptionsAreListed) {
  Problem problem;
  EXPECT_EQ(CallJson(problem, {})["options"], Json::object());
  EXPECT_EQ(OptionsText(problem), "");
  problem.options.set_causal(true);
  problem.options.mutable_dropout()->set_rate(0.25);
  problem.options.mutable_sinks();
  problem.has_dlse = true;
  problem.probability_rows.emplace_back().set_position(7);
  const Json options = CallJson(problem, {})["options"];
  EXPECT_EQ(options["causal"], true);
  EXPECT_EQ(options["dropout"]["rate"], 0.25);
  EXPECT_EQ(options["sinks"], Json::object());
  EXPECT_EQ(options["probabilities"][0]["position"], 7);
  EXPECT_FALSE(options.contains("window"));
  EXPECT_EQ(OptionsText(problem), "with   causal, dropout, sinks, dlse, probabilities\n");
}

TEST(Report, WithoutKernelReportsThereIsNoKernelLine) {
  CallReport report;
  report.summary.add_ranks()->set_worker("a");
  EXPECT_EQ(KernelsText(report.summary), "");
  EXPECT_THAT(CallText(report), Not(HasSubstr("ran ")));
}

TEST(Report, FailedAttemptsAreExplainedAndCounted) {
  CallReport report;
  report.times.finished_seconds = 2;
  report.summary.set_attempts(1);
  EXPECT_THAT(CallText(report), HasSubstr("time   2.000 s\n"));
  EXPECT_THAT(CallText(report), Not(HasSubstr("failed")));
  EXPECT_EQ(CallJson({}, report)["failed_attempts"]["last"], "");
  report.accepted.set_request_id("r");
  report.summary.set_attempts(2);
  report.failed_seconds = 7.25;
  report.last_failure = absl::AbortedError("worker-2 was lost");
  EXPECT_THAT(CallText(report), HasSubstr("time   9.250 s, failed attempts 7.250\n"));
  EXPECT_THAT(CallText(report), HasSubstr("sent   2 times under request id r\n"
                                          "failed ABORTED: worker-2 was lost\n"));
  const Json failed = CallJson({}, report)["failed_attempts"];
  EXPECT_EQ(failed["seconds"], 7.25);
  EXPECT_EQ(failed["last"], "ABORTED: worker-2 was lost");
}

// A first example that was sized for a GPU may take minutes on a CPU.
TEST(Report, ALongPredictionIsShown) {
  v1::Accepted accepted;
  EXPECT_EQ(PredictionText(accepted), "");
  accepted.mutable_plan()->mutable_predicted_compute_time()->set_seconds(10);
  EXPECT_EQ(PredictionText(accepted), "");
  accepted.mutable_plan()->mutable_predicted_compute_time()->set_seconds(101);
  EXPECT_EQ(PredictionText(accepted), "ringattn: computing is predicted to take 101 s\n");
}

}  // namespace
}  // namespace ringattn::client::cli
