// Rings that share memory by descriptors, with the fake driver, whose allocations are memfds: what
// is mapped, when it is unmapped, and failures between separate processes, including PID namespaces
// in which both have id 1.
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/peer/peer_ring_transport.h"
#include "worker/device/cuda/cuda_event.h"
#include "worker/device/cuda/vmm_memory.h"
#include "worker/testing/fake_cuda/fake_cuda.h"
#include "worker/testing/fake_cuda/fake_vmm.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;
using ::testing::HasSubstr;

constexpr int64_t kPage = int64_t{2} << 20;

absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

class Borrowed : public DeviceBuffer {
 public:
  Borrowed(void* data, int64_t bytes) : data_(data), bytes_(bytes) {}
  void* data() override { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  void* const data_;
  const int64_t bytes_;
};

// A rank's device as its ring sees it: regions of one page each. The end of the first region serves
// the first exchange.
class Rank {
 public:
  explicit Rank(int number, const std::string& folder = "") : number_(number) {
    AddRegion();
    PeerTransportOptions options;
    options.cuda_index = number;
    options.regions = [this] { return Regions(); };
    options.allocate = [this](int64_t bytes) {
      return std::make_unique<Borrowed>(Words(0) + kPage / sizeof(int) - 1024, bytes);
    };
    options.abort_timeout = absl::Seconds(2);
    options.socket_folder = folder;
    auto made = PeerRingTransport::Create(std::move(options));
    EXPECT_TRUE(made.ok()) << made.status();
    transport = *std::move(made);
  }

  void AddRegion() {
    auto made = VmmRegion::Create(*CudaEventPool::ForDevice(number_), *CudaDriver::Load(), kPage);
    EXPECT_TRUE(made.ok()) << made.status();
    const std::lock_guard<std::mutex> lock(mutex_);
    regions_.push_back(*std::move(made));
  }
  std::vector<DeviceRegion> Regions() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<DeviceRegion> regions;
    for (const auto& region : regions_) {
      regions.push_back({region->data(), region->bytes(), region->descriptor()});
    }
    return regions;
  }
  int* Words(int region) { return reinterpret_cast<int*>(Regions()[region].base); }

  bool Join(uint64_t generation, const std::vector<std::string>& blobs,
            std::string* why = nullptr) {
    auto made = transport->Connect(generation, blobs, Soon());
    if (why != nullptr) *why = made.status().ToString();
    if (!made.ok()) return false;
    ring = *std::move(made);
    return true;
  }
  EventRef Start(Kind kind, int* word) {
    return ring->Start({{kind, 1 - number_, word, sizeof(int)}}, {}, &control_);
  }

  std::unique_ptr<PeerRingTransport> transport;
  std::unique_ptr<Communicator> ring;

 private:
  const int number_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<VmmRegion>> regions_;
  RunControl control_;
};

class PeerVmm : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int rank : {0, 1}) ranks_[rank] = std::make_unique<Rank>(rank);
  }
  void TearDown() override {
    FakeVmm().refuse_access = false;
    for (auto& rank : ranks_) {
      if (rank != nullptr) rank->ring = nullptr;
    }
    for (auto& rank : ranks_) rank = nullptr;
    EXPECT_EQ(FakeVmm().mappings, 0);
    EXPECT_EQ(FakeVmm().handles, 0);
    EXPECT_EQ(FakeVmm().reservations, 0);
    EXPECT_EQ(Faults().mapped, 0) << "no legacy handle was opened";
  }

  std::vector<std::string> Prepare(uint64_t generation) {
    return {*ranks_[0]->transport->Prepare(generation, 0, 2),
            *ranks_[1]->transport->Prepare(generation, 1, 2)};
  }
  void Form(uint64_t generation) {
    const std::vector<std::string> blobs = Prepare(generation);
    std::thread other([&] { EXPECT_TRUE(ranks_[1]->Join(generation, blobs)); });
    EXPECT_TRUE(ranks_[0]->Join(generation, blobs));
    other.join();
  }
  void Pass(int* from, int* to, int value) {
    *from = value;
    EventRef sent = ranks_[0]->Start(Kind::kSend, from);
    EventRef received = ranks_[1]->Start(Kind::kReceive, to);
    EXPECT_TRUE(sent->Wait(Soon()).ok());
    EXPECT_TRUE(received->Wait(Soon()).ok());
    EXPECT_EQ(*to, value);
  }

  std::unique_ptr<Rank> ranks_[2];
};

TEST_F(PeerVmm, MapsAndUnmapsMemory) {
  const int own = FakeVmm().mappings;
  for (uint64_t generation = 1; generation <= 20; ++generation) {
    Form(generation);
    EXPECT_EQ(ranks_[0]->ring->transport(1), "peer");
    EXPECT_EQ(FakeVmm().mappings, own + 2);
    Pass(ranks_[0]->Words(0), ranks_[1]->Words(0) + 3, 40 + static_cast<int>(generation));
    for (auto& rank : ranks_) rank->ring = nullptr;
    EXPECT_EQ(FakeVmm().mappings, own);
  }
}

// WakeLinks reads a little of the peer's memory, but not if copies are recent or in progress.
TEST_F(PeerVmm, WakesSleepingLinks) {
  Form(1);
  Communicator& ring = *ranks_[1]->ring;
  const auto woken_after = [&](absl::Duration pause) {
    absl::SleepFor(pause);
    const int before = Faults().copies;
    ring.WakeLinks();
    const absl::Time patience = absl::Now() + absl::Seconds(1);
    while (Faults().copies == before && absl::Now() < patience) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    return Faults().copies - before;
  };
  EXPECT_EQ(woken_after(absl::Milliseconds(20)), 1);
  // Shortly after a transfer; retried, because the machine may be too slow.
  for (int attempt = 0, copies = 2; attempt < 20 && copies != 1; ++attempt) {
    absl::SleepFor(absl::Milliseconds(20));
    Pass(ranks_[0]->Words(0), ranks_[1]->Words(0) + 3, 5);
    const int passed = Faults().copies;
    ring.WakeLinks();
    Pass(ranks_[0]->Words(0), ranks_[1]->Words(0) + 3, 6);
    copies = Faults().copies - passed;
    if (attempt == 19) {
      EXPECT_EQ(copies, 1) << "more than the transfer's";
    }
  }
  EXPECT_EQ(woken_after(absl::Milliseconds(20)), 1);
  ring.Abort("the test has ended");
  const int before = Faults().copies;
  ring.WakeLinks();
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_EQ(Faults().copies, before);
}

TEST_F(PeerVmm, RequestsNewMemoryWhenItIsSent) {
  Form(1);
  for (auto& rank : ranks_) rank->AddRegion();
  const int before = FakeVmm().mappings;
  for (int round = 0; round < 3; ++round) {
    Pass(ranks_[0]->Words(1) + 7, ranks_[1]->Words(1) + round, round);
  }
  EXPECT_EQ(FakeVmm().mappings, before + 1) << "rank 0's later memory, by rank 1, once";
}

TEST_F(PeerVmm, NewMemoryOfLostRankEndsRing) {
  Form(1);
  ranks_[0]->AddRegion();
  const EventRef sent = ranks_[0]->Start(Kind::kSend, ranks_[0]->Words(1));
  ranks_[0]->transport = nullptr;  // its HandleServer; the posted send still arrives
  const absl::Status status = ranks_[1]->Start(Kind::kReceive, ranks_[1]->Words(0))->Wait(Soon());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("memory of rank 0"));
  ranks_[0]->ring->Abort("rank 1 left");
  EXPECT_FALSE(sent->Wait(Soon()).ok());
}

TEST_F(PeerVmm, RequiresTokenOfRing) {
  std::vector<std::string> blobs = Prepare(1);
  // Rank 1's blob as seen by a process that does not know its token.
  blobs[1].replace(blobs[1].size() - 8, 8, "00000000");
  std::string why;
  EXPECT_FALSE(ranks_[0]->Join(1, blobs, &why));
  EXPECT_THAT(why, HasSubstr("UNAVAILABLE: memory of rank 1: this worker has no ring"));
  // A token of the previous ring is not valid either.
  const std::vector<std::string> old = Prepare(2);
  EXPECT_FALSE(ranks_[0]->Join(3, {*ranks_[0]->transport->Prepare(3, 0, 2), old[1]}, &why));
  EXPECT_THAT(why, HasSubstr("UNAVAILABLE: memory of rank 1"));
}

TEST_F(PeerVmm, ReportsFailedMapping) {
  const std::vector<std::string> blobs = Prepare(1);
  FakeVmm().refuse_access = true;
  std::string why;
  EXPECT_FALSE(ranks_[0]->Join(1, blobs, &why));
  EXPECT_THAT(why, HasSubstr("FAILED_PRECONDITION: memory of rank 1: cuMemSetAccess"));
}

TEST_F(PeerVmm, ReportsUnusableFolderAtCreation) {
  PeerTransportOptions options;
  options.regions = [this] { return ranks_[0]->Regions(); };
  options.socket_folder = "/tmp/no/such/folder";
  const absl::Status status = PeerRingTransport::Create(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/tmp/no/such"));
}

// ------------------------------------------------------------- separate processes

constexpr uint64_t kGeneration = 5;
constexpr int kStill = -1;  // value of a word to which nothing was copied
constexpr int kBlobBytes = 4096;

void SendText(int pipe, const std::string& text) {
  char padded[kBlobBytes] = {};
  std::memcpy(padded, text.data(), std::min<size_t>(text.size(), kBlobBytes - 1));
  (void)!write(pipe, padded, sizeof(padded));
}
std::string ReceiveText(int pipe) {
  char text[kBlobBytes] = {};
  size_t got = 0;
  while (got < sizeof(text)) {
    const ssize_t part = read(pipe, text + got, sizeof(text) - got);
    if (part <= 0) return "";
    got += part;
  }
  return text;
}

// Runs a member. On "go" it sends one word to rank 1, or receives one from rank 0; on "end" it
// exits.
[[noreturn]] void Member(int number, const std::string& folder, int in, int out) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  {
    Rank rank(number, folder);
    SendText(out, *rank.transport->Prepare(kGeneration, number, 2));
    const std::vector<std::string> blobs = {ReceiveText(in), ReceiveText(in)};
    std::string why;
    const bool joined = rank.Join(kGeneration, blobs, &why);
    SendText(out, joined ? absl::StrCat("joined as process ", getpid()) : why);
    int* const word = rank.Words(0);
    for (int value = 100; joined && ReceiveText(in) == "go"; ++value) {
      *word = number == 0 ? value : kStill;
      const absl::Status status = rank.Start(number == 0 ? Kind::kSend : Kind::kReceive, word)
                                      ->Wait(absl::Now() + absl::Seconds(1));
      if (absl::IsDeadlineExceeded(status)) rank.ring->Abort("the other is gone");
      SendText(out, status.ok() ? absl::StrCat(*word) : std::string(status.ToString()));
    }
    rank.ring = nullptr;
  }
  SendText(out, absl::StrCat("mapped ", FakeVmm().mappings.load(), " handles ",
                             FakeVmm().handles.load()));
  _exit(0);
}

struct Process {
  // With namespaces, the member is a grandchild: the first process of the new namespaces.
  Process(int number, const std::string& folder, int namespaces) {
    int to[2], from[2];
    EXPECT_EQ(pipe(to), 0);
    EXPECT_EQ(pipe(from), 0);
    child = fork();
    if (child == 0) {
      if (namespaces != 0) {
        if (unshare(namespaces) != 0) _exit(1);
        int gate[2];
        if (pipe(gate) != 0) _exit(1);
        const pid_t first = fork();
        if (first == 0) {
          char open = 0;
          (void)!read(gate[0], &open, 1);  // its process id is sent before its own messages
          Member(number, folder, to[0], from[1]);
        }
        SendText(from[1], absl::StrCat(first));
        (void)!write(gate[1], "g", 1);
        waitpid(first, nullptr, 0);
        _exit(0);
      }
      Member(number, folder, to[0], from[1]);
    }
    close(to[0]);
    close(from[1]);
    in = to[1];
    out = from[0];
    member = namespaces != 0 ? std::atoi(ReceiveText(out).c_str()) : child;
  }
  ~Process() {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    close(in);
    close(out);
  }
  void Kill() {
    kill(member, SIGKILL);
    if (member == child) waitpid(child, nullptr, 0);
  }
  pid_t child = 0, member = 0;
  int in = -1, out = -1;
};

// Two members of a ring, and what they reported after joining.
struct Pair {
  Pair(const std::string& folder, int namespaces)
      : zero(0, folder, namespaces), one(1, folder, namespaces) {
    const std::string blobs[2] = {ReceiveText(zero.out), ReceiveText(one.out)};
    for (Process* member : {&zero, &one}) {
      for (const std::string& blob : blobs) SendText(member->in, blob);
    }
    reports[0] = ReceiveText(zero.out);
    reports[1] = ReceiveText(one.out);
  }
  std::string Go(Process& member) {
    SendText(member.in, "go");
    return ReceiveText(member.out);
  }
  Process zero, one;
  std::string reports[2];
};

void PassAndPart(Pair& pair) {
  for (int value = 100; value < 103; ++value) {
    SendText(pair.zero.in, "go");
    EXPECT_EQ(pair.Go(pair.one), absl::StrCat(value));
    EXPECT_EQ(ReceiveText(pair.zero.out), absl::StrCat(value));
  }
  for (Process* member : {&pair.zero, &pair.one}) {
    SendText(member->in, "end");
    EXPECT_EQ(ReceiveText(member->out), "mapped 0 handles 0");
  }
}

TEST(PeerVmmProcesses, ShareMemory) {
  Pair pair("", 0);
  for (const std::string& report : pair.reports) ASSERT_THAT(report, HasSubstr("joined"));
  PassAndPart(pair);
}

// Pods of one GPU each share only a folder, and both processes have id 1.
TEST(PeerVmmProcesses, ShareMemoryAcrossPidNamespaces) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root for PID namespaces";
  char folder[] = "/tmp/peer_vmm_test.XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  {
    Pair pair(folder, CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC);
    for (const std::string& report : pair.reports) ASSERT_EQ(report, "joined as process 1");
    PassAndPart(pair);
  }
  EXPECT_EQ(rmdir(folder), 0) << "no socket is left";
}

TEST(PeerVmmProcesses, NetworkNamespacesNeedFolder) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root for network namespaces";
  Pair pair("", CLONE_NEWPID | CLONE_NEWNET);
  for (const std::string& report : pair.reports) {
    EXPECT_THAT(report, HasSubstr("FAILED_PRECONDITION: ranks 0 and 1 are not on one machine, or "
                                  "not in one network namespace (--peer_socket_dir)"));
  }
}

// The sender dies between its post and the copy, or before both. The receiver's wait ends, it
// accepts no data from the dead rank, and all memory is released.
TEST(PeerVmmProcesses, KilledRankDoesNotHarmPeer) {
  for (const bool after_a_pass : {true, false}) {
    Pair pair("", 0);
    for (const std::string& report : pair.reports) ASSERT_THAT(report, HasSubstr("joined"));
    if (after_a_pass) {
      SendText(pair.zero.in, "go");
      EXPECT_EQ(pair.Go(pair.one), "100");
      EXPECT_EQ(ReceiveText(pair.zero.out), "100");
    }
    pair.zero.Kill();
    EXPECT_THAT(pair.Go(pair.one), HasSubstr("DEADLINE_EXCEEDED")) << "and it aborts";
    SendText(pair.one.in, "end");
    EXPECT_EQ(ReceiveText(pair.one.out), "mapped 0 handles 0");
  }
}

// A frozen member does not delay peers that leave the ring.
TEST(PeerVmmProcesses, FrozenRankDoesNotDelayCancel) {
  Process other(1, "", 0);
  const std::string blob = ReceiveText(other.out);
  kill(other.child, SIGSTOP);
  ASSERT_EQ(waitpid(other.child, nullptr, WUNTRACED), other.child);
  {
    Rank rank(0);
    const std::vector<std::string> blobs = {*rank.transport->Prepare(kGeneration, 0, 2), blob};
    std::string why;
    std::thread joins([&] { EXPECT_FALSE(rank.Join(kGeneration, blobs, &why)); });
    absl::SleepFor(
        absl::Milliseconds(100));  // it has sent its request by then, or is cancelled before
    const absl::Time begin = absl::Now();
    rank.transport->Cancel();
    joins.join();
    EXPECT_LT(absl::Now() - begin, absl::Seconds(5)) << "of twenty";
    EXPECT_THAT(why, HasSubstr("CANCELLED"));
  }
  EXPECT_EQ(FakeVmm().handles, 0);
}

TEST(PeerVmmProcesses, RankKilledBeforeRequestIsUnavailable) {
  Process zero(0, "", 0), one(1, "", 0);
  const std::string blobs[2] = {ReceiveText(zero.out), ReceiveText(one.out)};
  zero.Kill();
  for (const std::string& blob : blobs) SendText(one.in, blob);
  EXPECT_THAT(ReceiveText(one.out), HasSubstr("UNAVAILABLE: memory of rank 0"));
}

}  // namespace
}  // namespace ringattn::worker
