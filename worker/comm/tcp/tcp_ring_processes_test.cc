// TCP rings of separate processes, some of which are killed or stopped. Measures times.
#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/forked_ring.h"
#include "worker/comm/tcp/tcp_ring_transport.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;

absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

std::vector<uint8_t> Pattern(int64_t bytes, int seed) {
  std::vector<uint8_t> data(bytes);
  for (int64_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(i * 31 + seed + (i >> 13));
  return data;
}

std::function<std::unique_ptr<RingTransport>()> Transports(absl::Duration step_timeout) {
  return [step_timeout] {
    return std::make_unique<TcpRingTransport>(TcpTransportOptions{.step_timeout = step_timeout});
  };
}

// Passes blocks around until a transfer fails. Returns 1 if the error is UNAVAILABLE, else 2.
int PassUntilBroken(Communicator& ring) {
  constexpr int64_t kBytes = 8 << 20;
  std::vector<uint8_t> mine(kBytes), next(kBytes);
  RunControl control;
  const int to = (ring.rank() + 1) % ring.world_size();
  const int from = (ring.rank() + ring.world_size() - 1) % ring.world_size();
  while (true) {
    EventRef done = ring.Start(
        {{Kind::kSend, to, mine.data(), kBytes}, {Kind::kReceive, from, next.data(), kBytes}}, {},
        &control);
    const absl::Status status = done->Wait(Soon());
    if (!status.ok()) return absl::IsUnavailable(status) ? 1 : 2;
  }
}

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

TEST(TcpRingProcesses, SeparateProcessesPassBlocks) {
  for (int world_size : {2, 5, 8}) {
    ForkedRing ring(world_size, Transports(absl::Minutes(1)), [](Communicator& communicator) {
      constexpr int64_t kBytes = 1'000'003;
      const int world_size = communicator.world_size(), rank = communicator.rank();
      std::vector<uint8_t> now = Pattern(kBytes, rank), next(kBytes);
      RunControl control;
      for (int step = 1; step < world_size; ++step) {
        EventRef done = communicator.Start(
            {{Kind::kSend, (rank + 1) % world_size, now.data(), kBytes},
             {Kind::kReceive, (rank + world_size - 1) % world_size, next.data(), kBytes}},
            {}, &control);
        if (!done->Wait(Soon()).ok()) return 1;
        now.swap(next);
        if (now != Pattern(kBytes, (rank + world_size - step) % world_size)) return 2;
      }
      return 0;
    });
    ring.ExpectSuccess();
  }
}

TEST(TcpRingProcesses, KilledPeerEndsNeighboursAtOnce) {
  ForkedRing ring(4, Transports(absl::Minutes(10)), PassUntilBroken);
  absl::SleepFor(absl::Milliseconds(200));
  const absl::Time begin = absl::Now();
  ring.Signal(2, SIGKILL);
  for (int rank : {0, 1, 3}) EXPECT_EQ(ring.Join(rank), 1) << rank;
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
}

TEST(TcpRingProcesses, StoppedPeerEndsOthersAtStepTimeout) {
  ForkedRing ring(3, Transports(absl::Seconds(1)), PassUntilBroken);
  absl::SleepFor(absl::Milliseconds(200));
  const absl::Time begin = absl::Now();
  ring.Signal(0, SIGSTOP);
  for (int rank : {1, 2}) EXPECT_EQ(ring.Join(rank), 1) << rank;
  EXPECT_LT(absl::Now() - begin, absl::Seconds(8));
}

// Full duplex between two processes, compared with raw TCP in the same run. Prints the rates and
// checks only against a gross loss, because the machine may be busy.
TEST(TcpRingProcesses, Throughput) {
  constexpr int64_t kBytes = int64_t{64} << 20;
  constexpr int kRounds = 8;
  ForkedRing ring(2, Transports(absl::Minutes(1)), [](Communicator& communicator) {
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
