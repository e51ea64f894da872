#include "common/step_ring/step_ring.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "common/base/testing/wall_clock.h"
#include "common/step_ring/yield_loss.h"
#include "gtest/gtest.h"

namespace ringattn {
namespace {

constexpr int64_t kMaxFrame = 1 << 20;
constexpr uint32_t kNearWrap = std::numeric_limits<uint32_t>::max() - 2;

absl::StatusOr<StepRingLayout> Check(uint64_t offset, uint64_t slots, uint64_t request,
                                     uint64_t response, int64_t region = 1 << 20) {
  return CheckStepRing(offset, slots, request, response, region, kMaxFrame);
}

// A ring in memory that a child process shares.
class Ring {
 public:
  explicit Ring(int64_t slots = 4, uint32_t first = 0) : first_(first) {
    layout_.slots = slots;
    layout_.request_bytes = 256;
    layout_.response_bytes = 128;
    memory_ = static_cast<uint8_t*>(
        mmap(nullptr, layout_.bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    writer().Reset();
  }
  ~Ring() { munmap(memory_, layout_.bytes()); }

  StepRingQueue queue() const { return StepRingQueue::Requests(memory_, layout_); }
  StepRingWriter writer() const { return StepRingWriter(queue(), first_); }
  StepRingReader reader() const { return StepRingReader(queue(), first_); }
  const StepRingLayout& layout() const { return layout_; }
  uint8_t* memory() const { return memory_; }

 private:
  const uint32_t first_;
  StepRingLayout layout_;
  uint8_t* memory_ = nullptr;
};

void Send(StepRingWriter& writer, const std::string& text) {
  writer.Put(static_cast<int64_t>(text.size()),
             [&](uint8_t* to) { std::memcpy(to, text.data(), text.size()); });
  writer.Publish();
}

std::string Receive(StepRingReader& reader) {
  std::string frame;
  const auto taken = reader.Take(&frame);
  if (!taken.ok()) return std::string(taken.status().message());
  return *taken ? frame : "none";
}

TEST(StepRingLayoutTest, AcceptsWhatFits) {
  const auto layout = Check(4096, 2, 128, 192, 4096 + 4096 + 4096);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->requests_offset(), 4096);
  EXPECT_EQ(layout->responses_offset(), 4096 + 256);
  EXPECT_EQ(layout->bytes(), 8192);
  EXPECT_EQ(StepRingLayout::SlotBytes(0), 64);
  EXPECT_EQ(StepRingLayout::SlotBytes(1), 128);
  EXPECT_EQ(StepRingLayout::SlotBytes(64), 128);
}

TEST(StepRingLayoutTest, NamesWhatIsWrong) {
  const auto message = [](const absl::StatusOr<StepRingLayout>& layout) {
    return layout.ok() ? "" : std::string(layout.status().message());
  };
  constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();
  for (const uint64_t slots : {uint64_t{0}, uint64_t{1}, uint64_t{3}, uint64_t{128}, kHuge}) {
    EXPECT_NE(message(Check(0, slots, 128, 128)).find("ring.slots"), std::string::npos) << slots;
  }
  for (const uint64_t bytes :
       {uint64_t{0}, uint64_t{64}, uint64_t{130}, uint64_t{2 << 20}, kHuge - 63}) {
    EXPECT_NE(message(Check(0, 2, bytes, 128)).find("ring.request_bytes"), std::string::npos);
    EXPECT_NE(message(Check(0, 2, 128, bytes)).find("ring.response_bytes"), std::string::npos);
  }
  for (const uint64_t offset : {uint64_t{64}, uint64_t{1 << 20}, kHuge - 4095, kHuge}) {
    EXPECT_NE(message(Check(offset, 2, 128, 128)).find("ring.offset"), std::string::npos);
  }
  EXPECT_FALSE(Check(0, 2, 128, 128, 4096).ok());
}

TEST(StepRingTest, CarriesFramesInOrder) {
  Ring ring;
  StepRingWriter writer = ring.writer();
  StepRingReader reader = ring.reader();
  EXPECT_EQ(Receive(reader), "none");
  Send(writer, "one");
  Send(writer, "");
  EXPECT_EQ(Receive(reader), "one");
  EXPECT_EQ(Receive(reader), "");
  EXPECT_EQ(Receive(reader), "none");
}

TEST(StepRingTest, FramesAreInvisibleBeforePublish) {
  Ring ring;
  StepRingWriter writer = ring.writer();
  StepRingReader reader = ring.reader();
  writer.Put(1, [](uint8_t* to) { *to = 'a'; });
  EXPECT_EQ(Receive(reader), "none");
  writer.Publish();
  EXPECT_EQ(Receive(reader), "a");
}

TEST(StepRingTest, SlotsAndCountersWrapAround) {
  Ring ring(/*slots=*/2, kNearWrap);
  StepRingWriter writer = ring.writer();
  StepRingReader reader = ring.reader();
  for (int i = 0; i < 10; ++i) {
    Send(writer, std::to_string(2 * i));
    Send(writer, std::to_string(2 * i + 1));  // full
    EXPECT_EQ(Receive(reader), std::to_string(2 * i));
    EXPECT_EQ(Receive(reader), std::to_string(2 * i + 1));
    EXPECT_EQ(Receive(reader), "none");
  }
  EXPECT_EQ(writer.count(), kNearWrap + 20);
  EXPECT_LT(writer.count(), 20u);
}

TEST(StepRingTest, HoldsAFrameOfTheFullSlot) {
  Ring ring;
  StepRingWriter writer = ring.writer();
  StepRingReader reader = ring.reader();
  const std::string frame(static_cast<size_t>(writer.capacity()), 'x');
  for (int i = 0; i < 4; ++i) Send(writer, frame);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(Receive(reader), frame);
}

TEST(StepRingTest, RefusesCountersOutOfRange) {
  for (const uint32_t first : {0u, kNearWrap}) {
    for (const int64_t ahead : {int64_t{5}, int64_t{1000}, int64_t{-1}, int64_t{1} << 31}) {
      Ring ring(/*slots=*/4, first);
      StepRingReader reader = ring.reader();
      SharedWord(ring.queue().word).Store(first + static_cast<uint32_t>(ahead));
      EXPECT_NE(Receive(reader).find("messages ahead; it has 4 slots"), std::string::npos);
      EXPECT_EQ(reader.count(), first);
    }
  }
}

TEST(StepRingTest, RefusesLengthsOutOfRange) {
  for (const uint32_t length : {193u, 256u, 1u << 31, std::numeric_limits<uint32_t>::max()}) {
    Ring ring;
    StepRingWriter writer = ring.writer();
    StepRingReader reader = ring.reader();
    Send(writer, "fine");
    std::memcpy(ring.queue().slots, &length, sizeof(length));
    EXPECT_NE(Receive(reader).find("a slot holds 192"), std::string::npos) << length;
    EXPECT_EQ(reader.count(), 0u);
  }
}

TEST(StepRingTest, AFrameIsACopy) {
  Ring ring;
  StepRingWriter writer = ring.writer();
  StepRingReader reader = ring.reader();
  Send(writer, "before");
  std::string frame;
  ASSERT_TRUE(*reader.Take(&frame));
  std::memset(ring.memory() + 4096, 0xff, 4 * 256);
  EXPECT_EQ(frame, "before");
}

TEST(StepRingTest, DirectionsDoNotOverlap) {
  Ring ring;
  StepRingWriter requests = ring.writer();
  StepRingWriter responses(StepRingQueue::Responses(ring.memory(), ring.layout()));
  StepRingReader request_reader = ring.reader();
  StepRingReader response_reader(StepRingQueue::Responses(ring.memory(), ring.layout()));
  for (int i = 0; i < 4; ++i) {
    Send(requests, std::string(static_cast<size_t>(requests.capacity()), 'q'));
    Send(responses, std::string(static_cast<size_t>(responses.capacity()), 'a'));
  }
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(Receive(request_reader), std::string(192, 'q'));
    EXPECT_EQ(Receive(response_reader), std::string(64, 'a'));
  }
}

// ------------------------------------------------------------------------------------- waiting

TEST(SharedWordTest, TimesOut) {
  Ring ring;
  StepRingReader reader = ring.reader();
  const absl::Time begin = MonotonicNow();
  EXPECT_EQ(reader.Wait(absl::Milliseconds(2), absl::Milliseconds(20)), SharedWord::Wake::kTimeout);
  EXPECT_GE(MonotonicNow() - begin, absl::Milliseconds(20));
}

TEST(SharedWordTest, TimesOutWhenTheWallClockJumps) {
  for (const absl::Duration back : {absl::Hours(2), -absl::Hours(2)}) {
    Ring ring;
    StepRingReader reader = ring.reader();
    std::thread jump([&] {
      absl::SleepFor(absl::Milliseconds(10));
      SetWallClockBack(back);
    });
    const absl::Time begin = MonotonicNow();
    EXPECT_EQ(reader.Wait(absl::Milliseconds(20), absl::Milliseconds(20)),
              SharedWord::Wake::kTimeout);
    jump.join();
    SetWallClockBack(absl::ZeroDuration());
    EXPECT_GE(MonotonicNow() - begin, absl::Milliseconds(20));
    EXPECT_LT(MonotonicNow() - begin, absl::Seconds(30));
  }
}

TEST(SharedWordTest, AChangeThatIsThereNeedsNoWait) {
  Ring ring;
  StepRingWriter writer = ring.writer();
  StepRingReader reader = ring.reader();
  Send(writer, "one");
  EXPECT_EQ(reader.Wait(absl::ZeroDuration(), absl::Seconds(60)), SharedWord::Wake::kActive);
}

TEST(SharedWordTest, WakesASleeper) {
  Ring ring;
  StepRingWriter writer = ring.writer();
  StepRingReader reader = ring.reader();
  std::thread sender([&] {
    // The flag of the word shows that the reader sleeps or is about to.
    std::atomic<uint32_t>* const sleeping =
        reinterpret_cast<std::atomic<uint32_t>*>(ring.queue().word + 4);
    while (sleeping->load() == 0) absl::SleepFor(absl::Milliseconds(1));
    absl::SleepFor(absl::Milliseconds(5));
    Send(writer, "one");
  });
  const absl::Time begin = MonotonicNow();
  EXPECT_EQ(reader.Wait(absl::ZeroDuration(), absl::Seconds(60)), SharedWord::Wake::kAsleep);
  EXPECT_LT(MonotonicNow() - begin, absl::Seconds(30));
  EXPECT_EQ(Receive(reader), "one");
  sender.join();
}

TEST(SharedWordTest, AnotherEventEndsAnActiveWait) {
  Ring ring;
  StepRingReader reader = ring.reader();
  int calls = 0;  // the second one is in the active wait, before its first yield
  EXPECT_EQ(reader.WaitOr([&] { return ++calls == 2; }, absl::Seconds(60), absl::ZeroDuration()),
            SharedWord::Wake::kActive);
  EXPECT_FALSE(reader.HasNext());
  StepRingWriter writer = ring.writer();
  Send(writer, "x");
  EXPECT_EQ(reader.WaitOr([] { return false; }, absl::Seconds(60), absl::ZeroDuration()),
            SharedWord::Wake::kActive);
  EXPECT_TRUE(reader.HasNext());
}

TEST(SharedWordTest, SuperfluousWakesDoNotEndAWait) {
  Ring ring;
  StepRingReader reader = ring.reader();
  std::atomic<bool> over{false};
  std::thread noise([&] {
    SharedWord word(ring.queue().word);
    while (!over) word.Interrupt();
  });
  const absl::Time begin = MonotonicNow();
  EXPECT_EQ(reader.Wait(absl::ZeroDuration(), absl::Milliseconds(30)), SharedWord::Wake::kTimeout);
  EXPECT_GE(MonotonicNow() - begin, absl::Milliseconds(30));
  over = true;
  noise.join();
}

TEST(YieldLossTest, InterruptsAreNoScarcity) {
  using std::chrono::microseconds;
  YieldLoss loss;
  for (int i = 0; i < 5000; ++i) EXPECT_FALSE(loss.Add(microseconds(1)));
  for (int i = 0; i < 4; ++i) EXPECT_FALSE(loss.Add(microseconds(45)));
  EXPECT_TRUE(loss.Add(microseconds(45)));
  EXPECT_TRUE(YieldLoss().Add(std::chrono::milliseconds(3)));
}

TEST(SharedWordTest, StopsASleeper) {
  Ring ring;
  StepRingReader reader = ring.reader();
  std::atomic<bool> stop{false};
  std::thread stopper([&] {
    absl::SleepFor(absl::Milliseconds(10));
    stop = true;
    // A wait that was about to sleep has missed the first call.
    for (int i = 0; i < 200; ++i) {
      SharedWord(ring.queue().word).Interrupt();
      absl::SleepFor(absl::Milliseconds(1));
    }
  });
  const absl::Time begin = MonotonicNow();
  EXPECT_EQ(reader.Wait(absl::ZeroDuration(), absl::Seconds(60), &stop),
            SharedWord::Wake::kTimeout);
  EXPECT_LT(MonotonicNow() - begin, absl::Seconds(30));
  stopper.join();
}

// Every request is answered, with active and sleeping waits mixed. A lost wake-up would end the
// test by its time limit.
void PingPong(Ring& ring, int count, absl::Duration spin) {
  std::thread worker([&] {
    StepRingReader requests = ring.reader();
    StepRingWriter responses(StepRingQueue::Responses(ring.memory(), ring.layout()));
    std::string frame;
    for (int i = 0; i < count;) {
      const auto taken = requests.Take(&frame);
      ASSERT_TRUE(taken.ok()) << taken.status();
      if (!*taken) {
        ASSERT_NE(requests.Wait(spin, absl::Seconds(60)), SharedWord::Wake::kTimeout);
        continue;
      }
      ASSERT_EQ(frame, std::to_string(i));
      Send(responses, frame);
      ++i;
    }
  });
  StepRingWriter requests = ring.writer();
  StepRingReader responses(StepRingQueue::Responses(ring.memory(), ring.layout()));
  std::string frame;
  for (int i = 0; i < count; ++i) {
    Send(requests, std::to_string(i));
    while (!*responses.Take(&frame)) {
      ASSERT_NE(responses.Wait(i % 2 == 0 ? spin : absl::ZeroDuration(), absl::Seconds(60)),
                SharedWord::Wake::kTimeout);
    }
    ASSERT_EQ(frame, std::to_string(i));
  }
  worker.join();
}

TEST(SharedWordTest, NoWakeUpIsLostAsleep) {
  Ring ring;
  PingPong(ring, 3000, absl::ZeroDuration());
}

TEST(SharedWordTest, NoWakeUpIsLostBetweenSpinningAndSleep) {
  Ring ring;
  PingPong(ring, 3000, absl::Microseconds(2));
}

TEST(SharedWordTest, ADeadPeerEndsInATimeout) {
  Ring ring;
  const pid_t child = fork();
  if (child == 0) {
    StepRingReader reader = ring.reader();
    while (true) reader.Wait(absl::ZeroDuration(), absl::Seconds(1));
  }
  ASSERT_GT(child, 0);
  std::atomic<uint32_t>* const sleeping =
      reinterpret_cast<std::atomic<uint32_t>*>(ring.queue().word + 4);
  while (sleeping->load() == 0) absl::SleepFor(absl::Milliseconds(1));
  ASSERT_EQ(kill(child, SIGKILL), 0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  // The flag of the dead reader stays set; it costs a system call.
  StepRingWriter requests = ring.writer();
  Send(requests, "one");
  StepRingReader responses(StepRingQueue::Responses(ring.memory(), ring.layout()));
  EXPECT_EQ(responses.Wait(absl::Microseconds(10), absl::Milliseconds(20)),
            SharedWord::Wake::kTimeout);
}

}  // namespace
}  // namespace ringattn
