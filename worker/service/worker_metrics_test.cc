#include "worker/service/worker_metrics.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(WorkerMetricsTest, InfoSeriesIdentifiesWorker) {
  WorkerMetrics metrics;
  metrics.Describe("worker-3", "cuda:0 \"fast\"", "1.2.3", 1 << 20);
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_worker_info{device=\"cuda:0 \\\"fast\\\"\","
                                        "rank=\"none\",worker=\"worker-3\"} 1"));
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_build_info{version=\"1.2.3\"} 1"));
  EXPECT_THAT(metrics.Text(), HasSubstr("ringattn_worker_memory_limit_bytes 1048576"));
  metrics.SetRank(2);
  EXPECT_THAT(metrics.Text(), HasSubstr("rank=\"2\",worker=\"worker-3\"} 1"));
  EXPECT_THAT(metrics.Text(), Not(HasSubstr("rank=\"none\"")));
  metrics.SetRank(std::nullopt);
  EXPECT_THAT(metrics.Text(), HasSubstr("rank=\"none\""));
  EXPECT_THAT(metrics.Text(), Not(HasSubstr("rank=\"2\"")));
}

TEST(WorkerMetricsTest, KernelSeriesStartAtZero) {
  WorkerMetrics metrics;
  metrics.ExpectKernels({{"sm90", {DType::kBFloat16}, /*backward=*/false, {.score_terms = false}},
                         {"simt", {DType::kBFloat16}, /*backward=*/true, {.score_terms = true}}});
  const std::string text = metrics.Text();
  EXPECT_THAT(text, HasSubstr("ringattn_worker_kernel_calls_total{call=\"forward\","
                              "class=\"plain\",family=\"sm90\"} 0"));
  EXPECT_THAT(text, HasSubstr("ringattn_worker_kernel_calls_total{call=\"backward\","
                              "class=\"terms\",family=\"simt\"} 0"));
}

}  // namespace
}  // namespace ringattn::worker
