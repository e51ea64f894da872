#include "client/call/staged_call.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "client/testing/fake_region_worker.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ringattn::client {
namespace {

using ::testing::HasSubstr;

// A call that the test ends.
class HeldCall final : public PendingCall::State {
 public:
  explicit HeldCall(std::function<void(const CallResult&)> done) : done_(std::move(done)) {}
  const std::string& request_id() const override { return id_; }
  CallResult Wait() override { return absl::InternalError("nobody waits for it"); }
  void Cancel() override {
    if (!over_.exchange(true)) done_(absl::CancelledError("cancelled"));
  }
  void End(const CallResult& result) {
    if (!over_.exchange(true)) done_(result);
  }

 private:
  const std::string id_;
  const std::function<void(const CallResult&)> done_;
  std::atomic<bool> over_{false};
};

CallReport ReportBy(v1::Transport transport) {
  CallReport report;
  report.accepted.set_transport(transport);
  report.transport_reason = "as the service says";
  report.times.accepted_seconds = 0.25;
  return report;
}

class StagedCallTest : public testing::Test {
 protected:
  StagedCallTest() : q_(1'000'000, 1), k_(500'000, 2), out_(1'000'000, 0), lse_(100, 0) {
    args_.q = BytesOf(q_);
    args_.k = args_.v = BytesOf(k_);
    results_ = {.out = MutableBytesOf(out_), .lse = MutableBytesOf(lse_)};
  }

  absl::StatusOr<v1::AttachResponse> Attach(const v1::AttachRequest& request) {
    v1::AttachResponse response;
    response.set_region_id("region");
    if (request.region_id().empty()) {
      *response.add_points() = worker_.Point();
    } else {
      response.add_attached("worker");
    }
    return response;
  }

  PendingCall Start(absl::Duration deadline = absl::InfiniteDuration()) {
    StagedCallParams params;
    params.request_id = "one";
    params.plan = PlanStaging(args_, results_, *index_);
    params.region = std::move(region_);
    params.pool = &pool_;
    params.copies = &copies_;
    params.registry = registry_;
    params.deadline = deadline;
    params.start = [this, plan = params.plan](uint8_t* base, const std::string& why,
                                              absl::Duration left, const auto& done) {
      const absl::MutexLock lock(&mutex_);
      why_not_ = why;
      left_ = left;
      staged_ = base != nullptr;
      here_ = args_;
      there_ = results_;
      if (base != nullptr) PointToStage(plan, base, &here_, &there_);
      held_ = std::make_shared<HeldCall>(done);
      return PendingCall(held_);
    };
    params.done = [this](const CallResult&) { ++done_; };
    return StartStagedCall(std::move(params));
  }

  std::shared_ptr<HeldCall> Held() {
    const absl::MutexLock lock(&mutex_, absl::Condition(this, &StagedCallTest::IsHeld));
    return held_;
  }
  bool IsHeld() const { return held_ != nullptr; }

  FakeRegionWorker worker_{"worker"};
  std::vector<uint8_t> q_, k_, out_, lse_;
  ForwardArgs args_, here_;
  ForwardResults results_, there_;
  const std::shared_ptr<RegionIndex> index_ = std::make_shared<RegionIndex>();
  const std::shared_ptr<CallRegistry> registry_ = std::make_shared<CallRegistry>();
  StagingPool pool_{{.max_bytes = 64 << 20},
                    [this] { return [this](const auto& request) { return Attach(request); }; },
                    index_};
  CopyPool copies_{2, absl::Minutes(1), [] {}};
  std::shared_ptr<SharedRegion> region_;
  absl::Mutex mutex_;
  std::shared_ptr<HeldCall> held_;
  std::string why_not_;
  absl::Duration left_;
  bool staged_ = false;
  std::atomic<int> done_{0};
};

TEST_F(StagedCallTest, TensorsAreCopiedInAndOut) {
  const PendingCall operation = Start();
  const std::shared_ptr<HeldCall> held = Held();
  ASSERT_TRUE(staged_);
  EXPECT_NE(here_.q.data(), q_.data());
  EXPECT_NE(index_->Find(here_.q.data(), here_.q.size()), nullptr);
  EXPECT_EQ(std::memcmp(here_.q.data(), q_.data(), q_.size()), 0);
  EXPECT_EQ(std::memcmp(here_.k.data(), k_.data(), k_.size()), 0);
  EXPECT_EQ(here_.v.data(), here_.k.data());  // the same memory, copied once
  std::memset(there_.out.data(), 5, there_.out.size());
  std::memset(there_.lse.data(), 6, there_.lse.size());
  held->End(ReportBy(v1::TRANSPORT_HOST_MEMORY));
  const CallResult result = operation.Wait();
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(out_, std::vector<uint8_t>(out_.size(), 5));
  EXPECT_EQ(lse_, std::vector<uint8_t>(lse_.size(), 6));
  EXPECT_EQ(result->staged_bytes, q_.size() + k_.size() + out_.size() + lse_.size());
  EXPECT_THAT(result->transport_reason, HasSubstr("as the service says; staged"));
  EXPECT_GT(result->times.accepted_seconds, 0.25);  // includes the copies before it
  EXPECT_EQ(done_, 1);
  registry_->CancelAllAndWait();
}

TEST_F(StagedCallTest, OnlyTensorsOutsideRegionsAreStaged) {
  auto mine = *SharedRegion::Make(
      1'000'000, [this](const v1::AttachRequest& request) { return Attach(request); });
  index_->Add(mine);
  args_.q = {mine->data(), 1'000'000};
  const StagingPlan plan = PlanStaging(args_, results_, *index_);
  ASSERT_EQ(plan.inputs.size(), 1u);
  EXPECT_EQ(plan.inputs[0].data, k_.data());
  EXPECT_EQ(plan.outputs.size(), 2u);
  for (const auto& tensor : plan.outputs) EXPECT_EQ(tensor.offset % 64, 0u);
  index_->Remove(mine.get());
  mine->Stop();
}

TEST_F(StagedCallTest, ABackwardWithAResidualStagesOnlyDout) {
  BackwardArgs args;
  args.q = args.k = args.v = args.out = BytesOf(q_);
  args.dout = BytesOf(out_);
  args.lse = BytesOf(lse_);
  args.more[v1::TENSOR_ID_DLSE] = BytesOf(k_);
  args.more[v1::TENSOR_ID_BIAS] = BytesOf(lse_);
  const StagingPlan plan = PlanStaging(args, BackwardResults(), *index_, /*only_dout=*/true);
  ASSERT_EQ(plan.inputs.size(), 2u);
  EXPECT_EQ(plan.inputs[0].data, out_.data());
  EXPECT_EQ(plan.inputs[1].data, k_.data());
  EXPECT_EQ(PlanStaging(args, BackwardResults(), *index_).inputs.size(), 4u);
}

TEST_F(StagedCallTest, AFallbackToTheRelayIsReported) {
  const PendingCall operation = Start();
  Held()->End(ReportBy(v1::TRANSPORT_RELAY));
  const CallResult result = operation.Wait();
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->transport_reason, "as the service says");
  EXPECT_GT(result->staged_bytes, 0u);
}

TEST_F(StagedCallTest, WithoutARegionTheCallUsesTheCallersMemory) {
  worker_.RefuseWith(AttachCode::kDescriptorRefused);
  const PendingCall operation = Start();
  const std::shared_ptr<HeldCall> held = Held();
  EXPECT_FALSE(staged_);
  EXPECT_EQ(here_.q.data(), q_.data());
  EXPECT_THAT(why_not_,
              HasSubstr("no worker of this machine attached memory: worker: as it was told"));
  held->End(ReportBy(v1::TRANSPORT_RELAY));
  const CallResult result = operation.Wait();
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->staged_bytes, 0u);
}

TEST_F(StagedCallTest, AFailureIsReportedAndResultsStayUnchanged) {
  const PendingCall operation = Start();
  const std::shared_ptr<HeldCall> held = Held();
  std::memset(there_.out.data(), 5, there_.out.size());
  held->End(absl::DeadlineExceededError("too late"));
  EXPECT_EQ(operation.Wait().status(), absl::DeadlineExceededError("too late"));
  EXPECT_EQ(out_, std::vector<uint8_t>(out_.size(), 0));
  registry_->CancelAllAndWait();
  EXPECT_EQ(pool_.bytes(), 0);  // a worker may still write there
}

TEST_F(StagedCallTest, CancellingReachesTheCall) {
  const PendingCall operation = Start();
  Held();
  operation.Cancel();
  EXPECT_TRUE(absl::IsCancelled(operation.Wait().status()));
  EXPECT_EQ(done_, 1);
}

TEST_F(StagedCallTest, ACallCancelledBeforeItsStartIsNeverMade) {
  // Keeps the pool's threads busy.
  absl::Mutex busy;
  busy.Lock();
  for (int i = 0; i < 2; ++i) copies_.Add([&] { const absl::MutexLock lock(&busy); });
  const PendingCall operation = Start();
  operation.Cancel();
  busy.Unlock();
  EXPECT_TRUE(absl::IsCancelled(operation.Wait().status()));
  const absl::MutexLock lock(&mutex_);
  EXPECT_EQ(held_, nullptr);
}

TEST_F(StagedCallTest, AReadyRegionIsAlwaysGivenBack) {
  region_ = *pool_.Take(4 << 20);
  const uint8_t* const data = region_->data();
  EXPECT_TRUE(absl::IsDeadlineExceeded(Start(absl::Nanoseconds(1)).Wait().status()));
  registry_->CancelAllAndWait();
  bool prepare = false;
  region_ = pool_.TakeReady(4 << 20, &prepare);
  ASSERT_NE(region_, nullptr);
  const PendingCall operation = Start();
  const std::shared_ptr<HeldCall> held = Held();
  EXPECT_EQ(here_.q.data(), data);
  held->End(ReportBy(v1::TRANSPORT_HOST_MEMORY));
  EXPECT_TRUE(operation.Wait().ok());
  EXPECT_EQ(worker_.attaches(), 2);
}

TEST_F(StagedCallTest, TheDeadlineIncludesTheCopies) {
  const PendingCall late = Start(absl::Nanoseconds(1));
  EXPECT_TRUE(absl::IsDeadlineExceeded(late.Wait().status()));
  const PendingCall operation = Start(absl::Minutes(1));
  const std::shared_ptr<HeldCall> held = Held();
  EXPECT_LT(left_, absl::Minutes(1));
  EXPECT_GT(left_, absl::Seconds(30));
  held->End(ReportBy(v1::TRANSPORT_HOST_MEMORY));
  EXPECT_TRUE(operation.Wait().ok());
}

TEST_F(StagedCallTest, RegionsAreReused) {
  for (int i = 0; i < 20; ++i) {
    const PendingCall operation = Start();
    Held()->End(ReportBy(v1::TRANSPORT_HOST_MEMORY));
    ASSERT_TRUE(operation.Wait().ok());
    registry_->CancelAllAndWait();
    const absl::MutexLock lock(&mutex_);
    held_ = nullptr;
  }
  EXPECT_EQ(worker_.attaches(), 2);  // one page as a probe, and the region
}

}  // namespace
}  // namespace ringattn::client
