#include "client/cli/trace.h"

#include "gtest/gtest.h"

namespace ringattn::cli {
namespace {

TEST(Trace, BarsOfARankAreShiftedAndOnRowsByCategory) {
  CallReport report;
  report.times = {.accepted_seconds = 1, .uploaded_seconds = 2, .first_output_seconds = 4,
                  .finished_seconds = 5};
  v1::RankReport* rank = report.summary.add_ranks();
  rank->set_rank(3);
  rank->set_worker("worker-3");
  const auto add = [&](const char* name, const char* category, double begin, double end) {
    v1::TimelineEvent* event = rank->add_timeline();
    event->set_name(name);
    event->set_category(category);
    event->set_begin_seconds(begin);
    event->set_end_seconds(end);
  };
  add("step 0 forward", "compute", 1.0, 1.5);
  add("step 0 exchange", "exchange", 1.0, 1.2);
  add("step 1 forward", "compute", 1.5, 2.0);
  const Json trace = TraceJson(report);
  int rows[3] = {}, at = 0;
  for (const Json& event : trace["traceEvents"]) {
    if (event["ph"] != "X" || event["pid"] != 13) continue;
    if (at == 0) {
      EXPECT_EQ(event["ts"], 2.0e6);
      EXPECT_EQ(event["dur"], 0.5e6);
    }
    rows[at++] = event["tid"];
  }
  ASSERT_EQ(at, 3);
  EXPECT_EQ(rows[0], rows[2]);
  EXPECT_NE(rows[0], rows[1]);
}

}  // namespace
}  // namespace ringattn::cli
