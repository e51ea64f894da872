#include "worker/service/reservations.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/many_documents.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/device/device_wrapper.h"
#include "worker/testing/scalar_device.h"

namespace ringattn::worker {
namespace {

using testing::ElementsAre;

constexpr int kLong = 2 * kManyDocuments;

// Blocks the binding of calls with many documents or of dilated parts until the test releases it.
class HeldDevice : public DeviceWrapper {
 public:
  using DeviceWrapper::DeviceWrapper;

  absl::StatusOr<int64_t> WorkspaceBytes(const std::vector<KernelCall>& calls) const override {
    const auto* forward = std::get_if<ForwardCall>(&calls.front());
    if (forward == nullptr || forward->problem->bands.size() > 1) {
      absl::MutexLock lock(&mutex_);
      ++bound_;
      mutex_.AwaitWithTimeout(absl::Condition(&let_go_), absl::Seconds(20));
    }
    return DeviceWrapper::WorkspaceBytes(calls);
  }
  void Unblock() {
    absl::MutexLock lock(&mutex_);
    let_go_ = true;
  }
  void AwaitBinding() const {
    absl::MutexLock lock(&mutex_);
    const auto begun = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return bound_ > 0; };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&begun), absl::Seconds(20)));
  }
  int bound() const {
    absl::MutexLock lock(&mutex_);
    return bound_;
  }

 private:
  mutable absl::Mutex mutex_;
  mutable int bound_ ABSL_GUARDED_BY(mutex_) = 0;
  bool let_go_ ABSL_GUARDED_BY(mutex_) = false;
};

std::shared_ptr<v1::Reserve> ReserveOf(const std::string& id, int documents) {
  auto reserve = std::make_shared<v1::Reserve>();
  reserve->set_operation_id(id);
  reserve->set_generation(1);
  reserve->add_members(0);
  v1::AttentionShape* shape = reserve->mutable_shape();
  shape->set_batch(1);
  shape->set_seq_len_q(documents);
  shape->set_seq_len_kv(documents);
  shape->set_num_heads(1);
  shape->set_num_kv_heads(1);
  shape->set_head_dim(1);
  shape->set_head_dim_v(1);
  for (int i = 0; i <= documents; ++i) {
    shape->mutable_packed()->add_cu_seqlens_q(i);
    shape->mutable_packed()->add_cu_seqlens_k(i);
  }
  reserve->set_dtype(v1::DATA_TYPE_FLOAT32);
  reserve->set_layout(v1::LAYOUT_CONTIGUOUS);
  reserve->set_schedule(v1::SCHEDULE_SINGLE);
  return reserve;
}

// One document that a dilated level divides into `segments` segments of four tokens.
std::shared_ptr<v1::Reserve> DilatedReserveOf(const std::string& id, int segments) {
  auto reserve = std::make_shared<v1::Reserve>(*ReserveOf(id, 1));
  v1::AttentionShape* shape = reserve->mutable_shape();
  shape->clear_packed();
  shape->set_seq_len_q(4 * segments);
  shape->set_seq_len_kv(4 * segments);
  v1::DilationLevel* level = reserve->mutable_options()->add_dilation_levels();
  level->set_segment_length(4);
  level->set_dilation_rate(1);
  return reserve;
}

std::shared_ptr<v1::Reserve> PrepareOnly(std::shared_ptr<v1::Reserve> reserve) {
  reserve->mutable_prepare_only()->mutable_ttl()->set_seconds(60);
  return reserve;
}

class ReservationsTest : public testing::Test {
 protected:
  ~ReservationsTest() override {
    device_.Unblock();
    Drain();
    registry_.EndAll("the test ends");
  }

  void OnControl(std::function<void()> work) {
    (void)Post(std::move(work))->Wait(absl::InfiniteFuture());
  }
  void Reserve(const std::string& id, int documents) { Reserve(ReserveOf(id, documents)); }
  void Reserve(std::shared_ptr<v1::Reserve> reserve) {
    OnControl([&] { reservations_.Reserve(std::move(reserve), {0, 1}); });
  }
  void Release(const std::string& id) {
    OnControl([&] { reservations_.Release(id, 1); });
  }
  // Waits until all pending reservations have been decoded and reported.
  void Drain() {
    auto decoded =
        background_.Start([] { return absl::OkStatus(); }, {}, HostQueue::OnFailure::kRun);
    (void)decoded->Wait(absl::InfiniteFuture());
    OnControl([] {});
  }
  std::vector<std::string> events() {
    absl::MutexLock lock(&mutex_);
    return said_;
  }

  ScalarDevice scalar_;
  HeldDevice device_{&scalar_};
  MemoryBudget budget_{int64_t{1} << 30};
  KeptOperations kept_{
      {.max_count = 4, .max_bytes = int64_t{1} << 28, .lease = absl::Seconds(100)}};
  OperationRegistry registry_{&device_, &budget_,
                              [this](const OperationInfo& info) { Record("released " + info.id); },
                              &kept_};
  ResidualStore residuals_;
  HostQueue control_{"control"};
  HostQueue background_{"background"};
  Reservations reservations_{
      &device_,
      &registry_,
      &residuals_,
      &kept_,
      &background_,
      [this](std::function<void()> work) { Post(std::move(work)); },
      [this](const v1::Reserve& reserve, absl::StatusOr<std::shared_ptr<ShardOperation>> operation,
             int64_t) {
        Record(absl::StrCat(operation.ok() ? "reserved " : "refused ", reserve.operation_id()));
      },
      [this](const v1::Reserve& reserve, const absl::StatusOr<Reservations::Preparation>& made,
             int64_t) {
        const char* const what =
            !made.ok()    ? absl::IsFailedPrecondition(made.status()) ? "not kept " : "refused "
            : made->found ? "found "
                          : "prepared ";
        Record(absl::StrCat(what, reserve.operation_id()));
        if (made.ok()) bytes_ = made->bytes;
      }};
  int64_t bytes_ = 0;  // of the last preparation

 private:
  EventRef Post(std::function<void()> work) {
    return control_.Start(
        [work = std::move(work)] {
          work();
          return absl::OkStatus();
        },
        {}, HostQueue::OnFailure::kRun);
  }
  void Record(std::string what) {
    absl::MutexLock lock(&mutex_);
    said_.push_back(std::move(what));
  }

  absl::Mutex mutex_;
  std::vector<std::string> said_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(ReservationsTest, ShortRequestDoesNotWaitForLongOnes) {
  Reserve("long", kLong);
  Reserve("longer", 2 * kLong);
  device_.AwaitBinding();
  Reserve("short", 1);
  EXPECT_THAT(events(), ElementsAre("reserved short"));
  device_.Unblock();
  Drain();
  EXPECT_THAT(events(), ElementsAre("reserved short", "reserved long", "reserved longer"));
  EXPECT_NE(registry_.Find("long", 1), nullptr);
}

TEST_F(ReservationsTest, ShortRequestDoesNotWaitForManyDilatedSegments) {
  Reserve(DilatedReserveOf("long", kLong));
  device_.AwaitBinding();
  Reserve(DilatedReserveOf("short", 1));
  EXPECT_THAT(events(), ElementsAre("reserved short"));
  device_.Unblock();
  Drain();
  EXPECT_THAT(events(), ElementsAre("reserved short", "reserved long"));
}

// One segment for each of 64 heads, but 64 programs.
TEST_F(ReservationsTest, ShortRequestDoesNotWaitForManyDilatedParts) {
  auto reserve = std::make_shared<v1::Reserve>(*DilatedReserveOf("long", 64));
  reserve->mutable_shape()->set_num_heads(64);
  reserve->mutable_shape()->set_num_kv_heads(64);
  v1::DilationLevel* level = reserve->mutable_options()->mutable_dilation_levels(0);
  level->set_segment_length(256);
  level->set_dilation_rate(64);
  Reserve(std::move(reserve));
  device_.AwaitBinding();
  Reserve(DilatedReserveOf("short", 1));
  EXPECT_THAT(events(), ElementsAre("reserved short"));
  device_.Unblock();
  Drain();
  EXPECT_THAT(events(), ElementsAre("reserved short", "reserved long"));
}

// No memory was reserved for it, and a reservation that has not been started is not decoded. The
// coordinator drops workers that do not answer Release in time.
TEST_F(ReservationsTest, ReleaseDoesNotWaitForTheDecoder) {
  Reserve("begun", kLong);
  device_.AwaitBinding();
  Reserve("waiting", kLong);
  Release("begun");
  Release("waiting");
  EXPECT_THAT(events(), ElementsAre("released begun", "released waiting"));
  device_.Unblock();
  Drain();
  EXPECT_THAT(events(), ElementsAre("released begun", "released waiting"));
  EXPECT_EQ(device_.bound(), 1);
  EXPECT_EQ(budget_.taken_bytes(), 0);
  EXPECT_EQ(registry_.Find("begun", 1), nullptr);
}

TEST_F(ReservationsTest, ForgetAllDropsPendingReservations) {
  Reserve("old", kLong);
  device_.AwaitBinding();
  OnControl([&] { reservations_.ForgetAll(); });
  Reserve("old", 1);  // in the next ring, under the same id
  device_.Unblock();
  Drain();
  EXPECT_THAT(events(), ElementsAre("reserved old"));
}

TEST_F(ReservationsTest, RejectsIdThatIsBeingDecoded) {
  Reserve("same", kLong);
  Reserve("same", 1);
  EXPECT_THAT(events(), ElementsAre("refused same"));
  device_.Unblock();
  Drain();
  EXPECT_THAT(events(), ElementsAre("refused same", "reserved same"));
  Reserve("same", 1);
  EXPECT_THAT(events(), ElementsAre("refused same", "reserved same", "refused same"));
}

TEST_F(ReservationsTest, PreparesForTheNextRequest) {
  Reserve(PrepareOnly(ReserveOf("first", 1)));
  EXPECT_EQ(kept_.stats().count, 1);
  EXPECT_EQ(kept_.stats().holds, 1);
  EXPECT_EQ(kept_.stats().bytes, bytes_);
  EXPECT_EQ(budget_.taken_bytes(), bytes_);
  EXPECT_EQ(registry_.Find("first", 1), nullptr);
  const int bound = device_.bound();
  Reserve("run", 1);
  EXPECT_EQ(kept_.stats().counts.hits, 1);
  EXPECT_EQ(kept_.stats().counts.misses, 0);
  EXPECT_EQ(device_.bound(), bound);
  EXPECT_THAT(events(), ElementsAre("prepared first", "reserved run"));
}

// A second operation would take memory without need.
TEST_F(ReservationsTest, PreparesNothingThatIsKeptOrInUse) {
  Reserve(PrepareOnly(ReserveOf("first", 1)));
  const int64_t bytes = bytes_;
  Reserve(PrepareOnly(ReserveOf("again", 1)));
  Reserve("run", 1);
  Reserve(PrepareOnly(ReserveOf("meanwhile", 1)));
  EXPECT_EQ(bytes_, bytes);
  EXPECT_EQ(budget_.taken_bytes(), bytes);
  EXPECT_THAT(events(),
              ElementsAre("prepared first", "found again", "reserved run", "found meanwhile"));
}

TEST_F(ReservationsTest, PreparationsWithManyDocumentsDelayNobody) {
  Reserve(PrepareOnly(ReserveOf("long", kLong)));
  device_.AwaitBinding();
  Reserve("short", 1);
  Reserve(PrepareOnly(ReserveOf("cancelled", 2 * kLong)));
  Release("cancelled");
  device_.Unblock();
  Drain();
  EXPECT_THAT(events(), ElementsAre("reserved short", "released cancelled", "prepared long"));
  EXPECT_EQ(kept_.stats().count, 1);
}

TEST_F(ReservationsTest, RefusesPreparationsThatMayNotBeKept) {
  auto large = ReserveOf("large", 1);
  large->mutable_shape()->clear_packed();
  large->mutable_shape()->set_seq_len_q(1 << 25);  // 128 MiB for each of q and out
  large->mutable_shape()->set_seq_len_kv(1);
  Reserve(PrepareOnly(std::move(large)));
  auto retains = ReserveOf("retains", 1);
  retains->set_retain(true);
  Reserve(PrepareOnly(std::move(retains)));
  EXPECT_THAT(events(), ElementsAre("not kept large", "refused retains"));
  EXPECT_EQ(kept_.stats().holds, 0);
  EXPECT_EQ(budget_.taken_bytes(), 0);
}

}  // namespace
}  // namespace ringattn::worker
