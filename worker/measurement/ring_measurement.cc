#include "worker/measurement/ring_measurement.h"

#include <algorithm>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"
#include "common/plan/host_rings.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;

// The best of each counts: the first groups warm up threads and connections.
constexpr int kSmallGroups = 4;
constexpr int kProbes = 2;
constexpr int kMaxBlocks = 5;
// More than a cache line, less than a packet.
constexpr int64_t kSmallBytes = 256;
// About 100 us over TCP. Longer probes are disturbed by wake-ups and time slices on busy cores.
constexpr int64_t kProbeBytes = int64_t{256} << 10;
constexpr int64_t kMinProbeBytes = int64_t{64} << 10;
// Ten round trips of half a millisecond between hosts.
constexpr absl::Duration kHostBlockTime = absl::Milliseconds(5);

// The measurement on one member. Not thread safe.
class RingMeasurement {
 public:
  RingMeasurement(Communicator& ring, Device& device, absl::Time deadline, absl::Duration budget)
      : ring_(ring), device_(device), deadline_(deadline), budget_(budget) {}

  absl::StatusOr<RingRates> Run(int64_t max_block_bytes, const std::vector<int>& hosts) {
    absl::Status status = Allocate((ring_.world_size() + 1) * sizeof(Agreed), &numbers_);
    if (!status.ok()) return status;
    absl::StatusOr<Agreed> agreed = SmallestOfAll({AllocateBlocks(max_block_bytes), 0});
    if (!agreed.ok()) return agreed.status();
    const int64_t capacity = agreed->bytes;

    RingRates rates;
    const Neighbours inside = NeighboursOnHost(hosts, ring_.rank(), ring_.world_size());
    if (HasHostWithSeveral(hosts)) {
      absl::StatusOr<LinkRate> link = MeasureLink(inside, capacity, kMeasuredBlockTime, budget_);
      if (!link.ok()) return link.status();
      rates.link_bytes_per_second = link->bytes_per_second;
      rates.exchange_overhead = link->overhead;
    }
    if (hosts.empty()) return rates;
    // Every member takes part, so that links inside hosts are as busy as in a request.
    const Neighbours all = NeighboursOnHost({}, ring_.rank(), ring_.world_size());
    absl::StatusOr<LinkRate> link =
        MeasureLink(all, capacity, kHostBlockTime, std::max(budget_, kHostMeasurementBudget));
    if (!link.ok()) return link.status();
    const int host = hosts[ring_.rank()];
    if (hosts[all.next] != host || hosts[all.previous] != host) {
      rates.host_link_bytes_per_second = link->bytes_per_second;
      rates.host_exchange_overhead = link->overhead;
    }
    const int per_host = static_cast<int>(RanksPerHost(hosts, ring_.world_size()));
    if (per_host < 2) return rates;
    absl::StatusOr<double> total = MeasureHosts(per_host, *link);
    if (!total.ok()) return total.status();
    rates.host_total_bytes_per_second = *total;
    return rates;
  }

 private:
  // Whom a member sends to and receives from; itself: the member does not exchange.
  struct Neighbours {
    int next = 0;
    int previous = 0;
  };
  struct LinkRate {
    double bytes_per_second = 0;
    absl::Duration overhead;
    int64_t block_bytes = 0;  // 0: blocks are too short for a rate
  };

  static bool HasHostWithSeveral(const std::vector<int>& hosts) {
    return hosts.empty() || std::set<int>(hosts.begin(), hosts.end()).size() < hosts.size();
  }

  // Returns the neighbours of `rank` among the ranks of its host. `hosts` empty: among all.
  static Neighbours NeighboursOnHost(const std::vector<int>& hosts, int rank, int world_size) {
    const auto shares_host = [&](int other) {
      return hosts.empty() || hosts[other] == hosts[rank];
    };
    Neighbours found{rank, rank};
    for (int distance = 1; distance < world_size && found.next == rank; ++distance) {
      const int other = (rank + distance) % world_size;
      if (shares_host(other)) found.next = other;
    }
    for (int distance = 1; distance < world_size && found.previous == rank; ++distance) {
      const int other = (rank + world_size - distance) % world_size;
      if (shares_host(other)) found.previous = other;
    }
    return found;
  }

  // Measures the exchange with these neighbours. All members call it at the same point; those
  // without neighbours only agree on the sizes. The rate is 0 for them, and if blocks are too
  // short.
  absl::StatusOr<LinkRate> MeasureLink(const Neighbours& neighbours, int64_t capacity,
                                       absl::Duration block_time, absl::Duration budget) {
    neighbours_ = neighbours;
    budget_ = budget;
    groups_ = 1;              // the agreement before it
    begin_ = MonotonicNow();  // all members have joined

    // Blocks too short for a rate still serve for the overhead.
    LinkRate rate;
    absl::StatusOr<absl::Duration> small = BestOf(kSmallGroups, std::min(kSmallBytes, capacity));
    if (!small.ok()) return small.status();
    rate.overhead = *small;
    if (capacity < kMinProbeBytes) return rate;

    // On a fast link, short blocks are mostly overhead. Blocks grow while that pays, at least
    // twofold each time, so at most seven times.
    int64_t bytes = std::min(kProbeBytes, capacity);
    Agreed agreed;
    for (bool grows = true; grows;) {
      absl::StatusOr<absl::Duration> probe = BestOf(kProbes, bytes);
      if (!probe.ok()) return probe.status();
      TakeRate(bytes, *probe, &rate);
      // Every member uses the slowest member's block size, so that transfers match.
      const Agreed mine{
          exchanges() ? BlockBytesAfterProbe(bytes, *probe, capacity, block_time) : capacity,
          exchanges() ? GroupsWithinBudget() : kMaxBlocks};
      absl::StatusOr<Agreed> smallest = SmallestOfAll(mine);
      if (!smallest.ok()) return smallest.status();
      agreed = *smallest;
      grows = agreed.bytes >= 2 * bytes && agreed.groups > kProbes;
      bytes = agreed.bytes;
    }
    absl::StatusOr<absl::Duration> block =
        BestOf(static_cast<int>(std::clamp<int64_t>(agreed.groups, 1, kMaxBlocks)), bytes);
    if (!block.ok()) return block.status();
    TakeRate(bytes, *block, &rate);
    rate.block_bytes = bytes;
    return rate;
  }

  // Returns the rate of all members of a host together between hosts, the slowest host's. Every
  // member passes blocks to the member in its position in the next host. All members begin a block
  // at the same time, and the slowest determines its rate: a member that ends later has the link to
  // itself in the meantime.
  //   link  of the ring over all hosts
  absl::StatusOr<double> MeasureHosts(int per_host, const LinkRate& link) {
    const int world_size = ring_.world_size();
    neighbours_ = {(ring_.rank() + per_host) % world_size,
                   (ring_.rank() + world_size - per_host) % world_size};
    if (link.block_bytes == 0) return 0.0;
    // The first groups warm up connections.
    absl::StatusOr<absl::Duration> small = BestOf(kProbes, kSmallBytes);
    if (!small.ok()) return small.status();
    // At worst, the members of a host share the rate of one.
    const double seconds_per_block =
        static_cast<double>(per_host * link.block_bytes) / std::max(link.bytes_per_second, 1.0);
    const double fitting = absl::ToDoubleSeconds(kHostMeasurementBudget) / seconds_per_block;
    absl::StatusOr<Agreed> agreed = SmallestOfAll(
        {link.block_bytes, static_cast<int64_t>(std::clamp(fitting, 1.0, double{kMaxBlocks}))});
    if (!agreed.ok()) return agreed.status();
    const int64_t bytes = agreed->bytes;
    double best = 0;
    for (int64_t blocks = agreed->groups; blocks > 0; --blocks) {
      absl::StatusOr<absl::Duration> time = BestOf(1, bytes);
      if (!time.ok()) return time.status();
      const double rate = LinkBytesPerSecond(bytes, *time, *small);
      absl::StatusOr<Agreed> slowest = SmallestOfAll({static_cast<int64_t>(rate), blocks});
      if (!slowest.ok()) return slowest.status();
      best = std::max(best, static_cast<double>(slowest->bytes));
    }
    return best * per_host;
  }

  bool exchanges() const { return neighbours_.next != ring_.rank(); }

  void TakeRate(int64_t bytes, absl::Duration time, LinkRate* rate) const {
    if (!exchanges()) return;
    rate->bytes_per_second =
        std::max(rate->bytes_per_second, LinkBytesPerSecond(bytes, time, rate->overhead));
  }

  struct Agreed {
    int64_t bytes = 0;
    int64_t groups = 0;
  };

  absl::Status Allocate(int64_t bytes, std::unique_ptr<DeviceBuffer>* buffer) {
    absl::StatusOr<std::unique_ptr<DeviceBuffer>> made = device_.Allocate(bytes);
    if (!made.ok()) return made.status();
    *buffer = *std::move(made);
    return absl::OkStatus();
  }

  // Allocates two blocks of `bytes` each, or of half as many, a quarter, and so on. Returns the
  // size, or 0.
  int64_t AllocateBlocks(int64_t bytes) {
    for (; bytes >= kSmallBytes; bytes /= 2) {
      if (Allocate(bytes, &sent_).ok() && Allocate(bytes, &received_).ok()) return bytes;
      // A single longer block could leave no room for two shorter ones.
      sent_ = nullptr;
      received_ = nullptr;
    }
    return 0;
  }

  // Returns how many more groups fit into the budget at this member's average time per group so
  // far, waiting included.
  int64_t GroupsWithinBudget() const {
    if (budget_ == absl::InfiniteDuration()) return kMaxBlocks;
    // The wall clock may have been set back.
    const absl::Duration elapsed = std::max(MonotonicNow() - begin_, absl::Microseconds(1));
    return static_cast<int64_t>(absl::FDivDuration(budget_ - elapsed, elapsed / groups_));
  }

  // Exchanges `mine` with all members and returns the minimum of each number. Acts as a barrier.
  absl::StatusOr<Agreed> SmallestOfAll(Agreed mine) {
    auto* slots = static_cast<Agreed*>(numbers_->data());
    absl::Status status = device_.CopyFromHost(slots, &mine, sizeof(mine));
    if (!status.ok()) return Failed(status);
    const int world_size = ring_.world_size();
    std::vector<PeerTransfer> group;
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer == ring_.rank()) continue;
      group.push_back({Kind::kSend, peer, slots, sizeof(mine)});
      group.push_back({Kind::kReceive, peer, slots + 1 + peer, sizeof(mine)});
    }
    absl::StatusOr<absl::Duration> time = RunGroup(std::move(group));
    if (!time.ok()) return time.status();
    std::vector<Agreed> told(world_size);
    status = device_.CopyToHost(told.data(), slots + 1, world_size * sizeof(mine));
    if (!status.ok()) return Failed(status);
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer == ring_.rank()) continue;
      mine.bytes = std::min(mine.bytes, told[peer].bytes);
      mine.groups = std::min(mine.groups, told[peer].groups);
    }
    return mine;
  }

  // Returns the shortest of `count` groups, each with `bytes` to the next neighbour and from the
  // previous one. Zero bytes take no time, nor does a member without neighbours.
  absl::StatusOr<absl::Duration> BestOf(int count, int64_t bytes) {
    if (bytes == 0 || !exchanges()) return absl::ZeroDuration();
    absl::Duration best = absl::InfiniteDuration();
    for (int i = 0; i < count; ++i) {
      absl::StatusOr<absl::Duration> time =
          RunGroup({{Kind::kSend, neighbours_.next, sent_->data(), bytes},
                    {Kind::kReceive, neighbours_.previous, received_->data(), bytes}});
      if (!time.ok()) return time.status();
      best = std::min(best, *time);
    }
    return best;
  }

  absl::StatusOr<absl::Duration> RunGroup(std::vector<PeerTransfer> group) {
    ++groups_;
    EventRef done = ring_.Start(std::move(group), {}, &control_);
    absl::Status status = done->Wait(deadline_);
    if (absl::IsDeadlineExceeded(status) && !done->Done()) {
      ring_.Abort("not all members measured the ring in time");
      // The abort bounds the wait. The memory is in use until then.
      (void)done->Wait(absl::InfiniteFuture());
      return absl::UnavailableError("a member did not measure the ring in time");
    }
    if (!status.ok()) return Failed(status);
    return done->end_time() - done->begin_time();
  }

  // Aborts the ring, because peers would wait for this member's transfers.
  absl::Status Failed(const absl::Status& status) {
    ring_.Abort(absl::StrCat("measuring the ring: ", status.message()));
    return absl::UnavailableError(absl::StrCat("measuring the ring: ", status.message()));
  }

  Communicator& ring_;
  Device& device_;
  const absl::Time deadline_;
  // Of the link that is being measured.
  absl::Duration budget_;
  absl::Time begin_;
  int groups_ = 0;
  Neighbours neighbours_;
  RunControl control_;
  std::unique_ptr<DeviceBuffer> numbers_;  // this member's, then one per rank
  std::unique_ptr<DeviceBuffer> sent_, received_;
};

}  // namespace

absl::StatusOr<RingRates> MeasureRing(Communicator& ring, Device& device, int64_t max_block_bytes,
                                      absl::Time deadline, absl::Duration budget,
                                      const std::vector<int>& hosts) {
  if (ring.world_size() == 1) return RingRates{};
  return RingMeasurement(ring, device, deadline, budget)
      .Run(std::clamp<int64_t>(max_block_bytes, 0, kMaxMeasuredBytes), hosts);
}

double LinkBytesPerSecond(int64_t bytes, absl::Duration time, absl::Duration overhead) {
  // If overhead dominates, the difference would be noise.
  const absl::Duration moving = time > 2 * overhead ? time - overhead : time;
  return static_cast<double>(bytes) / absl::ToDoubleSeconds(std::max(moving, absl::Nanoseconds(1)));
}

int64_t BlockBytesAfterProbe(int64_t probe_bytes, absl::Duration probe_time,
                             int64_t max_block_bytes, absl::Duration block_time) {
  const double probes = absl::FDivDuration(block_time, std::max(probe_time, absl::Nanoseconds(1)));
  const double most = static_cast<double>(max_block_bytes) / static_cast<double>(probe_bytes);
  return probe_bytes * static_cast<int64_t>(std::clamp(probes, 1.0, std::max(most, 1.0)));
}

}  // namespace ringattn::worker
