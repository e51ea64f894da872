#include "server/edge/access/audit_log.h"

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

std::vector<nlohmann::json> LinesOf(const std::string& path) {
  std::vector<nlohmann::json> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

TEST(AuditLog, EveryLineIsWritten) {
  const std::string path = absl::StrCat(testing::TempDir(), "/audit");
  std::remove(path.c_str());
  Metrics metrics;
  {
    const auto log = AuditLog::Open(path, &metrics);
    ASSERT_TRUE(log.ok()) << log.status();
    for (int i = 0; i < 5000; ++i) (*log)->Write({{"request_id", absl::StrCat("r", i)}, {"n", i}});
  }
  const auto lines = LinesOf(path);
  ASSERT_EQ(lines.size(), 5000);
  EXPECT_EQ(lines[4999]["request_id"], "r4999");
  EXPECT_EQ(lines[7]["n"], 7);
  EXPECT_EQ(lines[0]["message"], "audit");
  EXPECT_NE(metrics.Text().find("ringattn_audit_lines_lost_total 0"), std::string::npos);
}

TEST(AuditLog, AMovedFileIsReopened) {
  const std::string path = absl::StrCat(testing::TempDir(), "/moved");
  std::remove(path.c_str());
  Metrics metrics;
  const auto log = AuditLog::Open(path, &metrics);
  ASSERT_TRUE(log.ok());
  const auto wait = [&](const std::string& file) {
    for (int i = 0; i < 500 && LinesOf(file).empty(); ++i) absl::SleepFor(absl::Milliseconds(10));
    return LinesOf(file);
  };
  (*log)->Write({{"request_id", "before"}});
  ASSERT_EQ(wait(path).size(), 1);
  ASSERT_EQ(std::rename(path.c_str(), (path + ".1").c_str()), 0);
  (*log)->Write({{"request_id", "after"}});
  ASSERT_EQ(wait(path).size(), 1);
  EXPECT_EQ(LinesOf(path)[0]["request_id"], "after");
  EXPECT_EQ(LinesOf(path + ".1").size(), 1);
}

TEST(AuditLog, DroppedLinesAreCounted) {
  Metrics metrics;
  EXPECT_EQ(AuditLog::Open("/no/such/folder/audit", &metrics).status().code(),
            absl::StatusCode::kInvalidArgument);
  {
    const auto log = AuditLog::Open("/dev/full", &metrics);
    ASSERT_TRUE(log.ok());
    for (int i = 0; i < 3; ++i) (*log)->Write({{"request_id", "lost"}});
  }
  EXPECT_NE(metrics.Text().find("ringattn_audit_lines_lost_total 3"), std::string::npos);
}

}  // namespace
}  // namespace ringattn::server
