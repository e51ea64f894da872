#include "worker/operation/transfer_reporter.h"

#include <atomic>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace ringattn::worker {
namespace {

constexpr absl::Duration kInterval = absl::Milliseconds(2);

class TransferReporterTest : public testing::Test {
 protected:
  std::function<void(v1::JoinRequest)> Send() {
    return [this](v1::JoinRequest message) {
      absl::MutexLock lock(&mutex_);
      sent_.push_back(std::move(message));
    };
  }
  std::vector<v1::JoinRequest> sent() {
    absl::MutexLock lock(&mutex_);
    return sent_;
  }
  bool AwaitSent(size_t count) {
    for (int i = 0; i < 5000 && sent().size() < count; ++i) absl::SleepFor(absl::Milliseconds(1));
    return sent().size() >= count;
  }

  const OperationInfo info_{.id = "7-1", .generation = 7};
  absl::Mutex mutex_;
  std::vector<v1::JoinRequest> sent_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(TransferReporterTest, ReportsProgressWheneverItChanges) {
  std::atomic<int64_t> received{0};
  std::atomic<bool> waits{false};
  std::atomic<int> looks{0};
  int transfer = 0;
  TransferReporter reporter(Send(), kInterval);
  reporter.Watch(&transfer, info_, [&] {
    ++looks;
    return TransferCounts{received, 3 * received, waits};
  });
  const auto await_looks = [&](int more) {
    const int until = looks + more;
    while (looks < until) absl::SleepFor(kInterval);
  };
  await_looks(3);
  EXPECT_TRUE(sent().empty());  // the counts have not changed
  received = 5;
  ASSERT_TRUE(AwaitSent(1));
  EXPECT_EQ(sent()[0].transfer_progress().operation_id(), "7-1");
  EXPECT_EQ(sent()[0].transfer_progress().generation(), 7u);
  EXPECT_EQ(sent()[0].transfer_progress().received(), 5u);
  EXPECT_EQ(sent()[0].transfer_progress().sent(), 15u);
  EXPECT_FALSE(sent()[0].transfer_progress().waits_for_client());
  await_looks(3);
  EXPECT_EQ(sent().size(), 1u);
  waits = true;
  ASSERT_TRUE(AwaitSent(2));
  EXPECT_TRUE(sent()[1].transfer_progress().waits_for_client());
  reporter.Unwatch(&transfer);
  const int looked = looks;
  received = 6;
  absl::SleepFor(10 * kInterval);
  EXPECT_EQ(looks, looked);
  EXPECT_EQ(sent().size(), 2u);
}

TEST_F(TransferReporterTest, ReportsEndsAtOnce) {
  TransferReporter reporter(Send(), absl::Hours(1));
  reporter.Uploaded(info_);
  reporter.Delivered(info_);
  reporter.Failed(info_, TransferEnd::kWorkerError, "no memory");
  reporter.Failed(info_, TransferEnd::kRegionReleased, "not told");
  reporter.Failed(info_, TransferEnd::kBadChunk, "twice");
  ASSERT_EQ(sent().size(), 5u);
  EXPECT_EQ(sent()[0].uploaded().operation_id(), "7-1");
  EXPECT_EQ(sent()[1].delivered().generation(), 7u);
  EXPECT_EQ(sent()[2].transfer_progress().failure(), "no memory");
  EXPECT_TRUE(sent()[3].transfer_progress().region_released());
  EXPECT_TRUE(sent()[3].transfer_progress().failure().empty());
  EXPECT_EQ(sent()[4].transfer_progress().bad_chunk(), "twice");
}

TEST_F(TransferReporterTest, ReadsNoCountsAfterStop) {
  std::atomic<int> looks{0};
  int transfer = 0;
  TransferReporter reporter(Send(), kInterval);
  reporter.Watch(&transfer, info_, [&] { return TransferCounts{.received_bytes = ++looks}; });
  while (looks < 3) absl::SleepFor(kInterval);
  reporter.Stop();
  reporter.Stop();
  const int looked = looks;
  const size_t said = sent().size();
  absl::SleepFor(10 * kInterval);
  EXPECT_EQ(looks, looked);
  EXPECT_EQ(sent().size(), said);
}

}  // namespace
}  // namespace ringattn::worker
