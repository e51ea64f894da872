// What every transport between GPUs does, one rank per GPU in threads of this process.
// Needs two GPUs, or fakes of them; `--gtest_filter` picks cases as usual.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <numeric>
#include <thread>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/cuda/test_ranks.h"
#include "worker/device/cuda/cuda_event.h"
#include "worker/device/host_event.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;
using Ring = std::vector<std::unique_ptr<Communicator>>;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int kMaxRanks = 8;
// An abort takes milliseconds; a loaded machine may take longer.
constexpr absl::Duration kAbortBound = absl::Seconds(5);

int DeviceCount() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? std::min(count, kMaxRanks) : 0;
}

absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

std::string Message(const absl::Status& status) { return std::string(status.message()); }

#define CUDA_OK(call) ASSERT_EQ((call), cudaSuccess) << #call

// Memory of one device that ranks may send.
class Memory {
 public:
  Memory(int device, int64_t bytes) : device_(device), bytes_(bytes) {
    EXPECT_EQ(cudaSetDevice(device_), cudaSuccess);
    data_ = TestAllocate(device_, bytes + 1);
    EXPECT_NE(data_, nullptr);
    EXPECT_EQ(cudaMemset(data_, 0xee, bytes + 1), cudaSuccess);
    Arrive();
  }
  Memory(int device, const std::vector<uint8_t>& bytes) : Memory(device, bytes.size()) {
    EXPECT_EQ(cudaMemcpy(data_, bytes.data(), bytes_, cudaMemcpyHostToDevice), cudaSuccess);
    Arrive();
  }
  ~Memory() {
    (void)cudaSetDevice(device_);
    TestFree(device_, data_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return static_cast<char*>(data_); }
  int64_t bytes() const { return bytes_; }

  std::vector<uint8_t> Read() const {
    std::vector<uint8_t> bytes(bytes_);
    EXPECT_EQ(cudaSetDevice(device_), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(bytes.data(), data_, bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
    return bytes;
  }

 private:
  // Both return before the device is done with them, and rings' streams do not wait for
  // the default stream.
  static void Arrive() { EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess); }

  const int device_;
  const int64_t bytes_;
  void* data_ = nullptr;
};

using MemoryRef = std::unique_ptr<Memory>;

std::vector<uint8_t> Pattern(int64_t bytes, int seed) {
  std::vector<uint8_t> data(bytes);
  for (int64_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(i * 31 + seed + (i >> 13));
  return data;
}

// One transport per rank, as in separate processes; they may form several rings.
struct Transports {
  std::vector<std::unique_ptr<RingTransport>> ranks;
  std::atomic<int> stuck{0};

  explicit Transports(int world_size, absl::Duration step_timeout = absl::Minutes(1),
                      int max_ctas = 4) {
    for (int rank = 0; rank < world_size; ++rank) {
      const auto on_stuck = [this](const std::string& what) {
        ++stuck;
        ADD_FAILURE() << what;
      };
      auto transport = MakeTestTransport({rank, step_timeout, max_ctas, on_stuck});
      EXPECT_TRUE(transport.ok()) << transport.status();
      ranks.push_back(*std::move(transport));
    }
  }

  std::vector<std::string> Prepare(uint64_t generation) {
    std::vector<std::string> blobs;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      auto blob = ranks[rank]->Prepare(generation, rank, ranks.size());
      EXPECT_TRUE(blob.ok()) << blob.status();
      blobs.push_back(blob.ok() ? *blob : "");
    }
    return blobs;
  }

  Ring Form(uint64_t generation) {
    const std::vector<std::string> blobs = Prepare(generation);
    Ring ring(ranks.size());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      threads.emplace_back([&, rank] {
        auto communicator = ranks[rank]->Connect(generation, blobs, Soon());
        EXPECT_TRUE(communicator.ok()) << communicator.status();
        if (communicator.ok()) ring[rank] = *std::move(communicator);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return ring;
  }
};

class GpuRing : public ::testing::Test {
 protected:
  void SetUp() override {
    if (DeviceCount() < 2) GTEST_SKIP() << "needs two GPUs";
  }
};

bool Formed(const Ring& ring) {
  return std::all_of(ring.begin(), ring.end(),
                     [](const auto& member) { return member != nullptr; });
}

TEST_F(GpuRing, PassesBlocksOfEverySizeAroundTheRing) {
  for (int world_size = 2; world_size <= DeviceCount(); world_size *= 2) {
    Transports transports(world_size);
    Ring ring = transports.Form(1);
    ASSERT_TRUE(Formed(ring));
    for (int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{4097}, (int64_t{64} << 20) + 3}) {
      std::vector<RunControl> controls(world_size);
      std::vector<MemoryRef> sent, received;
      for (int rank = 0; rank < world_size; ++rank) {
        sent.push_back(std::make_unique<Memory>(rank, Pattern(bytes, rank)));
        received.push_back(std::make_unique<Memory>(rank, bytes));
      }
      std::vector<EventRef> done;
      for (int rank = 0; rank < world_size; ++rank) {
        done.push_back(ring[rank]->Start(
            {{Kind::kSend, (rank + 1) % world_size, sent[rank]->data(), bytes},
             {Kind::kReceive, (rank + world_size - 1) % world_size, received[rank]->data(), bytes}},
            {}, &controls[rank]));
      }
      for (int rank = 0; rank < world_size; ++rank) {
        ASSERT_TRUE(done[rank]->Wait(Soon()).ok()) << done[rank]->Wait(Soon());
        EXPECT_LE(done[rank]->begin_time(), done[rank]->end_time());
        EXPECT_EQ(controls[rank].progress.load(), 2);
        EXPECT_TRUE(received[rank]->Read() == Pattern(bytes, (rank + world_size - 1) % world_size))
            << bytes;
      }
    }
  }
}

TEST_F(GpuRing, OneGroupReachesAllPeersBothWays) {
  constexpr int64_t kBytes = 300'000;
  const int world_size = DeviceCount();
  Transports transports(world_size);
  Ring ring = transports.Form(7);
  ASSERT_TRUE(Formed(ring));
  std::vector<RunControl> controls(world_size);
  std::vector<MemoryRef> sent, received;
  std::vector<EventRef> done;
  for (int rank = 0; rank < world_size; ++rank) {
    sent.push_back(std::make_unique<Memory>(rank, Pattern(kBytes, rank)));
    received.push_back(std::make_unique<Memory>(rank, kBytes * world_size));
  }
  for (int rank = 0; rank < world_size; ++rank) {
    std::vector<PeerTransfer> group;
    for (int peer = 0; peer < world_size; ++peer) {
      // Itself too.
      PeerTransfer send{Kind::kSend, peer, sent[rank]->data(), kBytes};
      PeerTransfer receive{Kind::kReceive, peer, received[rank]->data() + peer * kBytes, kBytes};
      group.push_back(rank % 2 == 0 ? send : receive);
      group.push_back(rank % 2 == 0 ? receive : send);
    }
    done.push_back(ring[rank]->Start(group, {}, &controls[rank]));
  }
  for (int rank = 0; rank < world_size; ++rank) {
    ASSERT_TRUE(done[rank]->Wait(Soon()).ok()) << done[rank]->Wait(Soon());
    EXPECT_EQ(controls[rank].progress.load(), 2 * world_size);
    const std::vector<uint8_t> all = received[rank]->Read();
    for (int peer = 0; peer < world_size; ++peer) {
      EXPECT_TRUE(std::equal(all.begin() + peer * kBytes, all.begin() + (peer + 1) * kBytes,
                             Pattern(kBytes, peer).begin()));
    }
  }
}

TEST_F(GpuRing, TheNthSendMeetsTheNthReceive) {
  Transports transports(2);
  Ring ring = transports.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl controls[2];
  constexpr int kCount = 60;
  // Same size everywhere, so that only order tells them apart; the sender packs them
  // three to a group, the receiver two.
  const std::vector<uint8_t> numbers = Pattern(kCount * 8, 3);
  Memory sent(0, numbers), received(1, kCount * 8);
  std::vector<EventRef> done;
  for (int i = 0; i < kCount; i += 3) {
    std::vector<PeerTransfer> group;
    for (int j = i; j < i + 3; ++j) group.push_back({Kind::kSend, 1, sent.data() + j * 8, 8});
    done.push_back(ring[0]->Start(group, {}, &controls[0]));
  }
  for (int i = 0; i < kCount; i += 2) {
    std::vector<PeerTransfer> group;
    for (int j = i; j < i + 2; ++j) {
      group.push_back({Kind::kReceive, 0, received.data() + j * 8, 8});
    }
    done.push_back(ring[1]->Start(group, {}, &controls[1]));
  }
  for (const EventRef& event : done) ASSERT_TRUE(event->Wait(Soon()).ok());
  EXPECT_EQ(received.Read(), numbers);
}

TEST_F(GpuRing, MembersMayExchangeWhileOthersStandBy) {
  if (DeviceCount() < 3) GTEST_SKIP() << "needs three GPUs";
  const int world_size = DeviceCount();
  Transports transports(world_size);
  Ring ring = transports.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl controls[2];
  const int a = world_size - 1, b = 1;
  Memory sent(a, Pattern(5000, 1)), received(b, 5000);
  EventRef send = ring[a]->Start({{Kind::kSend, b, sent.data(), 5000}}, {}, &controls[0]);
  EventRef receive = ring[b]->Start({{Kind::kReceive, a, received.data(), 5000}}, {}, &controls[1]);
  ASSERT_TRUE(send->Wait(Soon()).ok());
  ASSERT_TRUE(receive->Wait(Soon()).ok());
  EXPECT_EQ(received.Read(), Pattern(5000, 1));
}

TEST_F(GpuRing, AGroupWaitsForWhatIsComputedBeforeIt) {
  Transports transports(2);
  Ring ring = transports.Form(1);
  ASSERT_TRUE(Formed(ring));
  constexpr int64_t kBytes = 1 << 20;
  RunControl controls[2];
  Memory sent(0, kBytes), received(1, kBytes);
  auto events = CudaEventPool::ForDevice(0);
  ASSERT_TRUE(events.ok());
  CUDA_OK(cudaSetDevice(0));
  cudaStream_t compute = nullptr;
  CUDA_OK(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking));
  std::atomic<bool> go{false};
  CUDA_OK(cudaLaunchHostFunc(
      compute,
      [](void* flag) {
        while (!static_cast<std::atomic<bool>*>(flag)->load()) std::this_thread::yield();
      },
      &go));
  auto computed = std::make_shared<CudaEvent>(*events, nullptr, 0);
  ASSERT_TRUE(computed->RecordBegin(compute).ok());
  CUDA_OK(cudaMemsetAsync(sent.data(), 7, kBytes, compute));
  ASSERT_TRUE(computed->RecordEnd(compute).ok());
  EventRef send = ring[0]->Start({{Kind::kSend, 1, sent.data(), kBytes}}, {computed}, &controls[0]);
  EventRef receive =
      ring[1]->Start({{Kind::kReceive, 0, received.data(), kBytes}}, {}, &controls[1]);
  EXPECT_FALSE(receive->Wait(absl::Now() + absl::Milliseconds(100)).ok());
  EXPECT_FALSE(send->Done());
  go = true;
  ASSERT_TRUE(receive->Wait(Soon()).ok());
  ASSERT_TRUE(send->Wait(Soon()).ok());
  EXPECT_EQ(received.Read(), std::vector<uint8_t>(kBytes, 7));
  CUDA_OK(cudaSetDevice(0));
  CUDA_OK(cudaStreamDestroy(compute));
}

TEST_F(GpuRing, AGroupRunsThoughItsPredecessorFailed) {
  Transports transports(2);
  Ring ring = transports.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl control;
  auto failed = std::make_shared<HostEvent>();
  failed->Finish(absl::InternalError("kernel"));
  Memory a(0, Pattern(4, 9)), b(1, 4);
  EventRef send = ring[0]->Start({{Kind::kSend, 1, a.data(), 4}}, {failed}, &control);
  EventRef receive = ring[1]->Start({{Kind::kReceive, 0, b.data(), 4}}, {}, &control);
  EXPECT_TRUE(receive->Wait(Soon()).ok());
  EXPECT_TRUE(send->Wait(Soon()).ok());
  EXPECT_EQ(b.Read(), Pattern(4, 9));
}

TEST_F(GpuRing, AbortMidTransferEndsItAndTheRingFormsAnew) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  Transports transports(2);
  Memory a(0, kBytes), b(1, kBytes);
  for (uint64_t generation = 1; generation <= 4; ++generation) {
    Ring ring = transports.Form(generation);
    ASSERT_TRUE(Formed(ring));
    RunControl controls[2];
    EventRef first = ring[0]->Start({{Kind::kSend, 1, a.data(), kBytes}}, {}, &controls[0]);
    EventRef second = ring[0]->Start({{Kind::kSend, 1, a.data(), kBytes}}, {}, &controls[0]);
    EventRef other = ring[1]->Start({{Kind::kReceive, 0, b.data(), kBytes}}, {}, &controls[1]);
    // The second send has no receiver, so there is always something to abort.
    const absl::Time begin = absl::Now();
    ring[0]->Abort("rank 1 was lost");
    ring[1]->Abort("rank 0 was lost");
    const absl::Status status = second->Wait(begin + kAbortBound);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(Message(status), HasSubstr("rank 1 was lost"));
    EXPECT_NE(first->Wait(begin + kAbortBound).code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_NE(other->Wait(begin + kAbortBound).code(), absl::StatusCode::kDeadlineExceeded);
    EventRef later = ring[0]->Start({{Kind::kSend, 1, a.data(), 4}}, {}, &controls[0]);
    EXPECT_TRUE(later->Done());
    EXPECT_EQ(later->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
    std::printf("abort %d: %.1f ms\n", static_cast<int>(generation),
                absl::ToDoubleMilliseconds(absl::Now() - begin));
  }
  EXPECT_EQ(transports.stuck.load(), 0);
}

TEST_F(GpuRing, AbortEndsAReceiveThatNobodyAnswers) {
  Transports transports(DeviceCount());
  Ring ring = transports.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl control;
  const int last = DeviceCount() - 1;
  Memory a(last, 4);
  EventRef receive = ring[last]->Start({{Kind::kReceive, 0, a.data(), 4}}, {}, &control);
  EXPECT_FALSE(receive->Wait(absl::Now() + absl::Milliseconds(50)).ok());
  const absl::Time begin = absl::Now();
  ring[last]->Abort("teardown");
  EXPECT_EQ(receive->Wait(begin + kAbortBound).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(control.progress.load(), 0);
}

TEST_F(GpuRing, AStepThatTakesTooLongNamesThePeer) {
  Transports transports(2, absl::Milliseconds(300));
  Ring ring = transports.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl control;
  Memory a(1, 4);
  EventRef receive = ring[1]->Start({{Kind::kReceive, 0, a.data(), 4}}, {}, &control);
  const absl::Status status = receive->Wait(absl::Now() + kAbortBound);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(Message(status), HasSubstr("receiving from rank 0 took longer than 300ms"));
  EXPECT_EQ(ring[1]->Start({}, {}, &control)->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
}

TEST_F(GpuRing, AMissingPeerIsUnavailableByTheDeadline) {
  Transports transports(2);
  const std::vector<std::string> blobs = transports.Prepare(1);
  const absl::Time begin = absl::Now();
  auto communicator = transports.ranks[1]->Connect(1, blobs, begin + absl::Seconds(2));
  EXPECT_EQ(communicator.status().code(), absl::StatusCode::kUnavailable) << communicator.status();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(2) + kAbortBound);
  EXPECT_TRUE(Formed(transports.Form(2)));
}

TEST_F(GpuRing, CancelEndsAConnect) {
  Transports transports(2);
  for (int rank : {0, 1}) {
    const std::vector<std::string> blobs = transports.Prepare(1 + rank);
    std::atomic<bool> connecting{false};
    std::thread canceller([&] {
      while (!connecting.load()) std::this_thread::yield();
      transports.ranks[rank]->Cancel();
    });
    const absl::Time begin = absl::Now();
    connecting = true;
    auto communicator = transports.ranks[rank]->Connect(1 + rank, blobs, Soon());
    EXPECT_EQ(communicator.status().code(), absl::StatusCode::kCancelled) << communicator.status();
    EXPECT_LT(absl::Now() - begin, kAbortBound);
    canceller.join();
  }
  EXPECT_TRUE(Formed(transports.Form(9)));
}

TEST_F(GpuRing, BlobsAreChecked) {
  Transports transports(2);
  const std::vector<std::string> blobs = transports.Prepare(3);
  const auto code = [&](uint64_t generation, const std::vector<std::string>& given) {
    return transports.ranks[1]->Connect(generation, given, Soon()).status().code();
  };
  EXPECT_EQ(code(4, blobs), absl::StatusCode::kCancelled);
  EXPECT_EQ(code(3, {blobs[0]}), absl::StatusCode::kInvalidArgument);
  // Two ranks that say they are one.
  ASSERT_TRUE(transports.ranks[1]->Prepare(3, 1, 2).ok());
  EXPECT_THAT(code(3, {blobs[0], blobs[0]}),
              AnyOf(absl::StatusCode::kInvalidArgument, absl::StatusCode::kFailedPrecondition));
  ASSERT_TRUE(transports.ranks[1]->Prepare(3, 1, 2).ok());
  EXPECT_EQ(code(3, {blobs[0], "nonsense"}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(transports.ranks[0]->Prepare(5, 2, 2).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(GpuRingOfOne, CopiesWhatItSendsToItself) {
  if (DeviceCount() < 1) GTEST_SKIP() << "needs a GPU";
  Transports transports(1);
  Ring ring = transports.Form(1);
  ASSERT_TRUE(Formed(ring));
  RunControl control;
  EXPECT_TRUE(ring[0]->Start({}, {}, &control)->Wait(Soon()).ok());
  Memory a(0, Pattern(1000, 4)), b(0, 1000);
  EventRef done = ring[0]->Start(
      {{Kind::kReceive, 0, b.data(), 1000}, {Kind::kSend, 0, a.data(), 1000}}, {}, &control);
  ASSERT_TRUE(done->Wait(Soon()).ok()) << done->Wait(Soon());
  EXPECT_EQ(b.Read(), Pattern(1000, 4));
  // Half an exchange cannot ever happen.
  EventRef half = ring[0]->Start({{Kind::kSend, 0, a.data(), 1000}}, {}, &control);
  EXPECT_EQ(half->Wait(Soon()).code(), absl::StatusCode::kUnavailable);
}

// How long Start holds the executor up, and how long a small step takes.
TEST_F(GpuRing, ManyGroupsInARow) {
  constexpr int kGroups = 500;
  const int world_size = DeviceCount();
  Transports transports(world_size);
  Ring ring = transports.Form(1);
  ASSERT_TRUE(Formed(ring));
  std::vector<RunControl> controls(world_size);
  std::vector<double> enqueue_us(world_size), step_us(world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      Memory blocks(rank, 4096 * (kGroups + 1));
      const absl::Time begin = absl::Now();
      std::vector<EventRef> done;
      for (int i = 0; i < kGroups; ++i) {
        // Each block goes on in the next group, as in a ring pass.
        std::vector<EventRef> after;
        if (i > 0) after.push_back(done.back());
        done.push_back(ring[rank]->Start(
            {{Kind::kSend, (rank + 1) % world_size, blocks.data() + i * 4096, 4096},
             {Kind::kReceive, (rank + world_size - 1) % world_size, blocks.data() + (i + 1) * 4096,
              4096}},
            after, &controls[rank]));
        if (i + 1 == kGroups) {
          enqueue_us[rank] = absl::ToDoubleMicroseconds(absl::Now() - begin) / kGroups;
        }
      }
      // All of them: an event may touch its control until somebody has seen it done.
      for (const EventRef& event : done) EXPECT_TRUE(event->Wait(Soon()).ok());
      step_us[rank] = absl::ToDoubleMicroseconds(absl::Now() - begin) / kGroups;
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("small groups: Start takes %.0f us, a step %.0f us (slowest rank of %d)\n",
              *std::max_element(enqueue_us.begin(), enqueue_us.end()),
              *std::max_element(step_us.begin(), step_us.end()), world_size);
}

// What a number of CTAs carries, where a transport takes any.
TEST_F(GpuRing, Rate) {
  constexpr int64_t kBytes = int64_t{256} << 20;
  const int world_size = DeviceCount();
  std::vector<MemoryRef> sent, received;
  for (int rank = 0; rank < world_size; ++rank) {
    sent.push_back(std::make_unique<Memory>(rank, kBytes));
    received.push_back(std::make_unique<Memory>(rank, kBytes));
  }
  for (int max_ctas : TestCtas()) {
    Transports transports(world_size, absl::Minutes(1), max_ctas);
    Ring ring = transports.Form(1);
    ASSERT_TRUE(Formed(ring));
    std::vector<RunControl> controls(world_size);
    absl::Duration best = absl::InfiniteDuration();
    for (int round = 0; round < 3; ++round) {
      std::vector<EventRef> done;
      for (int rank = 0; rank < world_size; ++rank) {
        done.push_back(
            ring[rank]->Start({{Kind::kSend, (rank + 1) % world_size, sent[rank]->data(), kBytes},
                               {Kind::kReceive, (rank + world_size - 1) % world_size,
                                received[rank]->data(), kBytes}},
                              {}, &controls[rank]));
      }
      absl::Duration slowest = absl::ZeroDuration();
      for (const EventRef& event : done) {
        ASSERT_TRUE(event->Wait(Soon()).ok());
        slowest = std::max(slowest, event->end_time() - event->begin_time());
      }
      best = std::min(best, slowest);
    }
    std::printf("%d CTAs, ring of %d: 256 MiB each way in %.2f ms, %.0f GB/s per GPU and way\n",
                max_ctas, world_size, absl::ToDoubleMilliseconds(best),
                kBytes / absl::ToDoubleSeconds(best) / 1e9);
  }
}

}  // namespace
}  // namespace ringattn::worker
