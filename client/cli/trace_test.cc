#include "client/cli/trace.h"

#include <filesystem>
#include <fstream>

#include "common/wire/durations.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

TEST(Trace, BarsOfARankAreShiftedAndOnRowsByCategory) {
  CallReport report;
  report.times = {.accepted_seconds = 1,
                  .uploaded_seconds = 2,
                  .first_output_seconds = 4,
                  .finished_seconds = 5};
  v1::RankReport* rank = report.summary.add_ranks();
  rank->set_rank(3);
  rank->set_worker("worker-3");
  const auto add = [&](const char* name, v1::TimelineCategory category, double begin, double end) {
    v1::TimelineEvent* event = rank->add_timeline();
    event->set_name(name);
    event->set_category(category);
    SetSeconds(begin, event->mutable_begin());
    SetSeconds(end, event->mutable_end());
  };
  add("step 0 forward", v1::TIMELINE_CATEGORY_COMPUTE, 1.0, 1.5);
  add("step 0 exchange", v1::TIMELINE_CATEGORY_EXCHANGE, 1.0, 1.2);
  add("step 1 forward", v1::TIMELINE_CATEGORY_COMPUTE, 1.5, 2.0);
  rank->mutable_timeline(2)->set_kernel_family("sm90");
  rank->mutable_timeline(2)->set_kernel_class("terms");
  const Json trace = TraceJson(report);
  int rows[3] = {}, at = 0;
  for (const Json& event : trace["traceEvents"]) {
    if (event["ph"] != "X" || event["pid"] != 13) continue;
    if (at == 0) {
      EXPECT_EQ(event["ts"], 2.0e6);
      EXPECT_EQ(event["dur"], 0.5e6);
    }
    EXPECT_EQ(event.contains("args"), at == 2);
    if (at == 2) {
      EXPECT_EQ(event["args"], (Json{{"family", "sm90"}, {"class", "terms"}}));
    }
    rows[at++] = event["tid"];
  }
  ASSERT_EQ(at, 3);
  EXPECT_EQ(rows[0], rows[2]);
  EXPECT_NE(rows[0], rows[1]);
}

TEST(Trace, NamesTheCallAndItsTransport) {
  CallReport report;
  report.accepted.set_request_id("mine");
  report.accepted.set_traceparent("00-trace");
  report.accepted.set_transport(v1::TRANSPORT_DIRECT);
  report.transport_reason = "no region";
  const Json trace = TraceJson(report);
  EXPECT_EQ(trace["otherData"]["request_id"], "mine");
  EXPECT_EQ(trace["otherData"]["traceparent"], "00-trace");
  EXPECT_EQ(trace["otherData"]["transport"], "direct");
  EXPECT_EQ(trace["otherData"]["transport_reason"], "no region");
  std::vector<Json> uploads;
  for (const Json& event : trace["traceEvents"]) {
    if (event["ph"] == "X" && event["name"] == "upload") uploads.push_back(event["args"]);
  }
  ASSERT_EQ(uploads.size(), 1u);
  EXPECT_EQ(uploads[0], (Json{{"transport", "direct"}, {"reason", "no region"}}));
}

TEST(TraceFile, APathThatCannotBeWrittenFailsWhenItIsOpened) {
  const std::string folder = testing::TempDir();
  EXPECT_EQ(TraceFile::Open(folder + "/no/such/folder").status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_FALSE(TraceFile::Open(folder).ok());
  const auto none = TraceFile::Open("");
  EXPECT_TRUE(none.ok());
}

TEST(TraceFile, AFileIsReplacedOnceTheCallHasSucceeded) {
  const std::string path = testing::TempDir() + "/trace.json";
  const auto content = [&] {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  std::filesystem::remove(path);
  ASSERT_TRUE(TraceFile::Open(path).ok());
  EXPECT_FALSE(std::filesystem::exists(path)) << "of a call that failed";
  std::ofstream(path) << std::string(100'000, 'x');
  ASSERT_TRUE(TraceFile::Open(path).ok());
  EXPECT_EQ(content().size(), 100'000u) << "of a call that failed";
  auto file = TraceFile::Open(path);
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE(file->Write(CallReport()).ok());
  EXPECT_TRUE(Json::accept(content()));
  EXPECT_LT(content().size(), 10'000u);
}

}  // namespace
}  // namespace ringattn::client::cli
