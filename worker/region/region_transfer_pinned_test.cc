// Copies from and to pinned regions: made by the device itself, within pins, with the same bytes.
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "common/attention/tensors.h"
#include "common/local_memory/scoped_descriptor.h"
#include "common/schedule/schedule.h"
#include "gtest/gtest.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/region/pinning_device.h"
#include "worker/region/region_pinner.h"
#include "worker/region/region_transfer.h"

namespace ringattn::worker {
namespace {

// q and out have 41 MB, k and v 10 MB, so q crosses the end of the first pin.
AttentionSpec Spec(int64_t tokens) {
  AttentionSpec spec;
  spec.shape.seq_len_q = spec.shape.seq_len_kv = tokens;
  spec.shape.num_heads = 4;
  spec.shape.num_kv_heads = 1;
  spec.shape.head_dim = spec.shape.head_dim_v = 64;
  spec.shape.cu_seqlens_q = spec.shape.cu_seqlens_k = {0, tokens};
  return spec;
}

std::shared_ptr<Region> MakeRegion(int64_t bytes) {
  const ScopedDescriptor fd(memfd_create("region", MFD_CLOEXEC));
  EXPECT_EQ(ftruncate(fd.get(), bytes), 0);
  return *Region::Map("region", fd.get(), bytes);
}

uint8_t ByteAt(TensorId id, int64_t offset) {
  return static_cast<uint8_t>((offset * 2654435761u >> 13) + 31 * static_cast<int>(id));
}

// Expects `bytes` to equal ByteAt, starting at `first`.
void ExpectBytes(TensorId id, int64_t first, const uint8_t* bytes, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (bytes[i] == ByteAt(id, first + i)) continue;
    FAIL() << TensorName(id) << " byte " << first + i;
  }
}

class RegionTransferPinnedTest : public testing::Test {
 protected:
  // Places k, v, q, out, lse and the other tensors of `spec` one after another.
  void PlaceTensors(const AttentionSpec& spec) {
    int64_t offset = 0;
    for (TensorId id : {TensorId::kK, TensorId::kV, TensorId::kQ, TensorId::kOut, TensorId::kLse,
                        TensorId::kBias, TensorId::kMask}) {
      if (InfoOf(id).is_present != nullptr && !InfoOf(id).is_present(spec)) continue;
      v1::TensorLocation* place = reserve_.add_places();
      place->set_tensor(static_cast<v1::TensorId>(id));
      place->set_region_id("region");
      place->set_offset(offset);
      offset += BytesOf(spec, id);
    }
    region_ = MakeRegion(offset);
    for (const v1::TensorLocation& place : reserve_.places()) {
      const auto id = static_cast<TensorId>(place.tensor());
      for (int64_t i = 0; i < BytesOf(spec, id); ++i) {
        region_->data()[place.offset() + i] = ByteAt(id, i);
      }
    }
  }

  std::shared_ptr<ShardOperation> Make(const AttentionSpec& spec, Layout layout, int world,
                                       ScheduleKind schedule = ScheduleKind::kRing) {
    const ProgramRecipe recipe = {.schedule = world == 1 ? ScheduleKind::kSingle : schedule,
                                  .layout = layout};
    const ShardPlan plan = MakeShardPlan(spec, recipe, world);
    Program program = MakeProgram(spec, plan, recipe, 0);
    std::vector<int> members(world);
    for (int rank = 0; rank < world; ++rank) members[rank] = rank;
    auto operation = Operation::Create(spec, plan, std::move(program), members, &device_);
    EXPECT_TRUE(operation.ok()) << operation.status();
    return std::make_shared<ShardOperation>(
        OperationInfo{.id = "op"}, PreparedOperation{*budget_.Take(1), *std::move(operation)},
        &device_, [](const PreparedOperation&, bool) {});
  }

  // Copies rank 0's shard in, fills its outputs with known bytes, and copies them out.
  void CopyBothWays(const std::shared_ptr<ShardOperation>& operation) {
    TransferHooks hooks;
    std::atomic<bool> uploaded{false}, delivered{false}, over{false};
    hooks.on_uploaded = [&](const OperationInfo&) { uploaded = true; };
    hooks.on_delivered = [&](const OperationInfo&) { delivered = true; };
    hooks.on_failed = [&](const OperationInfo&, bool, const std::string& why) {
      ADD_FAILURE() << why;
      uploaded = delivered = true;
    };
    hooks.on_received_bytes = hooks.on_sent_bytes = [](int64_t) {};
    hooks.on_downloaded = [](absl::Duration) {};
    CopyThreads up(3), down(3);
    auto transfer = RegionTransfer::Make(
        operation, reserve_, [this](const std::string&) { return region_; }, &hooks, {&up, &down});
    ASSERT_TRUE(transfer.ok()) << transfer.status();
    (*transfer)->Start([&] { over = true; });
    while (!uploaded) absl::SleepFor(absl::Milliseconds(1));
    for (const ShardOperation::Output& output : operation->Outputs()) {
      auto* bytes = static_cast<uint8_t*>(const_cast<void*>(output.memory.data));
      for (int64_t i = 0; i < output.memory.bytes; ++i) bytes[i] = ByteAt(output.id, i + 7);
    }
    operation->SetFinished();
    (*transfer)->OnOperationChanged();
    while (!delivered) absl::SleepFor(absl::Milliseconds(1));
    operation->End(absl::CancelledError("over"));
    (*transfer)->OnOperationChanged();
    while (!over) absl::SleepFor(absl::Milliseconds(1));
  }

  const uint8_t* Place(TensorId id) const {
    for (const v1::TensorLocation& place : reserve_.places()) {
      if (place.tensor() == static_cast<v1::TensorId>(id)) return region_->data() + place.offset();
    }
    return nullptr;
  }

  void ExpectRightBytes(const AttentionSpec& spec, ShardOperation& operation) {
    const ShardPlan& plan = operation.operation().plan();
    for (TensorId id : InputsOf(spec, Direction::kForward, false)) {
      const ShardMap map(spec, plan, id);
      const auto* shard = static_cast<uint8_t*>(operation.operation().InputBuffer(id)->data());
      for (const ByteRun& run : map.FromLocal(0, 0, map.local_bytes(0))) {
        ExpectBytes(id, run.global_offset, shard + run.local_offset, run.bytes);
      }
    }
    for (TensorId id : {TensorId::kOut, TensorId::kLse}) {
      const ShardMap map(spec, plan, id);
      for (const ByteRun& run : map.FromLocal(0, 0, map.local_bytes(0))) {
        ExpectBytes(id, run.local_offset + 7, Place(id) + run.global_offset, run.bytes);
      }
    }
  }

  void PinAll() {
    RegionPinner pinner(&device_, region_->bytes(), [](int64_t) {});
    pinner.Schedule(region_);
    while (region_->pinned_bytes() < region_->bytes()) absl::SleepFor(absl::Milliseconds(1));
  }

  CpuDevice cpu_{1, int64_t{1} << 30};
  PinningDevice device_{&cpu_};
  MemoryBudget budget_{1 << 20};
  v1::Reserve reserve_;
  std::shared_ptr<Region> region_;
};

TEST_F(RegionTransferPinnedTest, StagesUnpinnedRegion) {
  const AttentionSpec spec = Spec(10'000);
  PlaceTensors(spec);
  const auto operation = Make(spec, Layout::kContiguous, 1);
  CopyBothWays(operation);
  ExpectRightBytes(spec, *operation);
  EXPECT_EQ(device_.direct_bytes_in() + device_.direct_bytes_out(), 0);
  EXPECT_GT(device_.staged_bytes_in(), 0);
}

TEST_F(RegionTransferPinnedTest, DeviceCopiesPinnedRegionWithinPins) {
  const AttentionSpec spec = Spec(50'000);
  PlaceTensors(spec);
  PinAll();
  ASSERT_GT(region_->bytes(), Region::kPinBytes);
  const auto operation = Make(spec, Layout::kContiguous, 1);
  CopyBothWays(operation);
  ExpectRightBytes(spec, *operation);
  int64_t inputs = 0, outputs = 0;
  for (TensorId id : {TensorId::kQ, TensorId::kK, TensorId::kV}) inputs += BytesOf(spec, id);
  for (TensorId id : {TensorId::kOut, TensorId::kLse}) outputs += BytesOf(spec, id);
  EXPECT_EQ(device_.direct_bytes_in(), inputs);
  EXPECT_EQ(device_.direct_bytes_out(), outputs);
  EXPECT_EQ(device_.staged_bytes_in(), 0);
}

TEST_F(RegionTransferPinnedTest, CopiesOneRanksShard) {
  const AttentionSpec spec = Spec(50'000);
  PlaceTensors(spec);
  PinAll();
  const auto operation = Make(spec, Layout::kZigzag, 2);
  CopyBothWays(operation);
  ExpectRightBytes(spec, *operation);
  EXPECT_GT(device_.direct_bytes_in(), 0);
  EXPECT_EQ(device_.staged_bytes_in(), 0);
}

TEST_F(RegionTransferPinnedTest, StagesShortRunsEvenIfPinned) {
  const AttentionSpec spec = Spec(10'000);
  PlaceTensors(spec);
  PinAll();
  const auto operation = Make(spec, Layout::kStriped, 2);
  CopyBothWays(operation);
  ExpectRightBytes(spec, *operation);
  EXPECT_EQ(device_.direct_bytes_in() + device_.direct_bytes_out(), 0);
}

// A row of a bias has one run per owner of its columns, so runs may be long or short.
TEST_F(RegionTransferPinnedTest, CopiesPairTensorsByKeys) {
  for (const int64_t tokens : {200, 900}) {
    for (const Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kStriped}) {
      SCOPED_TRACE(testing::Message() << tokens << " " << LayoutName(layout));
      AttentionSpec spec = Spec(tokens);
      spec.options.bias = BiasForm{.float32 = true};
      spec.options.mask = MaskForm{};
      reserve_.clear_places();
      PlaceTensors(spec);
      const auto operation = Make(spec, layout, 2, ScheduleKind::kPassQ);
      CopyBothWays(operation);
      ExpectRightBytes(spec, *operation);
    }
  }
}

}  // namespace
}  // namespace ringattn::worker
