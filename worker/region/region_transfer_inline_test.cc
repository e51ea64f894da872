// Copies of inline operations, which the calling thread makes.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/attention/tensors.h"
#include "gtest/gtest.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/region/pinning_device.h"
#include "worker/region/region_pinner.h"
#include "worker/region/region_transfer.h"
#include "worker/testing/copied_operation.h"

namespace ringattn::worker {
namespace {

class RegionTransferInlineTest : public testing::Test {
 protected:
  void SetUp() override {
    hooks_.on_received_bytes = [this](int64_t bytes) { received_ += bytes; };
    hooks_.on_sent_bytes = [this](int64_t bytes) { sent_ += bytes; };
    hooks_.on_downloaded = [](absl::Duration) {};
  }

  std::shared_ptr<RegionTransfer> Make(CopiedOperation& copied,
                                       const std::shared_ptr<Region>& region) {
    auto made = RegionTransfer::Make(copied.operation(), copied.reserve(),
                                     [&](const std::string&) { return region; }, &hooks_,
                                     {nullptr, nullptr});
    EXPECT_TRUE(made.ok()) << made.status();
    return *std::move(made);
  }

  // Copies in, computes, copies out, and compares the outputs in the region with those in device
  // memory.
  void CopyBothWays(CopiedOperation& copied, const std::shared_ptr<Region>& region, bool host) {
    const std::shared_ptr<RegionTransfer> transfer = Make(copied, region);
    ASSERT_TRUE(transfer->IsInline(host));
    const absl::Status status = transfer->CopyInputsInline(host);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(copied.operation()->InputsComplete());
    for (const EventRef& upload : copied.operation()->PendingUploads()) {
      EXPECT_TRUE(upload->Wait(absl::InfiniteFuture()).ok());
    }
    int64_t inputs = 0, outputs = 0;
    for (TensorId id : {TensorId::kQ, TensorId::kK, TensorId::kV}) {
      EXPECT_TRUE(copied.HasArrived(id, region->data())) << TensorName(id);
      inputs += BytesOf(copied.spec(), id);
    }
    copied.Compute();
    const absl::StatusOr<bool> written = transfer->CopyOutputsInline(host);
    ASSERT_TRUE(written.ok()) << written.status();
    EXPECT_TRUE(*written);
    for (const ShardOperation::Output& output : copied.operation()->Outputs()) {
      const uint8_t* const tensor = region->data() + copied.offset(output.id);
      EXPECT_EQ(std::memcmp(tensor, output.memory.data, output.memory.bytes), 0)
          << TensorName(output.id);
      // Nothing is written next to it.
      EXPECT_EQ(tensor[-1], 0x5a);
      EXPECT_EQ(tensor[output.memory.bytes], 0x5a);
      outputs += output.memory.bytes;
    }
    EXPECT_EQ(received_, inputs);
    EXPECT_EQ(sent_, outputs);
    region->Fence(9);  // waits for writes that have not ended
  }

  TransferHooks hooks_;
  int64_t received_ = 0, sent_ = 0;
};

TEST_F(RegionTransferInlineTest, TheCpuCopiesFromAndToHostMemory) {
  CopiedOperation copied;
  CopyBothWays(copied, copied.MakeRegion(), /*host=*/true);
}

TEST_F(RegionTransferInlineTest, TheDeviceCopiesFromAndToPinnedMemory) {
  CpuDevice cpu(1, 64 << 20);
  PinningDevice device(&cpu);
  CopiedOperation copied(40, 1, Layout::kContiguous, "region", &device);
  const std::shared_ptr<Region> region = copied.MakeRegion();
  EXPECT_FALSE(Make(copied, region)->IsInline(/*host=*/false));  // it would need staging memory
  RegionPinner pinner(&device, copied.region_bytes(), [](int64_t) {});
  pinner.Schedule(region);
  ASSERT_TRUE(Await([&] { return region->pinned_bytes() == region->bytes(); }));
  CopyBothWays(copied, region, /*host=*/false);
  EXPECT_EQ(device.direct_bytes_in(), received_);
  EXPECT_EQ(device.direct_bytes_out(), sent_);
  EXPECT_EQ(device.staged_bytes_in(), 0);
}

TEST_F(RegionTransferInlineTest, TheCpuCopiesNoLargeTensors) {
  constexpr int64_t kBytesPerToken = 4 * 2 * 8 * 4 + 8;  // q, k, v and out of 2 heads, and lse
  CopiedOperation small((4 << 20) / kBytesPerToken), large((4 << 20) / kBytesPerToken + 1);
  EXPECT_TRUE(Make(small, small.MakeRegion())->IsInline(/*host=*/true));
  EXPECT_FALSE(Make(large, large.MakeRegion())->IsInline(/*host=*/true));
}

TEST_F(RegionTransferInlineTest, ManySeparateRunsAreNotInline) {
  CopiedOperation striped(40, 2, Layout::kStriped);
  EXPECT_FALSE(Make(striped, striped.MakeRegion())->IsInline(/*host=*/true));
}

TEST_F(RegionTransferInlineTest, AReleasedRegionIsNeitherReadNorWritten) {
  CopiedOperation copied;
  const std::shared_ptr<Region> region = copied.MakeRegion();
  const std::shared_ptr<RegionTransfer> transfer = Make(copied, region);
  ASSERT_TRUE(transfer->CopyInputsInline(/*host=*/true).ok());
  copied.Compute();
  region->Release();
  const absl::StatusOr<bool> written = transfer->CopyOutputsInline(/*host=*/true);
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_FALSE(*written);
  EXPECT_EQ(region->data()[copied.offset(TensorId::kOut)], 0x5a);
  EXPECT_EQ(sent_, 0);

  CopiedOperation another;
  const absl::Status status = Make(another, region)->CopyInputsInline(/*host=*/true);
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
}

TEST_F(RegionTransferInlineTest, NothingIsWrittenAfterAFence) {
  CopiedOperation copied;
  const std::shared_ptr<Region> region = copied.MakeRegion();
  const std::shared_ptr<RegionTransfer> transfer = Make(copied, region);
  ASSERT_TRUE(transfer->CopyInputsInline(/*host=*/true).ok());
  copied.Compute();
  region->Fence(9);
  const absl::StatusOr<bool> written = transfer->CopyOutputsInline(/*host=*/true);
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_FALSE(*written);
  EXPECT_EQ(region->data()[copied.offset(TensorId::kOut)], 0x5a);
}

}  // namespace
}  // namespace ringattn::worker
