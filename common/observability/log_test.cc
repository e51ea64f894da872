#include "common/observability/log.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "gtest/gtest.h"

namespace ringattn {
namespace {

TEST(LogTest, ALineIsOneJsonObject) {
  const std::string line = FormatLogLine("p", LogLevel::kWarning, "odd \"name\"\n",
                                         {{"request_id", std::string("r\x01\xff")},
                                          {"generation", uint64_t{7}},
                                          {"rank", -1},
                                          {"seconds", 0.5},
                                          {"ok", true}});
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const auto json = nlohmann::json::parse(line);
  EXPECT_EQ(json["level"], "warning");
  EXPECT_EQ(json["process"], "p");
  EXPECT_EQ(json["message"], "odd \"name\"\n");
  EXPECT_EQ(json["generation"], 7);
  EXPECT_EQ(json["rank"], -1);
  EXPECT_EQ(json["seconds"], 0.5);
  EXPECT_EQ(json["ok"], true);
}

TEST(LogTest, LevelsHaveNames) {
  EXPECT_EQ(LogLevelFromName("debug"), LogLevel::kDebug);
  EXPECT_EQ(LogLevelFromName("error"), LogLevel::kError);
  EXPECT_EQ(LogLevelFromName("loud"), std::nullopt);
}

TEST(LogTest, WritesThroughItsOwnThread) {
  InitLogging("log_test", LogLevel::kInfo);
  testing::internal::CaptureStderr();
  LogInfo("hello", {{"count", 1}});
  LogDebug("hidden");
  ShutdownLogging();
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("\"message\":\"hello\",\"count\":1}"), std::string::npos) << text;
  EXPECT_EQ(text.find("hidden"), std::string::npos);
}

// A flood of messages is thinned out, and the suppressed lines are counted.
TEST(LogTest, AFloodIsThinnedOutAndCounted) {
  InitLogging("log_test", LogLevel::kInfo);
  testing::internal::CaptureStderr();
  for (int i = 0; i < 5000; ++i) LogInfo("flood", {{"i", i}});
  LogInfo("another");
  ShutdownLogging();
  const std::string text = testing::internal::GetCapturedStderr();
  const auto lines = std::count(text.begin(), text.end(), '\n');
  EXPECT_GE(lines, 200);
  EXPECT_LE(lines, 400);
  EXPECT_NE(text.find("\"message\":\"another\""), std::string::npos);
}

TEST(LogTest, ALineSaysHowManyAreMissing) {
  const auto json = nlohmann::json::parse(FormatLogLine("p", LogLevel::kInfo, "m", {}, 7));
  EXPECT_EQ(json["suppressed"], 7);
}

}  // namespace
}  // namespace ringattn
