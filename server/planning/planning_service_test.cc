#include "server/planning/planning_service.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "server/core/requests/plan_summary.h"

namespace ringattn::server {
namespace {

constexpr double kLight = 1e-5;
constexpr double kHeavy = 1.0;

PlanThis Ask(StreamId stream, const std::string& client, double cost, int64_t tokens = 8) {
  auto spec = std::make_shared<AttentionSpec>();
  spec->shape.seq_len_q = spec->shape.seq_len_kv = tokens;
  spec->shape.cu_seqlens_q = spec->shape.cu_seqlens_k = {0, tokens};
  PlanThis ask;
  ask.stream = stream;
  ask.generation = 7;
  ask.client = client;
  ask.fingerprint = stream;  // distinct, so that the cache is never hit
  ask.spec = std::move(spec);
  ask.inputs.ready_workers = 1;
  ask.cost_seconds = cost;
  return ask;
}

// The results received. Thread safe.
class Results {
 public:
  PlanningService::Done Done() {
    return [this](Planned planned) {
      absl::MutexLock lock(&mutex_);
      planned_.push_back(std::move(planned));
    };
  }
  // Takes what Submit returned.
  void Take(std::optional<Planned> known) {
    if (known.has_value()) Done()(*std::move(known));
  }
  std::vector<StreamId> Await(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto enough = [&] {
      mutex_.AssertReaderHeld();
      return planned_.size() >= count;
    };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&enough), absl::Seconds(60)));
    std::vector<StreamId> streams;
    for (const Planned& planned : planned_) streams.push_back(planned.stream);
    return streams;
  }
  Planned at(size_t index) {
    absl::MutexLock lock(&mutex_);
    return planned_.at(index);
  }

 private:
  absl::Mutex mutex_;
  std::vector<Planned> planned_ ABSL_GUARDED_BY(mutex_);
};

// Makes heavy plans only when the test releases it. Thread safe.
class HeldPlanner {
 public:
  PlanningService::Planner Planner() {
    return [this](const PlanThis& ask, const PlanControl& control) -> absl::StatusOr<Plan> {
      absl::MutexLock lock(&mutex_);
      made_.push_back(ask.stream);
      const auto may_go = [&] {
        mutex_.AssertReaderHeld();
        return open_ || ask.cost_seconds < kHeavy;
      };
      while (!may_go()) {
        // Woken by every change; checks for cancellation in between.
        mutex_.AwaitWithTimeout(absl::Condition(&may_go), absl::Milliseconds(1));
        if (control.IsCancelled()) return absl::CancelledError("");
      }
      return Plan();
    };
  }
  void Open() {
    absl::MutexLock lock(&mutex_);
    open_ = true;
  }
  void AwaitMade(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto enough = [&] {
      mutex_.AssertReaderHeld();
      return made_.size() >= count;
    };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&enough), absl::Seconds(60)));
  }
  std::vector<StreamId> made() {
    absl::MutexLock lock(&mutex_);
    return made_;
  }

 private:
  absl::Mutex mutex_;
  bool open_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<StreamId> made_ ABSL_GUARDED_BY(mutex_);
};

TEST(PlanningServiceTest, PlansAsThePlannerDoes) {
  Results results;
  PlanningService service({}, results.Done());
  const PlanThis ask = Ask(1, "a", kLight, 1000);
  results.Take(service.Submit(ask));
  results.Await(1);
  const Planned planned = results.at(0);
  EXPECT_EQ(planned.stream, 1u);
  EXPECT_EQ(planned.generation, 7u);
  ASSERT_TRUE(planned.plan.ok());
  const absl::StatusOr<Plan> expected =
      PlanRequest(*ask.spec, ask.direction, ask.choice, ask.inputs);
  EXPECT_EQ((*planned.plan)->buffer_bytes, expected->buffer_bytes);
  EXPECT_EQ((*planned.plan)->reason, expected->reason);
  EXPECT_EQ((*planned.plan)->predicted_compute_seconds, expected->predicted_compute_seconds);
}

TEST(PlanningServiceTest, ErrorsAreForwarded) {
  Results results;
  PlanningService service({}, results.Done());
  PlanThis ask = Ask(1, "a", kLight);
  ask.choice.world_size = 2;
  results.Take(service.Submit(ask));
  results.Await(1);
  EXPECT_EQ(results.at(0).plan.status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(PlanningServiceTest, EqualRequestsArePlannedOnce) {
  Results results;
  HeldPlanner planner;
  PlanningService service({}, results.Done(), planner.Planner());
  for (StreamId stream = 1; stream <= 5; ++stream) {
    PlanThis ask = Ask(stream, "a", kLight);
    ask.fingerprint = 1;
    std::optional<Planned> known = service.Submit(ask);
    EXPECT_EQ(known.has_value(), stream > 1);
    results.Take(std::move(known));
    EXPECT_EQ(results.Await(stream).back(), stream);
  }
  EXPECT_EQ(planner.made().size(), 1u);
  EXPECT_EQ(service.stats().from_cache, 4);
}

TEST(PlanningServiceTest, LightPlansDoNotWaitForHeavyOnes) {
  Results results;
  HeldPlanner planner;
  PlanningService service({}, results.Done(), planner.Planner());
  for (StreamId stream = 1; stream <= 40; ++stream)
    results.Take(service.Submit(Ask(stream, "a", kHeavy)));
  planner.AwaitMade(1);
  results.Take(service.Submit(Ask(100, "a", kLight)));
  EXPECT_EQ(results.Await(1), (std::vector<StreamId>{100}));
  planner.Open();
  results.Await(41);
}

TEST(PlanningServiceTest, ClientsAlternate) {
  Results results;
  HeldPlanner planner;
  PlanningService service({}, results.Done(), planner.Planner());
  results.Take(service.Submit(Ask(1, "a", kHeavy)));
  planner.AwaitMade(1);
  for (StreamId stream = 2; stream <= 4; ++stream)
    results.Take(service.Submit(Ask(stream, "a", kHeavy)));
  results.Take(service.Submit(Ask(10, "b", kHeavy)));
  planner.Open();
  results.Await(5);
  EXPECT_EQ(planner.made(), (std::vector<StreamId>{1, 10, 2, 3, 4}));
}

TEST(PlanningServiceTest, CancelledPlansStop) {
  Results results;
  HeldPlanner planner;
  PlanningService service({}, results.Done(), planner.Planner());
  for (StreamId stream = 1; stream <= 3; ++stream)
    results.Take(service.Submit(Ask(stream, "a", kHeavy)));
  planner.AwaitMade(1);
  service.Cancel(1);  // running
  service.Cancel(2);  // queued
  service.Cancel(9);  // unknown
  planner.AwaitMade(2);
  EXPECT_EQ(planner.made(), (std::vector<StreamId>{1, 3}));
  planner.Open();
  EXPECT_EQ(results.Await(1), (std::vector<StreamId>{3}));
  EXPECT_EQ(service.stats().cancelled, 2);
  EXPECT_EQ(service.stats().queued, 0);
}

// The ring changed, so the newer request counts.
TEST(PlanningServiceTest, ANewerRequestOfAStreamReplacesTheOlder) {
  Results results;
  HeldPlanner planner;
  PlanningService service({}, results.Done(), planner.Planner());
  results.Take(service.Submit(Ask(1, "a", kHeavy)));
  planner.AwaitMade(1);
  PlanThis newer = Ask(1, "a", kHeavy);
  newer.generation = 8;
  results.Take(service.Submit(newer));
  planner.AwaitMade(2);
  planner.Open();
  EXPECT_EQ(results.Await(1), (std::vector<StreamId>{1}));
  EXPECT_EQ(results.at(0).generation, 8u);
}

TEST(PlanningServiceTest, TooManyPlansAreRejected) {
  Results results;
  HeldPlanner planner;
  PlanningOptions options;
  options.max_queued = 2;
  PlanningService service(options, results.Done(), planner.Planner());
  results.Take(service.Submit(Ask(1, "a", kHeavy)));
  planner.AwaitMade(1);
  for (StreamId stream = 2; stream <= 4; ++stream)
    results.Take(service.Submit(Ask(stream, "a", kHeavy)));
  EXPECT_EQ(results.Await(1), (std::vector<StreamId>{4}));
  EXPECT_EQ(results.at(0).plan.status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(PlanningServiceTest, TooLongListsAreRejected) {
  Results results;
  HeldPlanner planner;
  PlanningOptions options;
  options.max_queued_bytes = KeyBytes(*Ask(1, "a", kHeavy).spec);
  PlanningService service(options, results.Done(), planner.Planner());
  results.Take(service.Submit(Ask(1, "a", kHeavy)));
  planner.AwaitMade(1);  // and leaves the queue
  results.Take(service.Submit(Ask(2, "a", kHeavy)));
  results.Take(service.Submit(Ask(3, "a", kHeavy)));
  EXPECT_EQ(results.Await(1), (std::vector<StreamId>{3}));
}

TEST(PlanningServiceTest, PlanningTimeIsBounded) {
  Results results;
  HeldPlanner planner;
  PlanningOptions options;
  options.time_max = absl::Milliseconds(1);
  PlanningService service(options, results.Done(), planner.Planner());
  results.Take(service.Submit(Ask(1, "a", kHeavy)));
  results.Await(1);
  EXPECT_EQ(results.at(0).plan.status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(PlanningServiceTest, StopsWhilePlansAreRunning) {
  Results results;
  HeldPlanner planner;
  {
    PlanningService service({}, results.Done(), planner.Planner());
    for (StreamId stream = 1; stream <= 3; ++stream)
      results.Take(service.Submit(Ask(stream, "a", kHeavy)));
    planner.AwaitMade(1);
  }
  EXPECT_TRUE(results.Await(0).empty());
}

}  // namespace
}  // namespace ringattn::server
