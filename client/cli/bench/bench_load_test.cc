#include "client/cli/bench/bench_load.h"

#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/cli/flag_set.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client::cli {
namespace {

using ::testing::HasSubstr;

absl::Status Prepare(const std::string& text) {
  FlagSet command;
  LoadFlags flags;
  flags.AddTo(command);
  if (absl::Status status = command.ParseText(text); !status.ok()) return status;
  return LoadTest::Prepare(flags).status();
}

TEST(BenchLoadTest, ExportsAreCheckedBeforeTheMeasurement) {
  const std::string path = absl::StrCat(testing::TempDir(), "/levels.csv");
  for (const char* flag : {"--export_csv", "--export_json"}) {
    const absl::Status status =
        Prepare(absl::StrCat("--concurrency_range=1 ", flag, "=/no/such/folder/file"));
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat(flag, ": cannot write /no/such/folder/file")));
    EXPECT_TRUE(Prepare(absl::StrCat("--concurrency_range=1 ", flag, "=", path)).ok());
    EXPECT_FALSE(std::ifstream(path).is_open());
  }
  std::ofstream(path) << "kept";
  EXPECT_TRUE(Prepare(absl::StrCat("--concurrency_range=1 --export_csv=", path)).ok());
  std::string text;
  std::ifstream(path) >> text;
  EXPECT_EQ(text, "kept");
}

TEST(BenchLoadTest, ThresholdsAreFinite) {
  for (const char* value : {"nan", "-nan", "inf", "-1", "0"}) {
    EXPECT_FALSE(Prepare(absl::StrCat("--concurrency_range=1 --latency_threshold=", value)).ok())
        << value;
    EXPECT_FALSE(Prepare(absl::StrCat("--concurrency_range=1 --stability_percentage=", value)).ok())
        << value;
  }
  EXPECT_TRUE(Prepare("--concurrency_range=1 --latency_threshold=2.5").ok());
}

TEST(BenchLoadTest, DurationsTakeUnits) {
  for (const char* flag : {"measurement_interval", "metrics_interval", "latency_threshold"}) {
    const auto prepare = [flag](const char* value) {
      return Prepare(absl::StrCat("--concurrency_range=1 --", flag, "=", value));
    };
    for (const char* value : {"50", "50ms", "0.05s", "1m"})
      EXPECT_TRUE(prepare(value).ok()) << flag;
    for (const char* value : {"-1s", "0s", "inf"})
      EXPECT_FALSE(prepare(value).ok()) << flag << value;
    EXPECT_THAT(std::string(prepare("soon").message()),
                HasSubstr("is soon; must be a duration like 50ms, or a number of milliseconds"));
  }
}

TEST(BenchLoadTest, UnitsAreMilliseconds) {
  FlagSet command;
  double interval = 0;
  command.Add("--interval", &interval, "").AsMilliseconds().InRange(1.0, 3.6e6);
  ASSERT_TRUE(command.ParseText("--interval=1.5s").ok());
  EXPECT_EQ(interval, 1500);
  ASSERT_TRUE(command.ParseText("--interval=7").ok());
  EXPECT_EQ(interval, 7);
}

}  // namespace
}  // namespace ringattn::client::cli
