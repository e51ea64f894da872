#include "client/launcher/supervisor.h"

#include <signal.h>
#include <sys/wait.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "client/launcher/child_process.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

class SupervisorTest : public testing::Test {
 protected:
  SupervisorTest()
      : supervisor_({.stopped_max = absl::Seconds(1),
                     .initial_backoff = absl::Milliseconds(20),
                     .max_backoff = absl::Milliseconds(100),
                     .probe_interval = absl::Milliseconds(10),
                     .silent_max = absl::Milliseconds(200),
                     .max_log_bytes = 100'000},
                    [this](const std::string& line) { log_ += line + "\n"; }) {}

  absl::Status Add(const std::string& name, const std::string& script) {
    return supervisor_.Add({.name = name,
                            .command =
                                [script] {
                                  return std::vector<std::string>{"/bin/sh", "-c", script};
                                },
                            .log_path = testing::TempDir() + "/" + name + ".log"});
  }

  // Adds a child that ignores SIGTERM; returns true once it does.
  bool AddStubborn() {
    const std::string log = testing::TempDir() + "/stubborn.log";
    std::filesystem::remove(log);
    std::string word;
    return Add("stubborn", "trap '' TERM; echo set; while :; do sleep 0.05; done").ok() &&
           PollUntil([&] {
             std::ifstream(log) >> word;
             return word == "set";
           });
  }

  bool PollUntil(const std::function<bool()>& condition) {
    const absl::Time end = absl::Now() + absl::Seconds(10);
    while (!condition() && absl::Now() < end) {
      supervisor_.Poll();
      absl::SleepFor(absl::Milliseconds(5));
    }
    return condition();
  }

  std::string log_;
  Supervisor supervisor_;
};

TEST_F(SupervisorTest, RestartsAKilledChild) {
  ASSERT_TRUE(Add("a", "exec sleep 100").ok());
  const pid_t first = supervisor_.pid("a");
  kill(first, SIGKILL);
  ASSERT_TRUE(
      PollUntil([&] { return supervisor_.exit_count("a") == 1 && supervisor_.pid("a") != 0; }));
  EXPECT_NE(supervisor_.pid("a"), first);
  EXPECT_TRUE(absl::StrContains(log_, "killed by signal 9"));
}

TEST_F(SupervisorTest, KillsAndRestartsAStoppedChild) {
  ASSERT_TRUE(Add("a", "exec sleep 100").ok());
  const pid_t first = supervisor_.pid("a");
  kill(first, SIGSTOP);
  ASSERT_TRUE(
      PollUntil([&] { return supervisor_.pid("a") != first && supervisor_.pid("a") != 0; }));
  EXPECT_TRUE(absl::StrContains(log_, "stands stopped"));
}

TEST_F(SupervisorTest, AShortStopIsLeftAlone) {
  ASSERT_TRUE(Add("a", "exec sleep 100").ok());
  const pid_t first = supervisor_.pid("a");
  for (int i = 0; i < 12; ++i) {  // together longer than the limit
    kill(first, SIGSTOP);
    for (int k = 0; k < 10; ++k, absl::SleepFor(absl::Milliseconds(10))) supervisor_.Poll();
    kill(first, SIGCONT);
    absl::SleepFor(absl::Milliseconds(10));
    supervisor_.Poll();
  }
  EXPECT_EQ(supervisor_.pid("a"), first);
}

TEST_F(SupervisorTest, KillsAndRestartsAChildThatDoesNotAnswer) {
  int asked = 0;
  ASSERT_TRUE(supervisor_
                  .Add({.name = "deaf",
                        .command =
                            [] {
                              return std::vector<std::string>{"/bin/sh", "-c", "exec sleep 100"};
                            },
                        .log_path = testing::TempDir() + "/deaf.log",
                        .answers = [&] { return ++asked <= 3; }})
                  .ok());
  const pid_t first = supervisor_.pid("deaf");
  ASSERT_TRUE(PollUntil(
      [&] { return supervisor_.exit_count("deaf") == 1 && supervisor_.pid("deaf") != 0; }));
  EXPECT_NE(supervisor_.pid("deaf"), first);
  EXPECT_GT(asked, 3);
  EXPECT_TRUE(absl::StrContains(log_, "has not answered for"));
}

TEST_F(SupervisorTest, LogsAreBounded) {
  ASSERT_TRUE(Add("flood", "yes a line of sixteen | head -c 1000000; exec sleep 100").ok());
  const std::string log = testing::TempDir() + "/flood.log";
  // All output has been written, and the log has been rotated since.
  ASSERT_TRUE(PollUntil([&] {
    return std::filesystem::exists(log + ".1") && std::filesystem::file_size(log) <= 100'000;
  }));
}

TEST_F(SupervisorTest, KeepsTheEndOfTheOutput) {
  ASSERT_TRUE(Add("wrong", "echo wrong flag; exit 9").ok());
  ASSERT_TRUE(PollUntil([&] { return supervisor_.exit_count("wrong") == 1; }));
  EXPECT_EQ(supervisor_.last_output("wrong"), "wrong flag\n");
  EXPECT_EQ(WEXITSTATUS(supervisor_.last_exit("wrong")), 9);
}

TEST_F(SupervisorTest, AHurryShortensTheEnd) {
  ASSERT_TRUE(AddStubborn());
  int asked = 0;
  const absl::Time start = absl::Now();
  supervisor_.EndAll(absl::Seconds(100), [&] { return ++asked == 3; });
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
  EXPECT_EQ(supervisor_.pid("stubborn"), 0);
  EXPECT_TRUE(absl::StrContains(log_, "stubborn: killed at once"));
}

TEST_F(SupervisorTest, PausesGrowWhileAChildKeepsDying) {
  ASSERT_TRUE(Add("a", "exit 3").ok());
  const absl::Time start = absl::Now();
  ASSERT_TRUE(PollUntil([&] { return supervisor_.exit_count("a") == 5; }));
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(20 + 40 + 80 + 100));
  EXPECT_TRUE(absl::StrContains(log_, "exited with 3; restarting in 100ms"));
}

TEST_F(SupervisorTest, EndIsBoundedForStubbornAndStoppedChildren) {
  ASSERT_TRUE(Add("kind", "exec sleep 100").ok());
  ASSERT_TRUE(AddStubborn());
  ASSERT_TRUE(Add("stopped", "exec sleep 100").ok());
  kill(supervisor_.pid("stopped"), SIGSTOP);
  const absl::Time start = absl::Now();
  supervisor_.EndAll(absl::Seconds(1));
  EXPECT_LT(absl::Now() - start, absl::Seconds(8));
  EXPECT_TRUE(absl::StrContains(log_, "stubborn did not end in time"));
  EXPECT_FALSE(absl::StrContains(log_, "kind did not"));
  EXPECT_FALSE(absl::StrContains(log_, "stopped did not"));
  for (const char* name : {"kind", "stubborn", "stopped"}) EXPECT_EQ(supervisor_.pid(name), 0);
  supervisor_.Poll();
  EXPECT_EQ(supervisor_.pid("kind"), 0);
}

TEST_F(SupervisorTest, AMissingProgramIsAnError) {
  EXPECT_EQ(StartChild({"/no/such/program"}, "/dev/null").status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(SupervisorTest, OutputGoesToTheLog) {
  ASSERT_TRUE(Add("talker", "echo said; exec sleep 100").ok());
  std::string word;
  EXPECT_TRUE(PollUntil([&] {
    std::ifstream(testing::TempDir() + "/talker.log") >> word;
    return word == "said";
  }));
}

// Another user may have put a link where a log is written.
TEST(StartChildTest, ALogThatIsALinkIsNotFollowed) {
  const std::string target = testing::TempDir() + "/target";
  const std::string link = testing::TempDir() + "/linked.log";
  unlink(target.c_str());
  unlink(link.c_str());
  ASSERT_EQ(symlink(target.c_str(), link.c_str()), 0);
  EXPECT_FALSE(StartChild({"/bin/true"}, link).ok());
  EXPECT_NE(access(target.c_str(), F_OK), 0);
}

}  // namespace
}  // namespace ringattn::client
