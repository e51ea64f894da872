#include "server/edge/access/audit_log.h"

#include <signal.h>
#include <sys/resource.h>

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

// A full disk cuts a record. The next record begins a line, in this process and in the next one.
TEST(AuditLog, ARecordAfterAFullDiskBeginsALine) {
  const std::string path = absl::StrCat(testing::TempDir(), "/full");
  std::remove(path.c_str());
  signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto set_limit = [&](rlim_t bytes) {
    const rlimit limit = {bytes, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  };
  Metrics metrics;
  const auto wait_for_lost = [&](int count) {
    const std::string line = absl::StrCat("ringattn_audit_lines_lost_total ", count);
    for (int i = 0; i < 500 && metrics.Text().find(line) == std::string::npos; ++i) {
      absl::SleepFor(absl::Milliseconds(10));
    }
    EXPECT_NE(metrics.Text().find(line), std::string::npos);
  };
  {
    const auto log = AuditLog::Open(path, &metrics);
    ASSERT_TRUE(log.ok());
    set_limit(40);
    (*log)->Write({{"request_id", "cut-1"}});
    wait_for_lost(1);
    set_limit(before.rlim_cur);
    (*log)->Write({{"request_id", "kept-1"}});
  }
  std::ofstream(path, std::ios::app) << "{cut";
  {
    const auto log = AuditLog::Open(path, &metrics);
    ASSERT_TRUE(log.ok());
    (*log)->Write({{"request_id", "kept-2"}});
  }
  std::vector<std::string> kept;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_discarded()) kept.push_back(json["request_id"]);
  }
  EXPECT_EQ(kept, (std::vector<std::string>{"kept-1", "kept-2"}));
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
