#include "common/wire/grpc_1_51/listener.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/synchronization/mutex.h"
#include "common/process/descriptors.h"
#include "gtest/gtest.h"

namespace ringattn::wire {
namespace {

int Connect(const std::string& address) {
  int port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port));
  sockaddr_in peer{};
  peer.sin_family = AF_INET;
  peer.sin_port = htons(port);
  peer.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&peer), sizeof(peer)), 0);
  return fd;
}

// Returns everything that the peer sends before it closes.
std::string ReadAll(int fd) {
  std::string received;
  char buffer[256];
  for (ssize_t n; (n = recv(fd, buffer, sizeof(buffer), 0)) > 0;) received.append(buffer, n);
  return received;
}

// Keeps the connections that a listener passes on.
class Keeper {
 public:
  ~Keeper() {
    for (const int fd : fds_) close(fd);
  }
  void Take(int fd) {
    absl::MutexLock lock(&mutex_);
    fds_.push_back(fd);
  }
  void CloseOne() {
    absl::MutexLock lock(&mutex_);
    close(fds_.back());
    fds_.pop_back();
  }
  bool Await(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto there = [&] {
      mutex_.AssertHeld();
      return fds_.size() >= count;
    };
    return mutex_.AwaitWithTimeout(absl::Condition(&there), absl::Seconds(10));
  }

 private:
  absl::Mutex mutex_;
  std::vector<int> fds_ ABSL_GUARDED_BY(mutex_);
};

TEST(ListenerTest, RejectsConnectionsOverLimitWithReason) {
  Keeper keeper;
  auto listener = Listener::Bind({.address = "127.0.0.1:0", .max_connections = 2});
  ASSERT_TRUE(listener.ok()) << listener.status();
  (*listener)->StartWith([&](int, int fd) { keeper.Take(fd); });
  const int first = Connect((*listener)->address());
  const int second = Connect((*listener)->address());
  ASSERT_TRUE(keeper.Await(2));
  const int third = Connect((*listener)->address());
  const std::string received = ReadAll(third);
  EXPECT_NE(received.find("too many connections"), std::string::npos);
  EXPECT_EQ(received[3], '\7');  // GOAWAY
  EXPECT_EQ((*listener)->Stats().open, 2);
  EXPECT_EQ((*listener)->Stats().refused, 1);
  // Below the limit again.
  keeper.CloseOne();
  EXPECT_EQ((*listener)->Stats().open, 1);
  const int fourth = Connect((*listener)->address());
  EXPECT_TRUE(keeper.Await(2));
  for (const int fd : {first, second, third, fourth}) close(fd);
}

// All descriptors are in use: gRPC's listener would stop accepting permanently.
TEST(ListenerTest, ContinuesAfterDescriptorShortage) {
  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = 64;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  Keeper keeper;
  auto listener = Listener::Bind({.address = "127.0.0.1:0"});
  ASSERT_TRUE(listener.ok()) << listener.status();
  (*listener)->StartWith([&](int, int fd) { keeper.Take(fd); });
  const int early = Connect((*listener)->address());
  ASSERT_TRUE(keeper.Await(1));
  const int shed = socket(AF_INET, SOCK_STREAM, 0);
  const int late = socket(AF_INET, SOCK_STREAM, 0);
  std::vector<int> hoard;
  for (int fd; (fd = open("/dev/null", O_RDONLY)) >= 0;) hoard.push_back(fd);
  sockaddr_in peer{};
  int port = 0;
  ASSERT_TRUE(absl::SimpleAtoi((*listener)->address().substr(10), &port));
  peer.sin_family = AF_INET;
  peer.sin_port = htons(port);
  peer.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(connect(shed, reinterpret_cast<sockaddr*>(&peer), sizeof(peer)), 0);
  EXPECT_NE(ReadAll(shed).find("too many connections"), std::string::npos);
  EXPECT_GE((*listener)->Stats().failed_accepts, 1);
  for (const int fd : hoard) close(fd);
  ASSERT_EQ(connect(late, reinterpret_cast<sockaddr*>(&peer), sizeof(peer)), 0);
  EXPECT_TRUE(keeper.Await(2));
  for (const int fd : {early, shed, late}) close(fd);
}

TEST(ListenerTest, PortInUseIsAnError) {
  auto first = Listener::Bind({.address = "127.0.0.1:0"});
  ASSERT_TRUE(first.ok());
  const auto why = [](const std::string& address) {
    const absl::Status status = Listener::Bind({.address = address}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    return std::string(status.message());
  };
  const std::string taken = (*first)->address();
  EXPECT_EQ(why(taken), "cannot listen on " + taken + ": Address already in use");
  EXPECT_EQ(why("no port"), "cannot listen on no port: the address is not host:port");
  EXPECT_EQ(why("192.0.2.1:0"), "cannot listen on 192.0.2.1:0: Cannot assign requested address");
}

TEST(ListenerTest, BindsAllAddressesOfName) {
  auto listener = Listener::Bind({.address = "localhost:0"});
  ASSERT_TRUE(listener.ok()) << listener.status();
  EXPECT_EQ((*listener)->address().rfind("localhost:", 0), 0);
}

}  // namespace
}  // namespace ringattn::wire
