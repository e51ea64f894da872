// For tests: a forward operation on one rank of a ring whose tensors lie in a region, the region,
// and the coordinator's messages about both.
#ifndef RINGATTN_WORKER_TESTING_COPIED_OPERATION_H_
#define RINGATTN_WORKER_TESTING_COPIED_OPERATION_H_

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "common/local_memory/scoped_descriptor.h"
#include "common/schedule/schedule.h"
#include "gtest/gtest.h"
#include "ringattn/v1/worker_control.pb.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/executor/executor.h"
#include "worker/operation/shard_operation.h"
#include "worker/region/region.h"

namespace ringattn::worker {

template <typename Predicate>
bool Await(const Predicate& predicate) {
  for (int i = 0; i < 2000 && !predicate(); ++i) absl::SleepFor(absl::Milliseconds(5));
  return predicate();
}

class CopiedOperation {
 public:
  static constexpr int64_t kGap = 192;  // before and between tensors, filled with a pattern

  // `ranks`: 1, or 2 for the second rank of a ring, which is not computed. `device`: replaces the
  // operation's own CPU device; must outlive this object.
  explicit CopiedOperation(int64_t tokens = 40, int ranks = 1, Layout layout = Layout::kContiguous,
                           const std::string& region_id = "region", Device* device = nullptr)
      : rank_(ranks - 1), device_(device != nullptr ? device : &cpu_) {
    spec_.shape.seq_len_q = spec_.shape.seq_len_kv = tokens;
    spec_.shape.num_heads = spec_.shape.num_kv_heads = 2;
    spec_.shape.head_dim = spec_.shape.head_dim_v = 8;
    spec_.shape.cu_seqlens_q = spec_.shape.cu_seqlens_k = {0, tokens};
    spec_.options.softmax_scale = 0.35;
    spec_.options.causal = true;
    const ShardPlan plan = MakeShardPlan(spec_, layout, ranks);
    Program program =
        MakeProgram(spec_, plan,
                    RecipeOn(plan, ranks == 1 ? ScheduleKind::kSingle : ScheduleKind::kRing,
                             Direction::kForward),
                    rank_);
    std::vector<int> members;
    for (int i = 0; i < ranks; ++i) members.push_back(i);
    auto made = Operation::Create(spec_, plan, std::move(program), members, device_);
    EXPECT_TRUE(made.ok()) << made.status();
    auto reservation = budget_.Take((*made)->buffer_bytes());
    EXPECT_TRUE(reservation.ok());
    operation_ = std::make_shared<ShardOperation>(
        OperationInfo{.id = "7-1", .generation = 7, .request_id = "request"},
        PreparedOperation{*std::move(reservation), *std::move(made)}, device_,
        [this](const PreparedOperation&, bool) { destroyed_ = true; });
    Place(region_id);
  }

  const AttentionSpec& spec() const { return spec_; }
  int rank() const { return rank_; }
  const std::shared_ptr<ShardOperation>& operation() { return operation_; }
  v1::Reserve& reserve() { return reserve_; }
  int64_t region_bytes() const { return region_bytes_; }
  int64_t offset(TensorId id) const { return offsets_.at(id); }
  bool destroyed() const { return destroyed_; }
  void Drop() { operation_.reset(); }

  // Makes a memfd for the region, sealed like a client's.
  ScopedDescriptor MakeMemfd() const {
    ScopedDescriptor fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(ftruncate(fd.get(), region_bytes_), 0);
    EXPECT_EQ(fallocate(fd.get(), 0, 0, region_bytes_), 0);
    EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL), 0);
    return fd;
  }
  std::shared_ptr<Region> MakeRegion() const {
    auto region = Region::Map("region", MakeMemfd().get(), region_bytes_);
    EXPECT_TRUE(region.ok()) << region.status();
    Fill((*region)->data());
    return *region;
  }
  // Fills the region with the pattern, and q, k and v with a value that depends on the position.
  void Fill(uint8_t* region) const {
    std::memset(region, 0x5a, region_bytes_);
    for (TensorId id : {TensorId::kQ, TensorId::kK, TensorId::kV}) {
      auto* values = reinterpret_cast<float*>(region + offsets_.at(id));
      for (int64_t i = 0; i < BytesOf(spec_, id) / 4; ++i) {
        values[i] = static_cast<float>((i * 7 + static_cast<int>(id)) % 97) / 97.0f - 0.5f;
      }
    }
  }

  // Returns whether this rank's shard of an input has arrived correctly.
  bool HasArrived(TensorId id, const uint8_t* region) {
    const ShardMap map(spec_, operation_->operation().plan(), id);
    const auto* buffer =
        static_cast<const uint8_t*>(operation_->operation().InputBuffer(id)->data());
    for (const ByteRun& run : map.FromLocal(rank_, 0, map.local_bytes(rank_))) {
      const uint8_t* whole = region + offsets_.at(id) + run.global_offset;
      if (std::memcmp(buffer, whole, run.bytes) != 0) return false;
      buffer += run.bytes;
    }
    return true;
  }
  // Runs the operation. REQUIRES: one rank, and complete inputs.
  void Compute() {
    const auto report = Execute(operation_->operation(), *device_, nullptr, {}, nullptr);
    ASSERT_TRUE(report.ok()) << report.status();
    operation_->SetFinished();
  }
  bool HasLeft(TensorId id, const uint8_t* region) {
    const DeviceBuffer* memory = operation_->operation().OutputBuffer(id);
    return std::memcmp(const_cast<DeviceBuffer*>(memory)->data(), region + offsets_.at(id),
                       BytesOf(spec_, id)) == 0;
  }

 private:
  void Place(const std::string& region_id) {
    int64_t end = 0;
    for (TensorId id : {TensorId::kQ, TensorId::kK, TensorId::kV, TensorId::kOut, TensorId::kLse}) {
      offsets_[id] = end + kGap;
      end = offsets_[id] + BytesOf(spec_, id);
      v1::TensorLocation* place = reserve_.add_places();
      place->set_tensor(static_cast<v1::TensorId>(id));
      place->set_region_id(region_id);
      place->set_offset(offsets_[id]);
      place->set_fence_number(9);
    }
    region_bytes_ = (end + kGap + 4095) / 4096 * 4096;
  }

  const int rank_;
  AttentionSpec spec_;
  CpuDevice cpu_{1, 64 << 20};
  Device* const device_;
  MemoryBudget budget_{64 << 20};
  std::atomic<bool> destroyed_{false};
  std::shared_ptr<ShardOperation> operation_;
  v1::Reserve reserve_;
  std::map<TensorId, int64_t> offsets_;
  int64_t region_bytes_ = 0;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_TESTING_COPIED_OPERATION_H_
