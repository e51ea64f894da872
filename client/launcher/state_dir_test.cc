#include "client/launcher/state_dir.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

TEST(StateDir, OneLauncherAtATime) {
  const std::string path = testing::TempDir() + "/state_one";
  {
    const auto first = StateDir::Acquire(path);
    ASSERT_TRUE(first.ok()) << first.status();
    EXPECT_EQ(RunningLauncher(path), getpid());
    EXPECT_EQ(StateDir::Acquire(path).status().code(), absl::StatusCode::kFailedPrecondition);
  }
  EXPECT_EQ(RunningLauncher(path), std::nullopt);
  EXPECT_TRUE(StateDir::Acquire(path).ok());
}

TEST(StateDir, TheSecretIsTheOwnersAndNewEachTime) {
  const std::string path = testing::TempDir() + "/state_secret";
  std::string secrets[2];
  for (std::string& secret : secrets) {
    const auto state = StateDir::Acquire(path);
    ASSERT_TRUE(state.ok());
    const auto file = state->WriteSecret();
    ASSERT_TRUE(file.ok());
    struct stat info;
    ASSERT_EQ(stat(file->c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u);
    std::ifstream(*file) >> secret;
    EXPECT_EQ(secret.size(), 64u);
  }
  EXPECT_NE(secrets[0], secrets[1]);
}

TEST(StateDir, AFileOrALinkIsRejectedAsFolder) {
  const std::string file = testing::TempDir() + "/state_file";
  std::ofstream(file) << "x";
  EXPECT_EQ(StateDir::Acquire(file).status().code(), absl::StatusCode::kFailedPrecondition);
  const std::string link = testing::TempDir() + "/state_link";
  unlink(link.c_str());  // from an earlier run
  ASSERT_EQ(symlink(testing::TempDir().c_str(), link.c_str()), 0);
  EXPECT_FALSE(StateDir::Acquire(link).ok());
}

TEST(StateDir, AFolderThatOthersCanAccessIsRejected) {
  const std::string path = testing::TempDir() + "/state_open";
  for (const mode_t mode : {0777, 0770, 0755, 0701}) {
    rmdir(path.c_str());
    ASSERT_EQ(mkdir(path.c_str(), 0700), 0);
    ASSERT_EQ(chmod(path.c_str(), mode), 0);
    EXPECT_EQ(StateDir::Acquire(path).status().code(), absl::StatusCode::kPermissionDenied);
  }
  ASSERT_EQ(chmod(path.c_str(), 0700), 0);
  EXPECT_TRUE(StateDir::Acquire(path).ok());
}

// A process that holds the folder and either ends on SIGTERM or ignores it.
pid_t Hold(const std::string& path, bool ignores_sigterm) {
  int ready[2];
  EXPECT_EQ(pipe(ready), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    if (ignores_sigterm) signal(SIGTERM, SIG_IGN);
    const auto state = StateDir::Acquire(path);
    const ssize_t written = write(ready[1], "x", 1);
    while (written == 1) pause();
    _exit(0);
  }
  char byte;
  EXPECT_EQ(read(ready[0], &byte, 1), 1);
  close(ready[0]);
  close(ready[1]);
  return pid;
}

TEST(StopLauncher, EndsARunningLauncher) {
  const std::string path = testing::TempDir() + "/state_stop";
  EXPECT_EQ(*StopLauncher(path, absl::Seconds(1)), false);
  for (const bool ignores_sigterm : {false, true}) {
    const pid_t pid = Hold(path, ignores_sigterm);
    EXPECT_EQ(*StopLauncher(path, absl::Milliseconds(500)), true);
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_EQ(WTERMSIG(status), ignores_sigterm ? SIGKILL : SIGTERM);
    EXPECT_EQ(RunningLauncher(path), std::nullopt);
  }
}

}  // namespace
}  // namespace ringattn::client
