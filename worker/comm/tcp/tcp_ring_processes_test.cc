// The rate of TCP rings of separate processes.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/forked_ring.h"
#include "worker/comm/contract/ring_fixture.h"
#include "worker/comm/tcp/tcp_ring_transport.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;

void Pump(int fd, int64_t bytes, bool out) {
  std::vector<char> piece(1 << 20);
  while (bytes > 0) {
    const size_t want = std::min<int64_t>(bytes, piece.size());
    const ssize_t moved = out ? write(fd, piece.data(), want) : read(fd, piece.data(), want);
    if (moved <= 0) _exit(1);
    bytes -= moved;
  }
}

// Transfers `bytes` in each direction between two processes over one connection.
double RawTcpBytesPerSecond(int64_t bytes) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  EXPECT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(listen(listener, 1), 0);
  EXPECT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
  const absl::Time begin = absl::Now();
  pid_t children[2];
  for (int side : {0, 1}) {
    children[side] = fork();
    if (children[side] != 0) continue;
    alarm(60);
    int fd = -1;
    if (side == 0) {
      fd = accept(listener, nullptr, nullptr);
    } else {
      fd = socket(AF_INET, SOCK_STREAM, 0);
      if (connect(fd, reinterpret_cast<sockaddr*>(&address), length) != 0) _exit(1);
    }
    std::thread sender([=] { Pump(fd, bytes, true); });
    Pump(fd, bytes, false);
    sender.join();
    _exit(0);
  }
  for (pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  close(listener);
  return 2.0 * bytes / absl::ToDoubleSeconds(absl::Now() - begin);
}

// Full duplex between two processes, compared with raw TCP in the same run. Prints the rates and
// checks only against a gross loss, because the machine may be busy.
TEST(TcpRingProcesses, Throughput) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  constexpr int kRounds = 8;
  const auto make_transport = [] {
    return std::make_unique<TcpRingTransport>(TcpTransportOptions{});
  };
  ForkedRing ring(2, make_transport, [](Communicator& communicator) {
    std::vector<uint8_t> out(kBytes), in(kBytes);
    RunControl control;
    const int peer = 1 - communicator.rank();
    for (int round = 0; round < kRounds; ++round) {
      EventRef done = communicator.Start(
          {{Kind::kSend, peer, out.data(), kBytes}, {Kind::kReceive, peer, in.data(), kBytes}}, {},
          &control);
      if (!done->Wait(Soon()).ok()) return 1;
    }
    return 0;
  });
  const absl::Time begin = absl::Now();
  ring.ExpectSuccess();
  const double ours = 2.0 * kRounds * kBytes / absl::ToDoubleSeconds(absl::Now() - begin);
  const double raw = RawTcpBytesPerSecond(kRounds * kBytes);
  std::printf("both directions: ring %.2f GB/s, raw TCP %.2f GB/s, ratio %.2f\n", ours / 1e9,
              raw / 1e9, ours / raw);
  EXPECT_GT(ours, 0.05 * raw);
}

}  // namespace
}  // namespace ringattn::worker
