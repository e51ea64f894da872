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
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
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

// Ranks in separate processes, which can be killed and stopped. The parent passes the blobs between
// them through pipes, as the coordinator does.
class ForkedRing {
 public:
  // Runs `body(communicator)` in each child; the result is the child's exit code.
  ForkedRing(int world_size, absl::Duration step_timeout,
             const std::function<int(Communicator&)>& body) {
    EXPECT_EQ(pipe(finished_) | pipe(leave_), 0);
    int up[kMaxRanks][2], down[kMaxRanks][2];
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(pipe(up[rank]) | pipe(down[rank]), 0);
      const pid_t child = fork();
      if (child == 0) {
        alarm(60);  // the child never outlives the test
        close(leave_[1]);
        _exit(Child(rank, world_size, step_timeout, up[rank][1], down[rank][0], body));
      }
      children_.push_back(child);
    }
    std::string blobs;
    for (int rank = 0; rank < world_size; ++rank) blobs += ReadBlob(up[rank][0]);
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(write(down[rank][1], blobs.data(), blobs.size()),
                static_cast<ssize_t>(blobs.size()));
    }
    // Every rank reports when it is connected.
    char byte = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(read(up[rank][0], &byte, 1), 1);
      for (int fd : {up[rank][0], up[rank][1], down[rank][0], down[rank][1]}) close(fd);
    }
  }
  ~ForkedRing() {
    Dismiss();
    for (int fd : {finished_[0], finished_[1], leave_[0]}) close(fd);
    for (pid_t child : children_) {
      if (child <= 0) continue;
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
    }
  }

  // Waits for all bodies to end and expects every rank's exit code to be 0. All ranks stay until
  // then, because a rank that leaves early would break its peers' last transfers; a coordinator
  // does not let that happen.
  void ExpectSuccess() {
    char byte = 0;
    for (size_t i = 0; i < children_.size(); ++i) EXPECT_EQ(read(finished_[0], &byte, 1), 1);
    Dismiss();
    for (size_t rank = 0; rank < children_.size(); ++rank) EXPECT_EQ(Join(rank), 0) << rank;
  }

  void Signal(int rank, int signal) { kill(children_[rank], signal); }
  // Returns the rank's exit code, or -1 if a signal ended it.
  int Join(int rank) {
    int status = 0;
    waitpid(std::exchange(children_[rank], -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  static constexpr int kMaxRanks = 8;

  static std::string ReadBlob(int fd) {
    uint32_t size = 0;
    EXPECT_EQ(read(fd, &size, 4), 4);
    std::string blob(4 + size, '\0');
    std::memcpy(blob.data(), &size, 4);
    EXPECT_EQ(read(fd, &blob[4], size), static_cast<ssize_t>(size));
    return blob;
  }

  void Dismiss() {
    if (leave_[1] >= 0) close(std::exchange(leave_[1], -1));
  }

  int Child(int rank, int world_size, absl::Duration step_timeout, int up, int down,
            const std::function<int(Communicator&)>& body) {
    TcpRingTransport transport({.step_timeout = step_timeout});
    const auto blob = transport.Prepare(1, rank, world_size);
    if (!blob.ok()) return 100;
    const uint32_t size = blob->size();
    std::string framed(reinterpret_cast<const char*>(&size), 4);
    framed += *blob;
    if (write(up, framed.data(), framed.size()) < 0) return 101;
    std::vector<std::string> blobs;
    for (int i = 0; i < world_size; ++i) blobs.push_back(ReadBlob(down).substr(4));
    auto communicator = transport.Connect(1, blobs, Soon());
    if (!communicator.ok()) return 102;
    if (write(up, "!", 1) != 1) return 103;
    const int result = body(**communicator);
    char byte = '.';
    if (write(finished_[1], &byte, 1) != 1) return 104;
    // The parent writes nothing; the read ends when the parent closes the pipe.
    if (result == 0 && read(leave_[0], &byte, 1) != 0) return 105;
    return result;
  }

  std::vector<pid_t> children_;
  int finished_[2], leave_[2];
};

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
    ForkedRing ring(world_size, absl::Minutes(1), [](Communicator& communicator) {
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
  ForkedRing ring(4, absl::Minutes(10), PassUntilBroken);
  absl::SleepFor(absl::Milliseconds(200));
  const absl::Time begin = absl::Now();
  ring.Signal(2, SIGKILL);
  for (int rank : {0, 1, 3}) EXPECT_EQ(ring.Join(rank), 1) << rank;
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
}

TEST(TcpRingProcesses, StoppedPeerEndsOthersAtStepTimeout) {
  ForkedRing ring(3, absl::Seconds(1), PassUntilBroken);
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
  ForkedRing ring(2, absl::Minutes(1), [](Communicator& communicator) {
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
