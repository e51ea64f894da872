// Tests of the core's thread during planning: heartbeats are handled and small requests served
// while lists of a hundred thousand documents are planned. Workers answer immediately, so only this
// process is measured.
#include "server/edge/loop/core_loop.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/base/testing/wall_clock.h"
#include "gtest/gtest.h"

namespace ringattn::server {
namespace {

constexpr int kWorkers = 4;
constexpr StreamId kFirstTiny = 1000000;
constexpr absl::Duration kBound = absl::Milliseconds(50);

// A header of 1 MiB: each document of eight tokens takes one byte per axis.
RequestArrived Packed(StreamId stream, int64_t documents) {
  RequestArrived request;
  request.stream = stream;
  request.request_id = absl::StrCat("packed-", stream);
  request.client = "packed";
  request.fingerprint = stream;
  request.spec.shape.packed = true;
  request.spec.shape.seq_len_q = request.spec.shape.seq_len_kv = 8 * documents;
  for (int64_t i = 0; i <= documents; ++i) {
    request.spec.shape.cu_seqlens_q.push_back(8 * i);
    request.spec.shape.cu_seqlens_k.push_back(8 * i);
  }
  request.choice.layout = Layout::kStriped;
  request.choice.world_size = kWorkers;
  return request;
}

RequestArrived Tiny(StreamId stream) {
  RequestArrived request;
  request.stream = stream;
  request.request_id = absl::StrCat("tiny-", stream);
  request.client = "tiny";
  request.fingerprint = stream;
  request.spec.shape.seq_len_q = request.spec.shape.seq_len_kv = 8;
  request.spec.shape.cu_seqlens_q = request.spec.shape.cu_seqlens_k = {0, 8};
  return request;
}

RequestEnded Ended(StreamId stream) {
  Failure why;
  why.code = absl::StatusCode::kCancelled;
  return {stream, why};
}

CoordinatorConfig Config() {
  CoordinatorConfig config;
  config.forming_delay = absl::Milliseconds(20);
  config.heartbeat_timeout = absl::Seconds(2);
  return config;
}

// A loop whose workers immediately send every expected answer. Thread safe.
class Bench final : private ActionSink {
 public:
  explicit Bench(const CoordinatorConfig& config) : loop_(config, this) {
    loop_.Start();
    for (ConnectionId worker = 1; worker <= kWorkers; ++worker) {
      WorkerJoined joined;
      joined.connection = worker;
      joined.registration.set_name(absl::StrCat("worker-", worker));
      loop_.Post(joined);
    }
    Await([this] {
      mutex_.AssertReaderHeld();
      return serving_;
    });
  }

  CoreLoop& loop() { return loop_; }

  // Sends heartbeats of all workers repeatedly, and measures each until it is handled, until `done`
  // holds.
  template <typename Done>
  std::vector<absl::Duration> BeatUntil(Done done) {
    std::vector<absl::Duration> times;
    uint64_t sequence = 0;
    do {  // at least once, since `done` may hold already
      ++sequence;
      for (ConnectionId worker = 1; worker <= kWorkers; ++worker) {
        WorkerMessage said;
        said.connection = worker;
        said.message.mutable_heartbeat()->set_sequence(sequence);
        said.received = absl::Now();
        absl::Notification handled;
        loop_.Post(std::move(said), [&] { handled.Notify(); });
        handled.WaitForNotification();
        times.push_back(absl::Now() - said.received);
      }
      // A pause, so that the load does not dominate the measurement.
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithTimeout(absl::Condition(&done), absl::Milliseconds(2));
    } while (!Holds(done));
    return times;
  }

  template <typename Done>
  void Await(Done done) {
    absl::MutexLock lock(&mutex_);
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&done), absl::Seconds(120)));
  }
  template <typename Done>
  bool Holds(Done done) {
    absl::MutexLock lock(&mutex_);
    return done();
  }

  // Requires the lock:
  bool IsAccepted(StreamId stream) const { return accepted_.count(stream) > 0; }
  int64_t drops() {
    absl::MutexLock lock(&mutex_);
    return drops_;
  }
  absl::Mutex* mutex() { return &mutex_; }
  absl::Time AcceptedAt(StreamId stream) {
    absl::MutexLock lock(&mutex_);
    return accepted_.at(stream);
  }

 private:
  void CarryOut(Action action, const Coordinator&) override {
    if (const auto* send = std::get_if<SendToWorker>(&action)) return Answer(*send);
    absl::MutexLock lock(&mutex_);
    if (std::holds_alternative<DropWorker>(action)) ++drops_;
    if (const auto* serving = std::get_if<ServingChanged>(&action)) serving_ = serving->serving;
    if (const auto* accept = std::get_if<AcceptRequest>(&action)) {
      accepted_[accept->stream] = absl::Now();
    }
  }
  void OnTick(absl::Time, const Coordinator&) override {}

  void Answer(const SendToWorker& send) {
    WorkerMessage said;
    said.connection = send.connection;
    const v1::JoinResponse& message = send.message;
    if (message.has_prepare()) {
      said.message.mutable_prepared()->set_generation(message.prepare().generation());
    } else if (message.has_commit()) {
      said.message.mutable_committed()->set_generation(message.commit().generation());
    } else if (message.has_reserve()) {
      v1::Reserved* reserved = said.message.mutable_reserved();
      reserved->set_operation_id(message.reserve().operation_id());
      reserved->set_generation(message.reserve().generation());
      reserved->set_ok(true);
    } else if (message.has_release()) {
      v1::Released* released = said.message.mutable_released();
      released->set_operation_id(message.release().operation_id());
      released->set_generation(message.release().generation());
    } else {
      return;
    }
    said.received = absl::Now();
    loop_.Post(std::move(said));
  }

  absl::Mutex mutex_;
  bool serving_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t drops_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<StreamId, absl::Time> accepted_ ABSL_GUARDED_BY(mutex_);
  CoreLoop loop_;  // stops first
};

absl::Duration Percentile99(std::vector<absl::Duration> times) {
  std::sort(times.begin(), times.end());
  return times.at(times.size() * 99 / 100);
}

TEST(CoreLoopTest, HeartbeatsAreHandledWhileAPackedRequestIsPlanned) {
  Bench bench(Config());
  const absl::Time begin = absl::Now();
  ASSERT_TRUE(bench.loop().TryPost(Packed(1, 100000)));
  bench.loop().Wake();
  const std::vector<absl::Duration> times = bench.BeatUntil([&] { return bench.IsAccepted(1); });
  const absl::Duration p99 = Percentile99(times);
  std::printf("accepted after %s; p99 of %zu heartbeats %s\n",
              absl::FormatDuration(bench.AcceptedAt(1) - begin).c_str(), times.size(),
              absl::FormatDuration(p99).c_str());
  EXPECT_LT(p99, kBound);
  EXPECT_EQ(bench.drops(), 0);
}

// Headers without tensor bytes. No worker is lost, no other request waits, and after cancellation
// no work continues.
TEST(CoreLoopTest, FortyLargeHeadersDelayNoOtherRequest) {
  Bench bench(Config());
  constexpr StreamId kHeaders = 40;
  for (StreamId stream = 1; stream <= kHeaders; ++stream) {
    ASSERT_TRUE(bench.loop().TryPost(Packed(stream, int64_t{1} << 17)));
    bench.loop().Wake();
  }
  std::vector<absl::Duration> heartbeats, tiny;
  for (StreamId stream = kFirstTiny; stream < kFirstTiny + 200; ++stream) {
    const absl::Time begin = absl::Now();
    ASSERT_TRUE(bench.loop().TryPost(Tiny(stream)));
    bench.loop().Wake();
    for (absl::Duration time : bench.BeatUntil([&] { return bench.IsAccepted(stream); })) {
      heartbeats.push_back(time);
    }
    tiny.push_back(bench.AcceptedAt(stream) - begin);
    bench.loop().Post(Ended(stream));
  }
  std::printf("p99 of %zu heartbeats %s, of %zu tiny requests %s; %lld plans wait\n",
              heartbeats.size(), absl::FormatDuration(Percentile99(heartbeats)).c_str(),
              tiny.size(), absl::FormatDuration(Percentile99(tiny)).c_str(),
              static_cast<long long>(bench.loop().planning_stats().queued));
  EXPECT_LT(Percentile99(heartbeats), kBound);
  EXPECT_LT(Percentile99(tiny), kBound);

  absl::Notification all_ended;
  for (StreamId stream = 1; stream <= kHeaders; ++stream) bench.loop().Post(Ended(stream));
  bench.loop().Post(Tick{}, [&] { all_ended.Notify(); });
  all_ended.WaitForNotification();
  EXPECT_EQ(bench.loop().planning_stats().queued, 0);
  const int64_t made = bench.loop().planning_stats().made;
  ASSERT_TRUE(bench.loop().TryPost(Tiny(1)));
  bench.loop().Wake();
  bench.Await([&] { return bench.IsAccepted(1); });
  EXPECT_LE(bench.loop().planning_stats().made, made + 1);
  EXPECT_EQ(bench.drops(), 0);
}

class TickCounter : public ActionSink {
 public:
  void CarryOut(Action, const Coordinator&) override {}
  void OnTick(absl::Time, const Coordinator&) override {
    absl::MutexLock lock(&mutex_);
    ++ticks_;
  }
  // Returns false if this takes 20 s.
  bool AwaitTicks(int count) {
    absl::MutexLock lock(&mutex_);
    const int64_t enough = ticks_ + count;
    const auto reached = [&] {
      mutex_.AssertReaderHeld();
      return ticks_ >= enough;
    };
    return mutex_.AwaitWithTimeout(absl::Condition(&reached), absl::Seconds(20));
  }

 private:
  absl::Mutex mutex_;
  int64_t ticks_ ABSL_GUARDED_BY(mutex_) = 0;
};

TEST(CoreLoopTest, TheWallClockDoesNotStopTheTicks) {
  TickCounter sink;
  CoreLoop loop(Config(), &sink);
  loop.Start();
  EXPECT_TRUE(sink.AwaitTicks(2));
  SetWallClockBack(absl::Hours(2));
  EXPECT_TRUE(sink.AwaitTicks(2));
  SetWallClockBack(absl::ZeroDuration());
  EXPECT_TRUE(sink.AwaitTicks(2));
  loop.Stop();
}

// The thread was blocked for longer than the heartbeat timeout, but the workers were not silent:
// their messages are handled before any timeout is evaluated.
TEST(CoreLoopTest, LagOfTheThreadIsNotSilenceOfWorkers) {
  CoordinatorConfig config = Config();
  config.heartbeat_timeout = absl::Milliseconds(400);
  // So that no single gap counts as a pause of the process.
  config.tick_interval = absl::Milliseconds(100);
  Bench bench(config);
  for (int round = 0; round < 2; ++round) {
    // One query blocks the thread until heartbeats are older than the timeout.
    absl::Notification blocked, go_on;
    ASSERT_TRUE(bench.loop().Ask([&](const Coordinator&) {
      blocked.Notify();
      go_on.WaitForNotification();
    }));
    blocked.WaitForNotification();
    const absl::Time until = absl::Now() + 2 * config.heartbeat_timeout;
    for (uint64_t sequence = 1; absl::Now() < until; ++sequence) {
      for (ConnectionId worker = 1; worker <= kWorkers; ++worker) {
        WorkerMessage said;
        said.connection = worker;
        said.message.mutable_heartbeat()->set_sequence(1000 * round + sequence);
        said.received = absl::Now();
        bench.loop().Post(std::move(said));
      }
      absl::SleepFor(absl::Milliseconds(20));  // the lag itself
    }
    go_on.Notify();
    absl::Notification handled;
    bench.loop().Post(Tick{}, [&] { handled.Notify(); });
    handled.WaitForNotification();
  }
  EXPECT_EQ(bench.drops(), 0);
}

int64_t ResidentBytes() {
  FILE* file = std::fopen("/proc/self/statm", "r");
  long long size = 0, resident = 0;
  const int fields = file == nullptr ? 0 : std::fscanf(file, "%lld %lld", &size, &resident);
  if (file != nullptr) std::fclose(file);
  return fields == 2 ? resident * 4096 : -1;
}

// Each plan lists 2^16 stripes, 3 MiB.
TEST(CoreLoopTest, EndedRequestsKeepOnlyTheirView) {
  Bench bench(Config());
  const auto serve = [&](StreamId stream) {
    RequestArrived request = Packed(stream, int64_t{1} << 17);
    request.fingerprint = 1;
    request.choice.stripe = 16;
    ASSERT_TRUE(bench.loop().TryPost(std::move(request)));
    bench.loop().Wake();
    bench.Await([&] { return bench.IsAccepted(stream); });
    absl::Notification ended;
    bench.loop().Post(Ended(stream), [&] { ended.Notify(); });
    ended.WaitForNotification();
  };
  for (StreamId stream = 1; stream <= 10; ++stream) serve(stream);
  const int64_t before = ResidentBytes();
  for (StreamId stream = 11; stream <= 250; ++stream) serve(stream);
  const int64_t grown = ResidentBytes() - before;
  absl::Notification asked;
  int64_t finished_bytes = 0;
  ASSERT_TRUE(bench.loop().Ask([&](const Coordinator& core) {
    finished_bytes = core.stats().finished_bytes;
    asked.Notify();
  }));
  asked.WaitForNotification();
  std::printf("resident memory grew by %lld bytes, %lld of them known\n",
              static_cast<long long>(grown), static_cast<long long>(finished_bytes));
  ASSERT_GT(before, 0);
  EXPECT_LT(grown, 48 * kMiB);  // the allocator's own; whole plans would take 750 MiB
  EXPECT_LT(finished_bytes, 250 * 2 * kKiB);
}

// An idle core handles the event on the thread that posts it. A busy one handles it afterwards.
TEST(CoreLoopTest, HandlesEventsOnTheirThreadWhileIdle) {
  Bench bench(Config());
  std::thread::id handled_on;
  while (handled_on != std::this_thread::get_id()) {  // until no tick is in the way
    absl::Notification handled;
    bench.loop().PostAndHandle({Tick{}}, [&] {
      handled_on = std::this_thread::get_id();
      handled.Notify();
    });
    ASSERT_TRUE(handled.WaitForNotificationWithTimeout(absl::Seconds(20)));
  }

  absl::Notification asked, answer, handled;
  ASSERT_TRUE(bench.loop().Ask([&](const Coordinator&) {
    asked.Notify();
    answer.WaitForNotification();
  }));
  asked.WaitForNotification();
  bench.loop().PostAndHandle({Tick{}}, [&] {
    handled_on = std::this_thread::get_id();
    handled.Notify();
  });
  EXPECT_FALSE(handled.HasBeenNotified());
  answer.Notify();
  ASSERT_TRUE(handled.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_NE(handled_on, std::this_thread::get_id());
}

// Other threads use the core while work that the sink has left for later runs.
TEST(CoreLoopTest, EventsAreHandledWhileWorkOfEarlierEventsRuns) {
  class Sink final : public ActionSink {
   public:
    void CarryOut(Action, const Coordinator&) override {
      if (!std::exchange(first_, false)) return;
      for (int i = 0; i < 3; ++i) loop->AfterEvents([this, i] { ran.push_back(i); });
      loop->AfterEvents([this] {
        runs.Notify();
        EXPECT_TRUE(next_handled.WaitForNotificationWithTimeout(absl::Seconds(20)));
      });
    }
    void OnTick(absl::Time, const Coordinator&) override {}

    CoreLoop* loop = nullptr;
    std::vector<int> ran;  // used by the thread that runs the work, and after it
    absl::Notification runs, next_handled;

   private:
    bool first_ = true;
  };
  Sink sink;
  CoreLoop loop(Config(), &sink);
  sink.loop = &loop;
  loop.Start();
  const auto join = [&loop](ConnectionId worker, std::function<void()> then) {
    WorkerJoined joined;
    joined.connection = worker;
    joined.registration.set_name(absl::StrCat("worker-", worker));
    loop.PostAndHandle({std::move(joined)}, std::move(then));
  };
  absl::Notification first_ended;
  std::thread first([&] { join(1, [&] { first_ended.Notify(); }); });
  ASSERT_TRUE(sink.runs.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_FALSE(first_ended.HasBeenNotified());
  join(2, [&] { sink.next_handled.Notify(); });
  ASSERT_TRUE(first_ended.WaitForNotificationWithTimeout(absl::Seconds(20)));
  first.join();
  loop.Stop();
  EXPECT_EQ(sink.ran, (std::vector<int>{0, 1, 2}));
}

}  // namespace
}  // namespace ringattn::server
