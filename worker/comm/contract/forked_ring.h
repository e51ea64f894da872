// ForkedRing: test ranks in separate processes, which can be killed and stopped.
#ifndef RINGATTN_WORKER_COMM_CONTRACT_FORKED_RING_H_
#define RINGATTN_WORKER_COMM_CONTRACT_FORKED_RING_H_

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "worker/comm/communicator.h"

namespace ringattn::worker {

// Ranks in separate processes, which can be killed and stopped. The parent passes the blobs between
// them through pipes, as the coordinator does.
class ForkedRing {
 public:
  // Runs `body(communicator)` in each child; the result is the child's exit code.
  // `make_transport` is called in each child.
  ForkedRing(int world_size, const std::function<std::unique_ptr<RingTransport>()>& make_transport,
             const std::function<int(Communicator&)>& body) {
    EXPECT_EQ(pipe(finished_) | pipe(leave_), 0);
    int up[kMaxRanks][2], down[kMaxRanks][2];
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(pipe(up[rank]) | pipe(down[rank]), 0);
      const pid_t child = fork();
      if (child == 0) {
        alarm(60);  // the child never outlives the test
        close(leave_[1]);
        _exit(Child(rank, world_size, make_transport, up[rank][1], down[rank][0], body));
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
    DismissAfter(children_.size());
    for (size_t rank = 0; rank < children_.size(); ++rank) EXPECT_EQ(Join(rank), 0) << rank;
  }

  // Lets all ranks end after this many bodies have.
  void DismissAfter(size_t bodies) {
    char byte = 0;
    for (size_t i = 0; i < bodies; ++i) EXPECT_EQ(read(finished_[0], &byte, 1), 1);
    Dismiss();
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

  int Child(int rank, int world_size,
            const std::function<std::unique_ptr<RingTransport>()>& make_transport, int up, int down,
            const std::function<int(Communicator&)>& body) {
    const std::unique_ptr<RingTransport> transport = make_transport();
    const auto blob = transport->Prepare(1, rank, world_size);
    if (!blob.ok()) return 100;
    const uint32_t size = blob->size();
    std::string framed(reinterpret_cast<const char*>(&size), 4);
    framed += *blob;
    if (write(up, framed.data(), framed.size()) < 0) return 101;
    std::vector<std::string> blobs;
    for (int i = 0; i < world_size; ++i) blobs.push_back(ReadBlob(down).substr(4));
    auto communicator = transport->Connect(1, blobs, absl::Now() + absl::Seconds(20));
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

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CONTRACT_FORKED_RING_H_
