#include "worker/measurement/ring_measurement.h"
#include "worker/comm/communicator_wrapper.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/inproc/inproc_communicator.h"
#include "worker/device/host_event.h"
#include "worker/testing/scalar_device.h"

namespace ringattn::worker {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

// An event that reports a given duration.
class TimedEvent : public Event {
 public:
  TimedEvent(EventRef inner, absl::Duration duration)
      : inner_(std::move(inner)), duration_(duration) {}
  bool Done() const override { return inner_->Done(); }
  absl::Status Wait(absl::Time deadline) const override { return inner_->Wait(deadline); }
  absl::Time begin_time() const override { return absl::UnixEpoch(); }
  absl::Time end_time() const override { return absl::UnixEpoch() + duration_; }

 private:
  const EventRef inner_;
  const absl::Duration duration_;
};

// Performs real transfers, but reports that a group took 100 us plus its bytes at a given rate. The
// first group takes a second, like one that opens connections.
class TimedRing : public CommunicatorWrapper {
 public:
  TimedRing(std::unique_ptr<Communicator> inner, double bytes_per_second)
      : CommunicatorWrapper(std::move(inner)), bytes_per_second_(bytes_per_second) {}
  EventRef StartInLane(Lane lane, std::vector<PeerTransfer> group, std::vector<EventRef> after,
                       RunControl* control) override {
    int64_t bytes = 0;
    double rate = bytes_per_second_;
    for (const PeerTransfer& transfer : group) {
      if (!hosts.empty() && hosts[transfer.peer] != hosts[rank()]) rate = host_bytes_per_second;
      if (transfer.kind == PeerTransfer::Kind::kSend) bytes += transfer.bytes;
    }
    ++groups;
    sent_bytes += bytes;
    const absl::Duration duration =
        groups == 2 ? absl::Seconds(1) : absl::Microseconds(100) + absl::Seconds(bytes / rate);
    return std::make_shared<TimedEvent>(
        CommunicatorWrapper::StartInLane(lane, std::move(group), std::move(after), control),
        duration);
  }

  int groups = 0;
  int64_t sent_bytes = 0;
  // By rank; groups with a peer on another host take this rate.
  std::vector<int> hosts;
  double host_bytes_per_second = 0;

 private:
  const double bytes_per_second_;
};

// Limits the size of a single allocation.
class SmallDevice : public ScalarDevice {
 public:
  explicit SmallDevice(int64_t most) : most_(most) {}
  absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes) override {
    if (bytes > most_) return absl::ResourceExhaustedError("small");
    return ScalarDevice::Allocate(bytes);
  }

 private:
  const int64_t most_;
};

// Limits the total of all allocations.
class NarrowDevice : public ScalarDevice {
 public:
  explicit NarrowDevice(int64_t room) : room_(room) {}
  absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes) override {
    if (bytes > room_) return absl::ResourceExhaustedError("narrow");
    auto buffer = ScalarDevice::Allocate(bytes);
    if (!buffer.ok()) return buffer.status();
    return std::make_unique<Counted>(*std::move(buffer), &room_);
  }

 private:
  class Counted : public DeviceBuffer {
   public:
    Counted(std::unique_ptr<DeviceBuffer> inner, int64_t* room)
        : inner_(std::move(inner)), room_(room) {
      *room_ -= inner_->bytes();
    }
    ~Counted() override { *room_ += inner_->bytes(); }
    void* data() override { return inner_->data(); }
    int64_t bytes() const override { return inner_->bytes(); }

   private:
    const std::unique_ptr<DeviceBuffer> inner_;
    int64_t* const room_;
  };

  int64_t room_;
};

using Results = std::vector<absl::StatusOr<RingRates>>;

// Returns the results by rank. A rank with a null device does not take part. Most cases use no
// budget, because they check figures and must pass on busy machines.
Results MeasureAll(const std::vector<Communicator*>& ring, const std::vector<Device*>& devices,
                   int64_t max_block_bytes, absl::Time deadline,
                   absl::Duration budget = absl::InfiniteDuration(),
                   const std::vector<int>& hosts = {}) {
  Results results(ring.size(), absl::UnknownError("took no part"));
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < ring.size(); ++rank) {
    if (devices[rank] == nullptr) continue;
    threads.emplace_back([&, rank] {
      results[rank] =
          MeasureRing(*ring[rank], *devices[rank], max_block_bytes, deadline, budget, hosts);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

std::vector<Communicator*> Borrow(const std::vector<std::unique_ptr<Communicator>>& ring) {
  std::vector<Communicator*> borrowed;
  for (const auto& communicator : ring) borrowed.push_back(communicator.get());
  return borrowed;
}

TEST(RingMeasurement, MeasuresRateAndOverheadOfEveryLink) {
  // The last rank's link is slower: all members use the short blocks that it needs.
  const double rates[] = {4e9, 3e9, 5e8};
  std::vector<std::unique_ptr<TimedRing>> ring;
  std::vector<Communicator*> borrowed;
  ScalarDevice device;
  auto inner = MakeInProcessRing(3);
  for (int rank = 0; rank < 3; ++rank) {
    ring.push_back(std::make_unique<TimedRing>(std::move(inner[rank]), rates[rank]));
    borrowed.push_back(ring.back().get());
  }
  const Results results =
      MeasureAll(borrowed, {&device, &device, &device}, kMaxMeasuredBytes, Soon());
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(results[rank].ok()) << results[rank].status();
    // The subtracted overhead is that of a small group, which includes 256 bytes.
    EXPECT_NEAR(results[rank]->link_bytes_per_second, rates[rank], rates[rank] / 100);
    EXPECT_NEAR(absl::ToDoubleMicroseconds(results[rank]->exchange_overhead), 100, 1);
    EXPECT_LT(ring[rank]->groups, 24);
    // Blocks of 0.5 MiB take 1.15 ms.
    EXPECT_LT(ring[rank]->sent_bytes, 5 * kMiB);
    EXPECT_GT(ring[rank]->sent_bytes, 3 * kMiB);
  }
}

TEST(RingMeasurement, MeasuresLinksInsideAndBetweenHosts) {
  // The single member of the last host has no peer inside it.
  const std::vector<int> hosts = {0, 0, 0, 1, 1, 2};
  const int world_size = static_cast<int>(hosts.size());
  std::vector<std::unique_ptr<TimedRing>> ring;
  std::vector<Communicator*> borrowed;
  ScalarDevice device;
  for (auto& inner : MakeInProcessRing(world_size)) {
    ring.push_back(std::make_unique<TimedRing>(std::move(inner), 4e9));
    ring.back()->hosts = hosts;
    ring.back()->host_bytes_per_second = 1e8;
    borrowed.push_back(ring.back().get());
  }
  const Results results = MeasureAll(borrowed, std::vector<Device*>(world_size, &device),
                                     kMaxMeasuredBytes, Soon(), absl::InfiniteDuration(), hosts);
  for (int rank = 0; rank < world_size; ++rank) {
    ASSERT_TRUE(results[rank].ok()) << results[rank].status();
    const RingRates& rates = *results[rank];
    EXPECT_NEAR(rates.link_bytes_per_second, hosts[rank] == 2 ? 0 : 4e9, 4e7) << rank;
    EXPECT_EQ(rates.host_total_bytes_per_second, 0);  // the hosts have different numbers of members
    // Both neighbours of rank 1 are on its host.
    EXPECT_NEAR(rates.host_link_bytes_per_second, rank == 1 ? 0 : 1e8, 1e6) << rank;
    EXPECT_NEAR(absl::ToDoubleMicroseconds(rates.host_exchange_overhead), rank == 1 ? 0 : 100, 5)
        << rank;
  }
}

// A host has the rate of its slowest member times their number, on every member.
TEST(RingMeasurement, MeasuresAllMembersOfHostsTogether) {
  for (int host_count : {2, 3}) {
    std::vector<int> hosts;
    for (int rank = 0; rank < 2 * host_count; ++rank) hosts.push_back(rank / 2);
    std::vector<std::unique_ptr<TimedRing>> ring;
    std::vector<Communicator*> borrowed;
    ScalarDevice device;
    for (auto& inner : MakeInProcessRing(2 * host_count)) {
      ring.push_back(std::make_unique<TimedRing>(std::move(inner), 4e9));
      ring.back()->hosts = hosts;
      // Rank 2 is slower.
      ring.back()->host_bytes_per_second = ring.size() == 3 ? 0.5e8 : 1e8;
      borrowed.push_back(ring.back().get());
    }
    for (const auto& rates :
         MeasureAll(borrowed, std::vector<Device*>(hosts.size(), &device), kMaxMeasuredBytes,
                    Soon(), absl::InfiniteDuration(), hosts)) {
      ASSERT_TRUE(rates.ok()) << rates.status();
      EXPECT_NEAR(rates->host_total_bytes_per_second, 2 * 0.5e8, 2e6);
    }
  }
}

TEST(RingMeasurement, HostsOfOneMemberHaveNoLinkInside) {
  ScalarDevice device;
  auto ring = MakeInProcessRing(2);
  for (const auto& rates :
       MeasureAll(Borrow(ring), {&device, &device}, kMiB, Soon(), kMeasurementBudget, {0, 1})) {
    ASSERT_TRUE(rates.ok()) << rates.status();
    EXPECT_EQ(rates->link_bytes_per_second, 0);
    EXPECT_GT(rates->host_link_bytes_per_second, 1e5);
    EXPECT_EQ(rates->host_total_bytes_per_second, 0);
  }
}

// At NVLink's rate, 0.25 MiB would be almost only overhead.
TEST(RingMeasurement, BlocksGrowUntilTheyOutweighTheOverhead) {
  std::vector<std::unique_ptr<TimedRing>> ring;
  std::vector<Communicator*> borrowed;
  ScalarDevice device;
  for (auto& inner : MakeInProcessRing(2)) {
    ring.push_back(std::make_unique<TimedRing>(std::move(inner), 1.5e11));
    borrowed.push_back(ring.back().get());
  }
  for (const auto& rates : MeasureAll(borrowed, {&device, &device}, kMaxMeasuredBytes, Soon())) {
    ASSERT_TRUE(rates.ok()) << rates.status();
    EXPECT_NEAR(rates->link_bytes_per_second, 1.5e11, 1.5e9);
  }
  EXPECT_LT(ring[0]->groups, 24);
}

TEST(RingMeasurement, MeasuresRealTransfers) {
  for (int world_size : {2, 5}) {
    ScalarDevice device;
    auto ring = MakeInProcessRing(world_size);
    for (const auto& rates : MeasureAll(Borrow(ring), std::vector<Device*>(world_size, &device),
                                        kMiB, Soon(), kMeasurementBudget)) {
      ASSERT_TRUE(rates.ok()) << rates.status();
      EXPECT_GT(rates->link_bytes_per_second, 1e5);
      EXPECT_LT(rates->link_bytes_per_second, 1e15);
      EXPECT_LT(rates->exchange_overhead, absl::Seconds(10));
    }
  }
}

TEST(RingMeasurement, RingOfOneStartsNoGroup) {
  TimedRing ring(std::move(MakeInProcessRing(1)[0]), 1e9);
  SmallDevice device(0);
  const auto rates = MeasureRing(ring, device, kMiB, absl::InfinitePast());
  ASSERT_TRUE(rates.ok()) << rates.status();
  EXPECT_EQ(rates->link_bytes_per_second, 0);
  EXPECT_EQ(ring.groups, 0);
}

// The others shorten their blocks to what the member with the least memory can hold.
TEST(RingMeasurement, UsesBlocksThatTheSmallestMemberCanHold) {
  for (int64_t most : {int64_t{100}, 10 * int64_t{1024}, 100 * int64_t{1024}}) {
    SmallDevice poor(most);
    ScalarDevice rich;
    auto ring = MakeInProcessRing(3);
    for (const auto& rates : MeasureAll(Borrow(ring), {&rich, &poor, &rich}, kMiB, Soon())) {
      ASSERT_TRUE(rates.ok()) << rates.status();
      EXPECT_EQ(rates->link_bytes_per_second > 0, most >= 100 * 1024) << most;
    }
  }
}

// There is room for one block of the requested length or for two of half that length, which
// suffice.
TEST(RingMeasurement, HalvesBlocksUntilTwoFit) {
  NarrowDevice narrow(150 << 10);
  ScalarDevice rich;
  auto ring = MakeInProcessRing(2);
  for (const auto& rates : MeasureAll(Borrow(ring), {&narrow, &rich}, 128 << 10, Soon())) {
    ASSERT_TRUE(rates.ok()) << rates.status();
    EXPECT_GT(rates->link_bytes_per_second, 0);
  }
}

TEST(RingMeasurement, MissingMemberFailsAtTheDeadline) {
  ScalarDevice device;
  auto ring = MakeInProcessRing(3);
  const absl::Time begin = absl::Now();
  const Results results =
      MeasureAll(Borrow(ring), {&device, nullptr, &device}, kMiB, begin + absl::Milliseconds(200));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  for (int rank : {0, 2}) {
    EXPECT_EQ(results[rank].status().code(), absl::StatusCode::kUnavailable)
        << results[rank].status();
  }
}

TEST(RingMeasurement, AbortEndsMeasurementAtOnce) {
  ScalarDevice device;
  auto ring = MakeInProcessRing(2);
  std::thread aborter([&] { ring[0]->Abort("a peer is gone"); });
  const auto rates = MeasureRing(*ring[0], device, kMiB, absl::Now() + absl::Hours(1));
  aborter.join();
  EXPECT_EQ(rates.status().code(), absl::StatusCode::kUnavailable);
}

TEST(RingMeasurement, BlockLengthFitsTargetTime) {
  const auto ms = [](double value) { return absl::Milliseconds(value); };
  EXPECT_EQ(BlockBytesAfterProbe(kMiB, ms(0.5), 8 * kMiB), 3 * kMiB);
  EXPECT_EQ(BlockBytesAfterProbe(kMiB, ms(100), 8 * kMiB), kMiB);  // never shorter
  EXPECT_EQ(BlockBytesAfterProbe(kMiB, ms(0), 8 * kMiB), 8 * kMiB);
  EXPECT_EQ(BlockBytesAfterProbe(kMiB, ms(0.001), kMiB), kMiB);
}

TEST(RingMeasurement, RateExcludesOverhead) {
  EXPECT_DOUBLE_EQ(LinkBytesPerSecond(1000, absl::Seconds(3), absl::Seconds(1)), 500);
  // Unless the overhead dominates.
  EXPECT_DOUBLE_EQ(LinkBytesPerSecond(1000, absl::Seconds(2), absl::Seconds(1)), 500);
  EXPECT_GT(LinkBytesPerSecond(1000, absl::ZeroDuration(), absl::ZeroDuration()), 0);
}

}  // namespace
}  // namespace ringattn::worker
