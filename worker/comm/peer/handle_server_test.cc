#include "worker/comm/peer/handle_server.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstdlib>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/local_memory/local_socket.h"
#include "common/security/token.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

using ::testing::HasSubstr;

absl::Time Soon() { return absl::Now() + absl::Seconds(10); }

std::set<std::string> FilesOf(const std::string& folder) {
  std::set<std::string> names;
  DIR* const listing = opendir(folder.c_str());
  while (const dirent* entry = readdir(listing)) {
    if (entry->d_name[0] != '.') names.insert(entry->d_name);
  }
  closedir(listing);
  return names;
}

ino_t InodeOf(int descriptor) {
  struct stat file = {};
  EXPECT_EQ(fstat(descriptor, &file), 0);
  return file.st_ino;
}

class HandleServerTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    segment_ = ScopedDescriptor(memfd_create("segment", MFD_CLOEXEC));
    region_ = ScopedDescriptor(memfd_create("region", MFD_CLOEXEC));
    if (GetParam()) {
      char folder[] = "/tmp/handle_server_test.XXXXXX";
      ASSERT_NE(mkdtemp(folder), nullptr);
      folder_ = folder;
    }
    Open({});
  }
  void TearDown() override {
    server_ = nullptr;
    if (!folder_.empty()) {
      EXPECT_THAT(FilesOf(folder_), ::testing::IsEmpty());
      rmdir(folder_.c_str());
    }
  }

  void Open(HandleServer::Options options) {
    options.folder = folder_;
    auto server = HandleServer::Open(std::move(options));
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    address_ = {server_->socket(), 7, token_};
  }

  std::shared_ptr<const void> Publish() {
    return server_->Publish(
        {7, token_, segment_.get(), [this] {
           return std::vector<DeviceRegion>{{nullptr, 1, region_.get()}, {nullptr, 1, -1}};
         }});
  }

  std::string folder_;
  const std::string token_ = RandomToken();
  ScopedDescriptor segment_, region_;
  std::unique_ptr<HandleServer> server_;
  PeerAddress address_;
};

TEST_P(HandleServerTest, ServesHandlesWhilePublished) {
  auto offer = Publish();
  for (int round = 0; round < 3; ++round) {
    auto segment = HandleServer::Fetch(address_, kPeerSegmentItem, Soon());
    ASSERT_TRUE(segment.ok()) << segment.status();
    EXPECT_EQ(InodeOf(segment->get()), InodeOf(segment_.get()));
    auto region = HandleServer::Fetch(address_, 0, Soon());
    ASSERT_TRUE(region.ok()) << region.status();
    EXPECT_EQ(InodeOf(region->get()), InodeOf(region_.get()));
  }
  for (int32_t none : {1, 2, -2}) {
    EXPECT_EQ(HandleServer::Fetch(address_, none, Soon()).status().code(),
              absl::StatusCode::kInternal);
  }
  offer = nullptr;
  EXPECT_EQ(HandleServer::Fetch(address_, 0, Soon()).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST_P(HandleServerTest, RejectsOtherTokenOrGeneration) {
  const auto offer = Publish();
  for (PeerAddress wrong :
       {PeerAddress{server_->socket(), 7, RandomToken()}, PeerAddress{server_->socket(), 8, token_},
        PeerAddress{server_->socket(), 7, token_.substr(1)},
        PeerAddress{server_->socket(), 7, ""}}) {
    const absl::Status status = HandleServer::Fetch(wrong, kPeerSegmentItem, Soon()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("no ring"));
  }
  EXPECT_TRUE(HandleServer::Fetch(address_, kPeerSegmentItem, Soon()).ok());
}

// First the server considers this process to be of another user, then the client the server.
TEST_P(HandleServerTest, RejectsOtherUserInBothDirections) {
  HandleServer::Options options;
  options.user = geteuid() + 1;
  Open(std::move(options));
  const auto offer = Publish();
  const absl::Status refused = HandleServer::Fetch(address_, kPeerSegmentItem, Soon()).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("own user"));
  const absl::Status foreign =
      HandleServer::Fetch(address_, kPeerSegmentItem, Soon(), nullptr, geteuid() + 1).status();
  EXPECT_EQ(foreign.code(), absl::StatusCode::kFailedPrecondition) << foreign;
  EXPECT_THAT(std::string(foreign.message()), HasSubstr("belongs to another user"));
}

TEST_P(HandleServerTest, ServesDespiteInvalidAndIdleConnections) {
  HandleServer::Options options;
  options.request_timeout = absl::Milliseconds(100);
  options.max_waiting = 4;
  Open(std::move(options));
  const auto offer = Publish();
  std::vector<ScopedDescriptor> silent;
  for (int i = 0; i < 10; ++i) {
    auto socket = ConnectLocally(server_->socket());
    ASSERT_TRUE(socket.ok()) << socket.status();
    if (i % 2 == 0) (void)SendMessage(socket->get(), std::string(i * 10, 'x'), -1, 0);
    silent.push_back(*std::move(socket));
  }
  EXPECT_TRUE(HandleServer::Fetch(address_, kPeerSegmentItem, Soon()).ok());
  // The last connection sent nothing: the server closes it at its deadline.
  const timeval timeout = {5, 0};
  setsockopt(silent.back().get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  const auto end = ReceiveMessage(silent.back().get(), 100, 0);
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_TRUE(end->bytes.empty());
}

TEST_P(HandleServerTest, ReportsMissingServer) {
  server_ = nullptr;
  const absl::Status status = HandleServer::Fetch(address_, kPeerSegmentItem, Soon()).status();
  // A folder that is not shared looks the same.
  EXPECT_EQ(status.code(), folder_.empty() ? absl::StatusCode::kUnavailable
                                           : absl::StatusCode::kFailedPrecondition)
      << status;
}

INSTANTIATE_TEST_SUITE_P(Places, HandleServerTest, ::testing::Bool(), [](const auto& info) {
  return info.param ? "InAFolder" : "InTheNamespace";
});

// A frozen server makes the client wait; a killed one leaves its socket file.
TEST(HandleServerProcessTest, FrozenOrKilledServerIsUnavailableInTime) {
  char folder[] = "/tmp/handle_server_test.XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string token = RandomToken();
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    HandleServer::Options options;
    options.folder = folder;
    auto server = HandleServer::Open(std::move(options));
    const int memory = memfd_create("segment", MFD_CLOEXEC);
    const auto offer =
        (*server)->Publish({1, token, memory, [] { return std::vector<DeviceRegion>(); }});
    const std::string socket = (*server)->socket();
    (void)!write(pipe_ends[1], socket.data(), socket.size());
    pause();
    _exit(0);
  }
  char path[200] = {};
  ASSERT_GT(read(pipe_ends[0], path, sizeof(path) - 1), 0);
  const PeerAddress address{path, 1, token};
  EXPECT_TRUE(HandleServer::Fetch(address, kPeerSegmentItem, Soon()).ok());
  kill(child, SIGSTOP);
  ASSERT_EQ(waitpid(child, nullptr, WUNTRACED), child);  // it has stopped
  const absl::Time begin = absl::Now();
  const absl::Status frozen =
      HandleServer::Fetch(address, kPeerSegmentItem, begin + absl::Milliseconds(200)).status();
  EXPECT_EQ(frozen.code(), absl::StatusCode::kUnavailable) << frozen;
  EXPECT_LT(absl::Now() - begin, absl::Seconds(5));
  int looks = 0;
  const absl::Status stopped =
      HandleServer::Fetch(address, kPeerSegmentItem, absl::InfiniteFuture(), [&] {
        return ++looks > 3;
      }).status();
  EXPECT_EQ(stopped.code(), absl::StatusCode::kCancelled) << stopped;
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  const absl::Status dead = HandleServer::Fetch(address, kPeerSegmentItem, Soon()).status();
  EXPECT_EQ(dead.code(), absl::StatusCode::kUnavailable) << dead;
  // The next server removes the file, and leaves other files.
  close(open(absl::StrCat(folder, "/other").c_str(), O_CREAT | O_WRONLY, 0600));
  EXPECT_EQ(FilesOf(folder).size(), 2u);
  HandleServer::Options options;
  options.folder = folder;
  auto next = HandleServer::Open(std::move(options));
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(FilesOf(folder).size(), 2u);
  *next = nullptr;
  EXPECT_THAT(FilesOf(folder), ::testing::ElementsAre("other"));
  unlink(absl::StrCat(folder, "/other").c_str());
  rmdir(folder);
}

TEST(HandleServerProcessTest, ReportsMissingFolderByName) {
  HandleServer::Options options;
  options.folder = "/tmp/no/such/folder";
  const absl::Status status = HandleServer::Open(std::move(options)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/tmp/no/such"));
}

}  // namespace
}  // namespace ringattn::worker
