#include <atomic>
#include <set>

#include "client/load/load_level.h"
#include "client/load/load_range.h"
#include "client/load/measure_level.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client::load {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Levels, AreStartEndStep) {
  EXPECT_THAT(*ParseLevels("4"), ElementsAre(4));
  EXPECT_THAT(*ParseLevels("1:3"), ElementsAre(1, 2, 3));
  EXPECT_THAT(*ParseLevels("1:16:5"), ElementsAre(1, 6, 11, 16));
  EXPECT_THAT(*ParseLevels("1:15:5"), ElementsAre(1, 6, 11));
  EXPECT_EQ(ParseLevels("0.1:1:0.1")->size(), 10u);
  EXPECT_THAT(*ParseWholeLevels("2:6:2", 6), ElementsAre(2, 4, 6));
}

TEST(Levels, ErrorsAreExplained) {
  for (const auto& [text, why] :
       std::vector<std::pair<std::string, std::string>>{{"", "numbers"},
                                                        {"x", "numbers"},
                                                        {"1:", "numbers"},
                                                        {"nan", "numbers"},
                                                        {"1:2:3:4", "more than three fields"},
                                                        {"0", "above 0"},
                                                        {"-1:4", "above 0"},
                                                        {"4:1", "ends before"},
                                                        {"1:4:0", "step above 0"},
                                                        {"1:4:-1", "step above 0"},
                                                        {"1:1e9", "levels"},
                                                        {"1:inf", "numbers"}}) {
    EXPECT_THAT(std::string(ParseLevels(text).status().message()), HasSubstr(why)) << text;
  }
  EXPECT_FALSE(ParseWholeLevels("1:2:0.5", 8).ok());
  EXPECT_FALSE(ParseWholeLevels("1:9", 8).ok());
}

CallSample Sample(double at, double seconds, const std::string& failure = "") {
  CallSample sample;
  sample.due = absl::UnixEpoch() + absl::Seconds(at);
  sample.began = sample.due;
  sample.ended = sample.due + absl::Seconds(seconds);
  sample.failure = failure;
  return sample;
}

TEST(LevelResult, CountsSuccessesAndFailuresSeparately) {
  Window window{absl::UnixEpoch(), absl::UnixEpoch() + absl::Seconds(10)};
  for (int i = 1; i <= 100; ++i) window.calls.push_back(Sample(0, 0.01 * i));
  window.calls.push_back(Sample(0, 9, "UNAVAILABLE"));
  window.calls.push_back(Sample(0, 9, "UNAVAILABLE"));
  window.calls[0].began += absl::Milliseconds(5);
  window.calls[0].replays = 2;
  window.calls[1].queue_seconds = 4;
  const LevelResult result = Summarise({window, window}, 75);
  EXPECT_EQ(result.succeeded, 200);
  EXPECT_EQ(result.failed.at("UNAVAILABLE"), 4);
  EXPECT_EQ(result.delayed, 2);
  EXPECT_EQ(result.replays, 4);
  EXPECT_DOUBLE_EQ(result.calls_per_second, 10);
  EXPECT_NEAR(result.latency.average, 0.505, 1e-9);
  EXPECT_NEAR(result.latency.p50, 0.5, 1e-9);
  EXPECT_NEAR(result.latency.p99, 0.99, 1e-9);
  EXPECT_NEAR(result.latency.chosen, 0.75, 1e-9);
  EXPECT_NEAR(result.queue_seconds, 0.04, 1e-9);
}

TEST(LevelResult, AnEmptyResultIsZero) {
  const LevelResult result =
      Summarise({{absl::UnixEpoch(), absl::UnixEpoch(), {Sample(0, 1, "ABORTED")}}}, 99);
  EXPECT_EQ(result.succeeded, 0);
  EXPECT_EQ(result.latency.p99, 0);
  EXPECT_EQ(result.calls_per_second, 0);
}

// Windows of ten calls each, which all take `seconds[i]`.
StableResult MeasureThese(const std::vector<double>& seconds, int max_trials) {
  size_t next = 0;
  Measurement measurement;
  measurement.interval = absl::Milliseconds(2);
  measurement.max_trials = max_trials;
  measurement.stability_percentage = 10;
  return MeasureLevel(measurement, [&](absl::Time deadline, size_t) {
    absl::SleepFor(deadline - absl::Now());
    const double now = seconds[next < seconds.size() ? next : seconds.size() - 1];
    ++next;
    std::vector<CallSample> calls;
    for (int i = 0; i < 10; ++i) {
      calls.push_back(now < 0 ? Sample(0, 1, "INTERNAL") : Sample(0, now));
    }
    return calls;
  });
}

TEST(MeasureLevel, EndsWhenThreeWindowsAgree) {
  // The rate of ten calls in 2 ms depends on the clock, so only latency is checked here.
  std::vector<LevelResult> windows(3);
  for (size_t i = 0; i < 3; ++i) {
    windows[i].calls_per_second = 10;
    windows[i].latency.chosen = 1 + 0.05 * static_cast<double>(i);
  }
  EXPECT_TRUE(AreStable(windows, 10));
  EXPECT_FALSE(AreStable(windows, 3));
  windows[2].latency.chosen = 1;
  windows[2].calls_per_second = 20;
  EXPECT_FALSE(AreStable(windows, 10));
}

TEST(MeasureLevel, StopsAfterMaxTrials) {
  const StableResult measured = MeasureThese({1, 5, 1, 5, 1, 5}, 5);
  EXPECT_FALSE(measured.stable);
  EXPECT_EQ(measured.windows, 5);
  EXPECT_EQ(measured.result.succeeded, 30);  // of the last three
}

TEST(MeasureLevel, StopsIfNoCallSucceeds) {
  const StableResult measured = MeasureThese({1, -1, 1}, 10);
  EXPECT_FALSE(measured.stable);
  EXPECT_EQ(measured.windows, 2);
  EXPECT_EQ(measured.result.failed.at("INTERNAL"), 10);
}

TEST(LoadLevel, KeepsItsConcurrency) {
  std::atomic<int> running{0}, most{0};
  LoadLevel level({.concurrency = 4}, [&](int) {
    const int now = ++running;
    for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
    }
    // Waits until all have started, and long enough for one too many.
    for (int i = 0; i < 1000 && most < 4; ++i) absl::SleepFor(absl::Milliseconds(5));
    absl::SleepFor(absl::Milliseconds(5));
    --running;
    return CallSample();
  });
  const std::vector<CallSample> calls = level.Take(absl::Now(), 40);
  EXPECT_GE(calls.size(), 40u);
  EXPECT_EQ(most, 4);
}

TEST(LoadLevel, ASlotHasOneCallerAtATime) {
  std::atomic<bool> busy[3] = {};
  std::atomic<bool> shared{false};
  LoadLevel level({.concurrency = 3, .rate = 500}, [&](int slot) {
    if (busy[slot].exchange(true)) shared = true;
    absl::SleepFor(absl::Milliseconds(1));
    busy[slot] = false;
    return CallSample();
  });
  level.Take(absl::Now(), 60);
  EXPECT_FALSE(shared);
}

TEST(LoadLevel, KeepsItsRateAndCountsFromWhenACallWasDue) {
  // Two slots with 20 ms per call give 100 calls per second. 200 are due, so latency grows.
  LoadLevel level({.concurrency = 2, .rate = 200}, [](int) {
    absl::SleepFor(absl::Milliseconds(20));
    return CallSample();
  });
  const std::vector<CallSample> calls = level.Take(absl::Now(), 40);
  for (size_t i = 2; i < calls.size(); ++i) EXPECT_GE(calls[i].began, calls[i].due);
  EXPECT_GT(calls.back().latency_seconds(), calls.front().latency_seconds() + 0.05);
  std::set<absl::Time> due;
  for (const CallSample& call : calls) due.insert(call.due);
  EXPECT_EQ(due.size(), calls.size());
  EXPECT_NEAR(absl::ToDoubleSeconds(*due.rbegin() - *due.begin()),
              (static_cast<double>(due.size()) - 1) / 200, 0.03);
}

TEST(LoadLevel, PoissonArrivalsHaveTheRequestedAverageRate) {
  LoadLevel level({.concurrency = 8, .rate = 2000, .poisson = true, .seed = 7},
                  [](int) { return CallSample(); });
  const std::vector<CallSample> calls = level.Take(absl::Now(), 1000);
  absl::Time first = absl::InfiniteFuture(), last = absl::InfinitePast();
  for (const CallSample& call : calls) {
    first = std::min(first, call.due);
    last = std::max(last, call.due);
  }
  const double rate = static_cast<double>(calls.size()) / absl::ToDoubleSeconds(last - first);
  EXPECT_NEAR(rate, 2000, 250);
}

}  // namespace
}  // namespace ringattn::client::load
