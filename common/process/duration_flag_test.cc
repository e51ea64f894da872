#include "common/process/duration_flag.h"

#include "CLI/CLI.hpp"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

TEST(DurationFlag, TakesFiniteDurationsAboveZero) {
  absl::Duration wait = absl::Seconds(3);
  CLI::App app;
  AddDuration(&app, "--wait", &wait, "how long");
  EXPECT_NE(app.help().find("how long [3s]"), std::string::npos) << app.help();

  app.parse("--wait=1.5s");
  EXPECT_EQ(wait, absl::Milliseconds(1500));
  for (const char* bad : {"--wait=0s", "--wait=-1s", "--wait=5", "--wait=inf", "--wait=soon"}) {
    EXPECT_THROW(app.parse(bad), CLI::ValidationError) << bad;
    EXPECT_EQ(wait, absl::Milliseconds(1500)) << bad;
  }
}

TEST(DurationFlag, MayAllowZero) {
  absl::Duration wait = absl::Seconds(3);
  CLI::App app;
  AddDurationOrZero(&app, "--wait", &wait, "how long; 0: never");
  for (const char* zero : {"--wait=0", "--wait=0s"}) {
    app.parse("--wait=1.5s");
    EXPECT_EQ(wait, absl::Milliseconds(1500));
    app.parse(zero);
    EXPECT_EQ(wait, absl::ZeroDuration()) << zero;
  }
  for (const char* bad : {"--wait=-1s", "--wait=5", "--wait=inf", "--wait=soon", "--wait="}) {
    EXPECT_THROW(app.parse(bad), CLI::ParseError) << bad;
    EXPECT_EQ(wait, absl::ZeroDuration()) << bad;
  }
}

}  // namespace
}  // namespace ringattn
