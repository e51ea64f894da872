#include "common/wire/grpc_1_51/resting_threads.h"

#include <algorithm>
#include <functional>
#include <list>
#include <optional>

#include <grpcpp/generic/generic_stub.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/base/monotonic_time.h"
#include "common/wire/grpc_1_51/callback_call.h"
#include "common/wire/grpc_1_51/callback_threads.h"
#include "common/wire/grpc_1_51/keep_awake.h"
#include "gtest/gtest.h"

namespace ringattn::wire {
namespace {

constexpr int kThreads = 5;

bool Becomes(const std::function<bool()>& condition, absl::Duration limit = absl::Seconds(20)) {
  const absl::Time deadline = MonotonicNow() + limit;
  while (!condition()) {
    if (MonotonicNow() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

// Callbacks that wait for each other, as many as there are callback threads, and so count those
// that serve.
class Callbacks {
 public:
  Callbacks() {
    for (int i = 0; i < kThreads; ++i) {
      calls_.emplace_back(stub_, [this] {
        absl::MutexLock lock(&mutex_);
        most_ = std::max(most_, ++running_);
        mutex_.Await(absl::Condition(&go_on_));
        --running_;
        ++ended_;
      });
    }
  }
  ~Callbacks() {
    absl::MutexLock lock(&mutex_);
    go_on_ = true;
    mutex_.Await(absl::Condition(this, &Callbacks::AllEnded));
  }

  int most() {
    absl::MutexLock lock(&mutex_);
    return most_;
  }

 private:
  bool AllEnded() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ended_ == kThreads; }

  grpc::GenericStub stub_{UnconnectedChannel()};
  std::list<CallbackCall> calls_;
  absl::Mutex mutex_;
  int running_ ABSL_GUARDED_BY(mutex_) = 0;
  int most_ ABSL_GUARDED_BY(mutex_) = 0;
  int ended_ ABSL_GUARDED_BY(mutex_) = 0;
  bool go_on_ ABSL_GUARDED_BY(mutex_) = false;
};

class RestingThreadsTest : public ::testing::Test {
 protected:
  // Before anything of gRPC.
  static void SetUpTestSuite() { SetCallbackThreads(kThreads); }

  const KeepAwake user_of_callbacks_;
};

TEST_F(RestingThreadsTest, AllServeWithoutIt) {
  Callbacks callbacks;
  EXPECT_TRUE(Becomes([&] { return callbacks.most() == kThreads; }));
}

TEST_F(RestingThreadsTest, TheOthersServe) {
  const RestingThreads resting(3, absl::Milliseconds(20));
  ASSERT_TRUE(Becomes([] { return RestingThreads::resting() == 3; }));
  Callbacks callbacks;
  EXPECT_TRUE(Becomes([&] { return callbacks.most() == 2; }));
  EXPECT_FALSE(Becomes([&] { return callbacks.most() > 2; }, absl::Milliseconds(300)));
}

TEST_F(RestingThreadsTest, AllServeWhileThereAreManyCallbacks) {
  const RestingThreads resting(3, absl::Milliseconds(20));
  ASSERT_TRUE(Becomes([] { return RestingThreads::resting() == 3; }));
  {
    const ManyCallbacks many;
    EXPECT_TRUE(Becomes([] { return RestingThreads::resting() == 0; }));
    Callbacks callbacks;
    EXPECT_TRUE(Becomes([&] { return callbacks.most() == kThreads; }));
  }
  EXPECT_TRUE(Becomes([] { return RestingThreads::resting() == 3; }));
}

TEST_F(RestingThreadsTest, ShortPausesDoNotLetThemRest) {
  const RestingThreads resting(3, absl::Seconds(30));
  for (int i = 0; i < 20; ++i) {
    const ManyCallbacks many;
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_FALSE(Becomes([] { return RestingThreads::resting() > 0; }, absl::Milliseconds(200)));
}

TEST_F(RestingThreadsTest, NeverMoreRestThanTold) {
  const RestingThreads resting(3, absl::ZeroDuration());
  int most = 0;
  for (int i = 0; i < 2000; ++i) {
    std::optional<ManyCallbacks> many(std::in_place);
    many.reset();
    most = std::max(most, RestingThreads::resting());
  }
  EXPECT_TRUE(Becomes([] { return RestingThreads::resting() == 3; }));
  EXPECT_LE(most, 3);
}

TEST_F(RestingThreadsTest, NoneRestsAfterItsEnd) {
  for (int i = 0; i < 50; ++i) {
    const RestingThreads resting(3, absl::ZeroDuration());
    if (i % 2 == 0) absl::SleepFor(absl::Milliseconds(2));
  }
  EXPECT_EQ(RestingThreads::resting(), 0);
  const RestingThreads none(0);
  Callbacks callbacks;
  EXPECT_TRUE(Becomes([&] { return callbacks.most() == kThreads; }));
}

}  // namespace
}  // namespace ringattn::wire
