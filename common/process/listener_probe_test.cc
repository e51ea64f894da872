#include "common/process/listener_probe.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

// A listening socket on loopback without accept().
struct Socket {
  Socket() : fd(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in self{};
    self.sin_family = AF_INET;
    self.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&self), sizeof(self)), 0);
    EXPECT_EQ(listen(fd, 8), 0);
    socklen_t size = sizeof(self);
    getsockname(fd, reinterpret_cast<sockaddr*>(&self), &size);
    address = absl::StrCat("127.0.0.1:", ntohs(self.sin_port));
  }
  ~Socket() { Close(); }
  void Close() {
    if (fd >= 0) close(fd);
    fd = -1;
  }
  int fd;
  std::string address;
};

TEST(ListenerProbeTest, AnAnswerIsEnough) {
  Socket server;
  std::thread answers([&] {
    const int peer = accept(server.fd, nullptr, nullptr);
    char hello[33];
    EXPECT_EQ(recv(peer, hello, sizeof(hello), MSG_WAITALL), 33);
    EXPECT_EQ(send(peer, "x", 1, 0), 1);
    close(peer);
  });
  EXPECT_EQ(ProbeListener(server.address, absl::Seconds(10)), absl::OkStatus());
  answers.join();
}

TEST(ListenerProbeTest, InTlsAClientsFirstWordsAreEnough) {
  Socket server;
  std::thread answers([&] {
    const int peer = accept(server.fd, nullptr, nullptr);
    unsigned char hello[6];
    EXPECT_EQ(recv(peer, hello, sizeof(hello), MSG_WAITALL), 6);
    EXPECT_EQ(hello[0], 22);  // RFC 8446, 5.1: a handshake ...
    EXPECT_EQ(hello[1], 3);
    EXPECT_EQ(hello[5], 1);  // ... and 4: its ClientHello
    EXPECT_EQ(send(peer, "x", 1, 0), 1);
    char rest[4096];
    while (recv(peer, rest, sizeof(rest), MSG_DONTWAIT) > 0) {
    }
    close(peer);
  });
  EXPECT_EQ(ProbeListener(server.address, absl::Seconds(10), ListenerProtocol::kTls),
            absl::OkStatus());
  answers.join();
}

TEST(ListenerProbeTest, AConnectionThatNobodyAcceptsIsNoAnswer) {
  Socket server;
  EXPECT_EQ(ProbeListener(server.address, absl::Milliseconds(50)).code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST(ListenerProbeTest, AClosedPortIsUnavailable) {
  Socket server;
  server.Close();
  EXPECT_EQ(ProbeListener(server.address, absl::Seconds(10)).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(ProbeListener("nonsense", absl::Seconds(1)).code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace ringattn
