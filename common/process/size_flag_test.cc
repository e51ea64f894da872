#include "common/process/size_flag.h"

#include "CLI/CLI.hpp"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

TEST(SizeFlag, UnitsArePowersOfTwo) {
  EXPECT_EQ(ParseSize("0"), 0);
  EXPECT_EQ(ParseSize("1073741824"), int64_t{1} << 30);
  EXPECT_EQ(ParseSize("9007199254740993"), 9007199254740993);
  for (const char* text : {"10MiB", "10mib", "10MB", "10M", "10 MiB", "10485760B"}) {
    EXPECT_EQ(ParseSize(text), 10 << 20) << text;
  }
  EXPECT_EQ(ParseSize("1.5GiB"), int64_t{3} << 29);
  EXPECT_EQ(ParseSize("4TiB"), int64_t{4} << 40);
  for (const char* text : {"", "MiB", "-1", "1e3", "nan", "10iB", "10Mi B", "10XiB", "1..5M",
                           "9999999TiB", "10MiBs"}) {
    EXPECT_EQ(ParseSize(text), std::nullopt) << text;
  }
}

TEST(SizeFlag, ErrorsNameTheValueAndWhatIsAccepted) {
  int64_t limit = 7;
  CLI::App app;
  AddSize(&app, "--limit", &limit, 1 << 20, 1 << 30, "how much");
  app.parse("--limit=10MiB");
  EXPECT_EQ(limit, 10 << 20);
  const auto error = [&](const char* text) -> std::string {
    try {
      app.parse(text);
    } catch (const CLI::ValidationError& failure) {
      return failure.what();
    }
    return "";
  };
  EXPECT_EQ(error("--limit=lots"), "--limit: lots is not a size, such as 1000000, 512MiB or 4GiB");
  EXPECT_EQ(error("--limit=2GiB"),
            "--limit: 2GiB is outside the range of 1048576 to 1073741824 bytes");
  EXPECT_EQ(limit, 10 << 20);
}

}  // namespace
}  // namespace ringattn
