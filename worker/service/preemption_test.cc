// Small operations preempt a large one on a CPU device, through OperationRunner.
#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "gtest/gtest.h"
#include "worker/comm/inproc/inproc_communicator.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/service/operation_runner.h"
#include "worker/testing/copied_operation.h"

namespace ringattn::worker {
namespace {

constexpr int64_t kLargeTokens = 15000;
constexpr int64_t kSmallTokens = 40;
constexpr absl::Duration kPreemptAfter = absl::Milliseconds(1);

// Fills the inputs with values that depend on the position only.
void FillInputs(CopiedOperation& operation) {
  for (TensorId id : {TensorId::kQ, TensorId::kK, TensorId::kV}) {
    auto* values = static_cast<float*>(operation.operation()->operation().InputBuffer(id)->data());
    for (int64_t i = 0; i < BytesOf(operation.spec(), id) / 4; ++i) {
      values[i] = static_cast<float>((i * 13 + static_cast<int>(id)) % 89) / 89.0f - 0.5f;
    }
  }
}

std::vector<float> OutputOf(CopiedOperation& operation) {
  DeviceBuffer* const out = operation.operation()->operation().OutputBuffer(TensorId::kOut);
  const auto* const values = static_cast<const float*>(out->data());
  return {values, values + BytesOf(operation.spec(), TensorId::kOut) / 4};
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// A CPU device that can share its processors between runs, as a GPU does.
class TestDevice : public CpuDevice {
 public:
  using CpuDevice::CpuDevice;
  void Preempt(bool active) override {
    if (pauses()) CpuDevice::Preempt(active);
  }
  bool pauses() const override { return !shares; }

  bool shares = false;
};

class PreemptionTest : public testing::Test {
 protected:
  PreemptionTest() { runner_.SetCommunicator(std::move(MakeInProcessRing(1)[0])); }

  // Makes an operation with all inputs.
  CopiedOperation& Make(int64_t tokens) {
    operations_.push_back(
        std::make_unique<CopiedOperation>(tokens, 1, Layout::kContiguous, "region", &device_));
    FillInputs(*operations_.back());
    return *operations_.back();
  }

  void AwaitEnds(size_t count) {
    const auto ended = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return ends_.size() >= count; };
    absl::MutexLock lock(&mutex_);
    ASSERT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&ended), absl::Seconds(60)));
  }

  // A pause may serve several small operations; its report follows the last of them.
  void AwaitPauses(size_t count) {
    const auto reported = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return pauses_.size() >= count;
    };
    absl::MutexLock lock(&mutex_);
    ASSERT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&reported), absl::Seconds(60)));
  }

  bool IsLargeRunning() const {
    RunningOperation running;
    return runner_.Current(&running) && running.progress > 0;
  }

  mutable absl::Mutex mutex_;
  // Numbers of tokens of the operations that have ended, in order.
  std::vector<int64_t> ends_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread::id> threads_ ABSL_GUARDED_BY(mutex_);  // of the same
  std::vector<absl::Duration> pauses_ ABSL_GUARDED_BY(mutex_);
  TestDevice device_{1, int64_t{256} << 20};
  std::vector<std::unique_ptr<CopiedOperation>> operations_;  // outlive the runner's use
  OperationRunner runner_{
      &device_,
      [this](ShardOperation& operation, const absl::StatusOr<ExecutionReport>& result,
             const RunningOperation&) {
        EXPECT_TRUE(result.ok()) << result.status();
        absl::MutexLock lock(&mutex_);
        ends_.push_back(operation.operation().spec().shape.seq_len_q);
        threads_.push_back(std::this_thread::get_id());
      },
      [this](absl::Duration paused) {
        absl::MutexLock lock(&mutex_);
        pauses_.push_back(paused);
      }};
};

TEST_F(PreemptionTest, SmallOperationsEndWhileALargeOneRuns) {
  CopiedOperation& alone = Make(kLargeTokens);
  runner_.Run(alone.operation());
  AwaitEnds(1);
  CopiedOperation& small_alone = Make(kSmallTokens);
  runner_.Run(small_alone.operation());
  AwaitEnds(2);

  CopiedOperation& large = Make(kLargeTokens);
  std::vector<CopiedOperation*> small;
  for (int i = 0; i < 5; ++i) small.push_back(&Make(kSmallTokens));
  runner_.Run(large.operation());
  ASSERT_TRUE(Await([this] { return IsLargeRunning(); }));
  for (size_t i = 0; i < small.size(); ++i) {
    runner_.Preempt(small[i]->operation(), kPreemptAfter);
    AwaitEnds(3 + i);
    AwaitPauses(1 + i);
  }
  AwaitEnds(8);
  ASSERT_TRUE(runner_.WaitUntilIdle(MonotonicNow() + absl::Seconds(10)));
  EXPECT_TRUE(SameBits(OutputOf(large), OutputOf(alone)));
  for (const auto& each : small) EXPECT_TRUE(SameBits(OutputOf(*each), OutputOf(small_alone)));
  absl::MutexLock lock(&mutex_);
  EXPECT_EQ(ends_.back(), kLargeTokens);
  EXPECT_EQ(pauses_.size(), small.size());
  for (absl::Duration pause : pauses_) EXPECT_GT(pause, absl::ZeroDuration());
}

TEST_F(PreemptionTest, ADeviceThatSharesReportsNoPause) {
  device_.shares = true;
  CopiedOperation& large = Make(kLargeTokens);
  std::vector<CopiedOperation*> small;
  for (int i = 0; i < 3; ++i) small.push_back(&Make(kSmallTokens));
  runner_.Run(large.operation());
  ASSERT_TRUE(Await([this] { return IsLargeRunning(); }));
  for (size_t i = 0; i < small.size(); ++i) {
    runner_.Preempt(small[i]->operation(), kPreemptAfter);
    AwaitEnds(1 + i);
    AwaitPauses(1 + i);
  }
  AwaitEnds(4);
  absl::MutexLock lock(&mutex_);
  EXPECT_EQ(ends_.back(), kLargeTokens);
  EXPECT_EQ(pauses_, std::vector<absl::Duration>(small.size(), absl::ZeroDuration()));
}

// The large operation keeps computing however many small ones come: it ends before they all do.
TEST_F(PreemptionTest, ALargeOperationKeepsHalfOfTheDevice) {
  // With half of the device the large operation takes as long as 50 small ones.
  constexpr int kCount = 100;
  constexpr int64_t kTokens = 10000;
  CopiedOperation& large = Make(kTokens);
  std::vector<CopiedOperation*> small;
  for (int i = 0; i < kCount; ++i) small.push_back(&Make(2000));
  runner_.Run(large.operation());
  ASSERT_TRUE(Await([this] { return IsLargeRunning(); }));
  for (const auto& each : small) runner_.Preempt(each->operation(), kPreemptAfter);
  AwaitEnds(kCount + 1);
  absl::MutexLock lock(&mutex_);
  EXPECT_NE(ends_.back(), kTokens);
}

TEST_F(PreemptionTest, AShortOperationRunsOnItsCaller) {
  CopiedOperation& alone = Make(kSmallTokens);
  runner_.Run(alone.operation());
  AwaitEnds(1);
  ASSERT_TRUE(runner_.WaitUntilIdle(MonotonicNow() + absl::Seconds(10)));
  CopiedOperation& here = Make(kSmallTokens);
  runner_.RunOrEnqueue(here.operation());
  EXPECT_TRUE(SameBits(OutputOf(here), OutputOf(alone)));
  RunningOperation running;
  EXPECT_FALSE(runner_.Current(&running));
  absl::MutexLock lock(&mutex_);
  ASSERT_EQ(threads_.size(), 2u);
  EXPECT_NE(threads_[0], std::this_thread::get_id());
  EXPECT_EQ(threads_[1], std::this_thread::get_id());
}

TEST_F(PreemptionTest, AShortOperationKeepsItsPlaceBehindARunningOne) {
  CopiedOperation& large = Make(kLargeTokens);
  CopiedOperation& small = Make(kSmallTokens);
  runner_.Run(large.operation());
  ASSERT_TRUE(Await([this] { return IsLargeRunning(); }));
  runner_.RunOrEnqueue(small.operation());
  AwaitEnds(2);
  absl::MutexLock lock(&mutex_);
  EXPECT_EQ(ends_, (std::vector<int64_t>{kLargeTokens, kSmallTokens}));
  EXPECT_NE(threads_[1], std::this_thread::get_id());
}

// Callers and the runner's thread never run two operations at once.
TEST_F(PreemptionTest, OperationsOfCallersAndOfTheRunnerAllEnd) {
  constexpr int kEach = 50;
  std::vector<CopiedOperation*> all;
  for (int i = 0; i < 3 * kEach; ++i) all.push_back(&Make(kSmallTokens));
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = caller * kEach; i < (caller + 1) * kEach; ++i) {
        if (caller == 0) {
          runner_.Run(all[i]->operation());
        } else {
          runner_.RunOrEnqueue(all[i]->operation());
        }
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  AwaitEnds(all.size());
  ASSERT_TRUE(runner_.WaitUntilIdle(MonotonicNow() + absl::Seconds(10)));
  for (CopiedOperation* each : all) EXPECT_TRUE(SameBits(OutputOf(*each), OutputOf(*all[0])));
}

// A stop ends a paused operation and a queued small one.
TEST_F(PreemptionTest, StoppedOperationsEnd) {
  CopiedOperation& large = Make(kLargeTokens);
  CopiedOperation& small = Make(kSmallTokens);
  runner_.Run(large.operation());
  ASSERT_TRUE(Await([this] { return IsLargeRunning(); }));
  device_.Preempt(true);
  runner_.DropQueued();
  large.operation()->End(absl::AbortedError("over"));
  // The pause ends at its limit.
  EXPECT_TRUE(runner_.WaitUntilIdle(MonotonicNow() + absl::Seconds(30)));
  small.operation()->End(absl::AbortedError("over"));
  runner_.Preempt(small.operation(), kPreemptAfter);
  EXPECT_TRUE(runner_.WaitUntilIdle(MonotonicNow() + absl::Seconds(30)));
  absl::MutexLock lock(&mutex_);
  EXPECT_TRUE(ends_.empty());
}

}  // namespace
}  // namespace ringattn::worker
