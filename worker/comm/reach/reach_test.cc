#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "worker/comm/reach/probe_peers.h"
#include "worker/comm/reach/reach_listener.h"

namespace ringattn::worker {
namespace {

bool Never() { return false; }

std::unique_ptr<ReachListener> Listen(const std::string& host = "127.0.0.1") {
  absl::StatusOr<std::unique_ptr<ReachListener>> listener = ReachListener::Start(host);
  EXPECT_TRUE(listener.ok()) << listener.status();
  return listener.ok() ? *std::move(listener) : nullptr;
}

// A listening socket whose queue is full: it drops further connections in silence, as a cut link.
class FullListener {
 public:
  FullListener() {
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(fd_, 0), 0);
    socklen_t length = sizeof(address);
    getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length);
    address_ = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
    for (int i = 0; i < 4; ++i) {
      const int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
      (void)connect(client, reinterpret_cast<sockaddr*>(&address), sizeof(address));
      clients_.push_back(client);
    }
    absl::SleepFor(absl::Milliseconds(50));
  }
  ~FullListener() {
    for (int client : clients_) close(client);
    close(fd_);
  }
  const std::string& address() const { return address_; }

 private:
  int fd_ = -1;
  std::string address_;
  std::vector<int> clients_;
};

TEST(ReachTest, AListenerIsReachedAnyNumberOfTimes) {
  const auto listener = Listen();
  for (int i = 0; i < 200; ++i) {
    EXPECT_TRUE(UnreachedPeers({listener->address()}, absl::Seconds(5), Never).empty());
  }
}

TEST(ReachTest, AddressesOfIpv6HaveBrackets) {
  absl::StatusOr<std::unique_ptr<ReachListener>> listener = ReachListener::Start("::1");
  if (!listener.ok()) GTEST_SKIP() << "no IPv6: " << listener.status();
  EXPECT_EQ((*listener)->address().rfind("[::1]:", 0), 0u) << (*listener)->address();
  EXPECT_TRUE(UnreachedPeers({(*listener)->address()}, absl::Seconds(5), Never).empty());
}

TEST(ReachTest, APeerThatDoesNotAnswerIsUnreached) {
  const auto listener = Listen();
  const FullListener full;
  EXPECT_EQ(UnreachedPeers({full.address(), listener->address(), full.address()},
                           absl::Milliseconds(300), Never),
            (std::vector<uint32_t>{0, 2}));
}

TEST(ReachTest, AnEndedProcessIsReached) {
  std::string address;
  {
    const auto listener = Listen();
    address = listener->address();
  }
  EXPECT_TRUE(UnreachedPeers({address}, absl::Seconds(5), Never).empty());
}

// The kernel refuses a broadcast address at once.
TEST(ReachTest, AnUnreachableNetworkIsReportedAtOnce) {
  const absl::Time begin = absl::Now();
  EXPECT_EQ(UnreachedPeers({"255.255.255.255:1"}, absl::Seconds(60), Never),
            (std::vector<uint32_t>{0}));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(30));
}

TEST(ReachTest, UnknownAddressesCountAsReached) {
  EXPECT_TRUE(
      UnreachedPeers({"", "nonsense", "no.numeric.host:1"}, absl::Seconds(5), Never).empty());
}

TEST(ReachTest, AProbeCanBeCancelled) {
  const FullListener full;
  const absl::Time begin = absl::Now();
  EXPECT_TRUE(UnreachedPeers({full.address()}, absl::Seconds(60), [] { return true; }).empty());
  EXPECT_LT(absl::Now() - begin, absl::Seconds(30));
}

TEST(ReachTest, AForeignAddressIsRejected) {
  EXPECT_EQ(ReachListener::Start("192.0.2.1").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ringattn::worker
