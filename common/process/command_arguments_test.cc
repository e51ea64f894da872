#include "common/process/command_arguments.h"

#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

struct Parsed {
  std::string zone = "default";
  int port = 7;
  bool check = false;
  std::vector<std::string> files;
  std::string error;
};

Parsed Parse(std::vector<const char*> arguments) {
  Parsed parsed;
  CLI::App app;
  app.add_option("--zone", parsed.zone);
  app.add_option("--port", parsed.port);
  app.add_flag("--check", parsed.check);
  app.add_option("files", parsed.files);
  arguments.insert(arguments.begin(), "program=");
  try {
    ParseArguments(&app, static_cast<int>(arguments.size()), arguments.data());
  } catch (const CLI::ParseError& error) {
    parsed.error = error.what();
  }
  return parsed;
}

TEST(CommandArguments, RejectsAFlagWithoutAValue) {
  const Parsed parsed = Parse({"--check", "--zone=", "--port=1"});
  EXPECT_EQ(parsed.error, "--zone=: has no value; give one, or omit the flag for its default");
  EXPECT_EQ(parsed.zone, "default");
  EXPECT_EQ(Parse({"--zone="}).error, parsed.error);
  EXPECT_NE(Parse({"--port=", "1"}).error, "");
}

TEST(CommandArguments, OtherArgumentsAreUnchanged) {
  const Parsed parsed = Parse({"--zone=a=", "--port", "3", "file=", "--", "--zone="});
  EXPECT_EQ(parsed.error, "");
  EXPECT_EQ(parsed.zone, "a=");
  EXPECT_EQ(parsed.port, 3);
  EXPECT_EQ(parsed.files, (std::vector<std::string>{"file=", "--zone="}));
}

}  // namespace
}  // namespace ringattn
