#include "worker/region/region_transfer.h"

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "absl/synchronization/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/testing/copied_operation.h"

namespace ringattn::worker {
namespace {

using ::testing::HasSubstr;

class RegionTransferTest : public testing::Test {
 protected:
  RegionTransferTest() {
    hooks_.on_uploaded = [this](const OperationInfo& info) {
      EXPECT_EQ(info.id, "7-1");
      ++uploaded_;
    };
    hooks_.on_delivered = [this](const OperationInfo&) { ++delivered_; };
    hooks_.on_failed = [this](const OperationInfo&, bool released, const std::string& why) {
      const absl::MutexLock lock(&mutex_);
      why_ = why;
      released_ = released;
      ++failed_;
    };
    hooks_.on_received_bytes = [this](int64_t bytes) { received_ += bytes; };
    hooks_.on_sent_bytes = [this](int64_t bytes) { sent_ += bytes; };
    hooks_.on_downloaded = [this](absl::Duration) { ++downloads_; };
  }

  absl::StatusOr<std::shared_ptr<RegionTransfer>> Make(CopiedOperation& copied,
                                                       std::shared_ptr<Region> region) {
    return RegionTransfer::Make(
        copied.operation(), copied.reserve(),
        [region](const std::string& id) { return id == "region" ? region : nullptr; }, &hooks_,
        {&up_, &down_});
  }
  RegionTransfer* Start(CopiedOperation& copied, const std::shared_ptr<Region>& region) {
    auto made = Make(copied, region);
    EXPECT_TRUE(made.ok()) << made.status();
    kept_ = *made;
    (*made)->Start([this] { ++over_; });
    return kept_.get();
  }
  // Ends the operation. Afterwards nothing is copied and no reference remains.
  void End(CopiedOperation& copied) {
    copied.operation()->End(absl::CancelledError("released"));
    EXPECT_TRUE(Await([&] { return over_ == 1; }));
    kept_.reset();
    copied.Drop();
    EXPECT_TRUE(Await([&] { return copied.destroyed(); }));
  }
  std::string why() {
    const absl::MutexLock lock(&mutex_);
    return why_;
  }

  std::atomic<int> uploaded_{0}, delivered_{0}, failed_{0}, downloads_{0}, over_{0};
  std::atomic<int64_t> received_{0}, sent_{0};
  std::atomic<bool> released_{false};
  absl::Mutex mutex_;
  std::string why_;
  TransferHooks hooks_;
  CopyThreads up_{2}, down_{2};
  std::shared_ptr<RegionTransfer> kept_;  // plays the owner
};

TEST_F(RegionTransferTest, CopiesInputsAndOutputs) {
  CopiedOperation copied(/*tokens=*/30'000);  // several blocks
  const std::shared_ptr<Region> region = copied.MakeRegion();
  RegionTransfer* const transfer = Start(copied, region);
  ASSERT_TRUE(Await([&] { return uploaded_ == 1; }));
  int64_t up = 0;
  for (TensorId id : {TensorId::kQ, TensorId::kK, TensorId::kV}) {
    EXPECT_TRUE(copied.HasArrived(id, region->data())) << TensorName(id);
    up += BytesOf(copied.spec(), id);
  }
  EXPECT_EQ(transfer->received_bytes(), up);
  EXPECT_EQ(received_, up);
  EXPECT_EQ(sent_, 0);
  copied.Compute();
  ASSERT_TRUE(Await([&] { return delivered_ == 1; }));
  EXPECT_TRUE(copied.HasLeft(TensorId::kOut, region->data()));
  EXPECT_TRUE(copied.HasLeft(TensorId::kLse, region->data()));
  EXPECT_EQ(transfer->sent_bytes(), sent_);
  EXPECT_EQ(sent_, BytesOf(copied.spec(), TensorId::kOut) + BytesOf(copied.spec(), TensorId::kLse));
  EXPECT_EQ(downloads_, 1);
  // Bytes between the tensors are unchanged.
  for (TensorId id : {TensorId::kQ, TensorId::kOut, TensorId::kLse}) {
    for (int64_t i = 1; i <= CopiedOperation::kGap; ++i) {
      ASSERT_EQ(region->data()[copied.offset(id) - i], 0x5a);
    }
  }
  EXPECT_EQ(over_, 0);
  End(copied);
  EXPECT_EQ(failed_, 0);
  EXPECT_EQ(uploaded_, 1);
}

TEST_F(RegionTransferTest, RankCopiesOnlyItsShard) {
  for (const Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kStriped}) {
    over_ = uploaded_ = 0;
    CopiedOperation copied(/*tokens=*/101, /*ranks=*/2, layout);
    const std::shared_ptr<Region> region = copied.MakeRegion();
    RegionTransfer* const transfer = Start(copied, region);
    ASSERT_TRUE(Await([&] { return uploaded_ == 1; }));
    for (TensorId id : {TensorId::kQ, TensorId::kK, TensorId::kV}) {
      EXPECT_TRUE(copied.HasArrived(id, region->data()));
    }
    EXPECT_LT(transfer->received_bytes(), 2 * 3 * BytesOf(copied.spec(), TensorId::kQ) / 3);
    End(copied);
  }
}

TEST_F(RegionTransferTest, RejectsInvalidPlaces) {
  CopiedOperation copied;
  const std::shared_ptr<Region> region = copied.MakeRegion();
  EXPECT_TRUE(absl::IsCancelled(Make(copied, nullptr).status()));
  v1::TensorLocation* out = copied.reserve().mutable_places(3);
  const v1::TensorLocation right = *out;
  out->set_offset(region->bytes() - BytesOf(copied.spec(), TensorId::kOut) + 1);
  EXPECT_EQ(Make(copied, region).status(),
            absl::InvalidArgumentError("out is not within its region"));
  out->set_offset(~uint64_t{0});
  EXPECT_TRUE(absl::IsInvalidArgument(Make(copied, region).status()));
  *out = right;
  out->set_region_id("another");
  EXPECT_EQ(Make(copied, region).status(),
            absl::CancelledError("the region of out is not attached"));
  *out = right;
  out->set_tensor(v1::TENSOR_ID_DQ);
  EXPECT_EQ(Make(copied, region).status(),
            absl::InvalidArgumentError("out has no location in a region"));
  *out = right;
  EXPECT_TRUE(Make(copied, region).ok());
}

TEST_F(RegionTransferTest, ReleasedRegionFailsTransferOnce) {
  CopiedOperation copied;
  const std::shared_ptr<Region> region = copied.MakeRegion();
  CopiedOperation other;
  const std::shared_ptr<Region> stranger = other.MakeRegion();
  RegionTransfer* const transfer = Start(copied, region);
  ASSERT_TRUE(Await([&] { return uploaded_ == 1; }));
  transfer->OnRegionGone(*stranger);
  EXPECT_EQ(failed_, 0);
  region->Release();
  transfer->OnRegionGone(*region);
  transfer->OnRegionGone(*region);
  EXPECT_EQ(failed_, 1);
  EXPECT_TRUE(released_);
  EXPECT_EQ(why(), "the client released a region");
  copied.Compute();  // its results are not copied
  End(copied);
  EXPECT_EQ(delivered_, 0);
  EXPECT_EQ(sent_, 0);
  EXPECT_EQ(region->data()[copied.offset(TensorId::kOut)], 0x5a);
}

TEST_F(RegionTransferTest, DoesNotReadReleasedRegion) {
  CopiedOperation copied;
  const std::shared_ptr<Region> region = copied.MakeRegion();
  region->Release();
  Start(copied, region);
  EXPECT_TRUE(Await([&] { return failed_ == 1; }));
  EXPECT_TRUE(released_);
  EXPECT_EQ(received_, 0);
  End(copied);
}

TEST_F(RegionTransferTest, WritesNothingAfterFence) {
  CopiedOperation copied;
  const std::shared_ptr<Region> region = copied.MakeRegion();
  Start(copied, region);
  ASSERT_TRUE(Await([&] { return uploaded_ == 1; }));
  region->Fence(9);
  copied.Compute();
  ASSERT_TRUE(Await([&] { return failed_ == 1; }));
  EXPECT_TRUE(released_);
  EXPECT_THAT(why(), HasSubstr("fenced"));
  End(copied);
  EXPECT_EQ(sent_, 0);
  for (int64_t i = 0; i < BytesOf(copied.spec(), TensorId::kOut); ++i) {
    ASSERT_EQ(region->data()[copied.offset(TensorId::kOut) + i], 0x5a);
  }
}

TEST_F(RegionTransferTest, OperationEndEndsTransferSilently) {
  CopiedOperation copied;
  const std::shared_ptr<Region> region = copied.MakeRegion();
  Start(copied, region);
  const std::weak_ptr<RegionTransfer> transfer = kept_;
  End(copied);
  EXPECT_EQ(failed_, 0);
  EXPECT_EQ(delivered_, 0);
  EXPECT_TRUE(transfer.expired());
}

TEST_F(RegionTransferTest, FailsIfOperationHasShardStream) {
  class Listener final : public OperationListener {
    void OnOperationChanged() override {}
  } listener;
  CopiedOperation copied;
  ASSERT_TRUE(copied.operation()->SetListener(&listener));
  Start(copied, copied.MakeRegion());
  EXPECT_EQ(over_, 1);
  EXPECT_EQ(failed_, 1);
  EXPECT_FALSE(released_);
  EXPECT_THAT(why(), HasSubstr("shard stream"));
  copied.operation()->RemoveListener();
  kept_.reset();
}

}  // namespace
}  // namespace ringattn::worker
