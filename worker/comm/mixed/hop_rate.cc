// Measures the rates of hops in rings of GPUs over two emulated hosts of two ranks each, and of the
// same hops in two rings of one host, which run at the same time. Ranks are processes, as workers
// are. Prints one JSON object per line, for each kind of ring.
//
//   mixed_hop_rate [--bytes=N] [--rounds=N] [--gpus=N,N,N,N] [--ring=NAME]
//
//   --ring  only rings whose name (kRings) contains it
//   --gpus  by rank [0,1,2,3]. If ranks share GPUs, rings over NCCL alone are left out: its kernels
//           would take turns on the GPU and wait for each other. If those of one host do, hops
//           inside it are copies within the GPU's memory
//
// Needs GPUs that reach each other, and NCCL. NCCL regards ranks with different NCCL_HOSTID as
// hosts (ranks of one host have different ones if they share a GPU), and connects them over the
// interface that NCCL_SOCKET_IFNAME names (here: lo unless set). Patterns, each with groups of
// transfers on every rank:
//   pair  with the other rank of the host, `bytes` in both directions
//   ring  at the same time: `bytes` from the first to the second rank of each host, and 64 KiB from
//         there to the next host. If the ring has lanes, the hop between hosts is in another lane
// The rate is that of the hop inside the host in the median round of the slowest rank.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "worker/comm/contract/forked_ring.h"
#include "worker/comm/contract/ring_fixture.h"
#include "worker/comm/mixed/emulated_hosts.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;

constexpr int kRanks = 4, kRanksPerHost = 2;
constexpr int64_t kNetworkBytes = 64 << 10;
constexpr int kWarmUps = 3;
constexpr absl::Duration kArrival = absl::Seconds(30);

struct Settings {
  int64_t bytes = int64_t{256} << 20;
  int rounds = 20;
  std::array<int, kRanks> gpus = {0, 1, 2, 3};
  std::string ring;

  bool ranks_share_gpus() const {
    return std::set<int>(gpus.begin(), gpus.end()).size() < gpus.size();
  }
  bool shares_gpu_inside(int rank) const { return gpus[rank] == gpus[rank ^ 1]; }
};

struct RingKind {
  const char* name;
  bool two_hosts;  // one ring over both hosts; else a ring for each
  bool copies;     // between ranks of one host
  bool wire;       // sockets between hosts; else NCCL
};

constexpr RingKind kRings[] = {
    {"one host, copy engines", false, true, true},
    {"two hosts, copy engines and sockets", true, true, true},
    {"two hosts, copy engines and NCCL", true, true, false},
    {"one host, NCCL", false, false, false},
    {"two hosts, NCCL", true, false, false},
};

// The measurements of all ranks, in memory that they share. Seconds of the median round, by
// rank.
struct Measured {
  double pair[kRanks] = {};
  double ring[kRanks] = {};
  bool uses_copies = false;  // rank 0 exchanges with rank 1 by copy engines
  std::atomic<int> arrived{0};
};

// The rank of this process. Its transport is created when its rank is known.
class HostRank : public RingTransport {
 public:
  // `first`: the number of the ring's rank 0 among the ranks of both hosts.
  HostRank(const Settings& settings, const RingKind& kind, int first,
           std::unique_ptr<TestRank>* made)
      : settings_(settings), kind_(kind), first_(first), made_(made) {}

  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) override {
    const int number = first_ + rank;
    const std::string host = absl::StrCat("host", number / kRanksPerHost);
    const bool shared_gpu = settings_.shares_gpu_inside(number);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);  // as workers do
    setenv("NCCL_HOSTID", (shared_gpu ? absl::StrCat(host, "-", number) : host).c_str(), 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    setenv("NCCL_IB_DISABLE", "1", 0);
    TestRankOptions options;
    options.world_size = world_size;
    *made_ = MakeEmulatedRank({.device = settings_.gpus[number],
                               .host_id = kind_.copies ? host : "",
                               .nccl = !kind_.wire,
                               .wire = kind_.wire,
                               .shared_gpu = shared_gpu},
                              options);
    return (*made_)->transport().Prepare(generation, rank, world_size);
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(uint64_t generation,
                                                        const std::vector<std::string>& blobs,
                                                        absl::Time deadline) override {
    auto ring = (*made_)->transport().Connect(generation, blobs, deadline);
    if (!ring.ok()) std::fprintf(stderr, "%s\n", ring.status().ToString().c_str());
    return ring;
  }
  void Cancel() override { (*made_)->transport().Cancel(); }

 private:
  const Settings& settings_;
  const RingKind& kind_;
  const int first_;
  std::unique_ptr<TestRank>* const made_;
};

// Waits until all ranks of both hosts have called it `times` times, so that they measure the same
// pattern at the same time.
bool Arrive(Measured* measured, int times) {
  ++measured->arrived;
  const absl::Time end = MonotonicNow() + kArrival;
  while (measured->arrived < times * kRanks) {
    if (MonotonicNow() > end) return false;
    absl::SleepFor(absl::Microseconds(50));
  }
  return true;
}

// Returns the seconds of the median round of the transfers inside the host, or a negative number if
// one fails. `network`: transfers between hosts at the same time.
double Median(Communicator& ring, std::vector<PeerTransfer> inside,
              const std::vector<PeerTransfer>& network, int rounds) {
  if (!ring.has_lanes()) inside.insert(inside.end(), network.begin(), network.end());
  std::vector<double> seconds;
  RunControl control;
  for (int round = -kWarmUps; round < rounds; ++round) {
    std::vector<EventRef> groups = {ring.StartInLane(Lane::kInside, inside, {}, &control)};
    if (ring.has_lanes() && !network.empty()) {
      groups.push_back(ring.StartInLane(Lane::kBetween, network, {}, &control));
    }
    for (const EventRef& group : groups) {
      const absl::Status status = group->Wait(Soon());
      if (status.ok()) continue;
      std::fprintf(stderr, "rank %d: %s\n", ring.rank(), status.ToString().c_str());
      return -1;
    }
    if (round < 0) continue;
    seconds.push_back(absl::ToDoubleSeconds(groups[0]->end_time() - groups[0]->begin_time()));
  }
  std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
  return seconds[seconds.size() / 2];
}

// `first`: as in HostRank.
int Measure(Communicator& ring, TestRank& memory, const Settings& settings, int first,
            Measured* measured) {
  const int number = first + ring.rank();
  Memory sent(&memory, settings.bytes), received(&memory, settings.bytes);
  Memory network(&memory, kNetworkBytes);
  const int neighbour = ring.rank() ^ 1;
  if (number == 0) measured->uses_copies = !ring.takes_compute_units(neighbour);
  if (!Arrive(measured, 1)) return 1;
  measured->pair[number] = Median(ring,
                                  {{Kind::kSend, neighbour, sent.data(), settings.bytes},
                                   {Kind::kReceive, neighbour, received.data(), settings.bytes}},
                                  {}, settings.rounds);
  const bool is_first = ring.rank() % kRanksPerHost == 0;
  const int world_size = ring.world_size();
  std::vector<PeerTransfer> outside;
  if (world_size > kRanksPerHost) {
    const int other = (ring.rank() + (is_first ? world_size - 1 : 1)) % world_size;
    outside.push_back(
        {is_first ? Kind::kReceive : Kind::kSend, other, network.data(), kNetworkBytes});
  }
  if (!Arrive(measured, 2)) return 1;
  measured->ring[number] =
      Median(ring,
             {is_first ? PeerTransfer{Kind::kSend, neighbour, sent.data(), settings.bytes}
                       : PeerTransfer{Kind::kReceive, neighbour, received.data(), settings.bytes}},
             outside, settings.rounds);
  return measured->pair[number] > 0 && measured->ring[number] > 0 && Arrive(measured, 3) ? 0 : 1;
}

// Bytes per second of the slowest rank.
double Rate(const double (&seconds)[kRanks], int64_t bytes) {
  return static_cast<double>(bytes) / *std::max_element(seconds, seconds + kRanks);
}

// Runs the rings of all ranks and returns the rates in JSON. Exits if one fails.
std::string Run(const RingKind& kind, const Settings& settings) {
  void* memory =
      mmap(nullptr, sizeof(Measured), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* measured = new (memory) Measured;
  std::unique_ptr<TestRank> made;  // each process has its own
  {
    const int ranks = kind.two_hosts ? kRanks : kRanksPerHost;
    std::vector<std::unique_ptr<ForkedRing>> rings;
    for (int first = 0; first < kRanks; first += ranks) {
      rings.push_back(std::make_unique<ForkedRing>(
          ranks, [&] { return std::make_unique<HostRank>(settings, kind, first, &made); },
          [&](Communicator& communicator) {
            return Measure(communicator, *made, settings, first, measured);
          }));
    }
    // A ring's processes have inherited the pipes of those before it, so it ends first.
    for (auto ring = rings.rbegin(); ring != rings.rend(); ++ring) (*ring)->ExpectSuccess();
  }
  if (::testing::Test::HasFailure()) std::exit(1);
  if (measured->uses_copies != kind.copies) {
    std::fprintf(stderr, "%s: the hop inside a host used another transport\n", kind.name);
    std::exit(1);
  }
  const std::string json =
      absl::StrCat("{\"ring\":\"", kind.name, "\",\"bytes\":", settings.bytes,
                   ",\"pair_bytes_per_second\":", Rate(measured->pair, settings.bytes),
                   ",\"ring_bytes_per_second\":", Rate(measured->ring, settings.bytes), "}");
  munmap(memory, sizeof(Measured));
  return json;
}

bool ReadGpus(absl::string_view text, std::array<int, kRanks>* gpus) {
  const std::vector<std::string> numbers = absl::StrSplit(text, ',');
  if (numbers.size() != kRanks) return false;
  for (int rank = 0; rank < kRanks; ++rank) {
    if (!absl::SimpleAtoi(numbers[rank], &(*gpus)[rank]) || (*gpus)[rank] < 0) return false;
  }
  return true;
}

bool ReadOption(absl::string_view option, Settings* settings) {
  if (absl::ConsumePrefix(&option, "--bytes=")) return absl::SimpleAtoi(option, &settings->bytes);
  if (absl::ConsumePrefix(&option, "--rounds=")) return absl::SimpleAtoi(option, &settings->rounds);
  if (absl::ConsumePrefix(&option, "--gpus=")) return ReadGpus(option, &settings->gpus);
  if (!absl::ConsumePrefix(&option, "--ring=")) return false;
  settings->ring = std::string(option);
  return true;
}

std::optional<Settings> ReadSettings(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; ++i) {
    const bool known = ReadOption(argv[i], &settings);
    if (known && settings.bytes >= kNetworkBytes && settings.bytes <= int64_t{512} << 20 &&
        settings.rounds >= 1) {
      continue;
    }
    std::fprintf(stderr,
                 "%s: the options are --bytes=65536 to 536870912, --rounds=1 or more, --gpus= with "
                 "four numbers, and --ring= with a part of a name\n",
                 argv[i]);
    return std::nullopt;
  }
  return settings;
}

int Main(int argc, char** argv) {
  const std::optional<Settings> settings = ReadSettings(argc, argv);
  if (!settings.has_value()) return 2;
  bool found = false;
  for (const RingKind& kind : kRings) {
    if (!absl::StrContains(kind.name, settings->ring)) continue;
    if (!kind.copies && settings->ranks_share_gpus()) continue;
    found = true;
    std::printf("%s\n", Run(kind, *settings).c_str());
    std::fflush(stdout);
  }
  if (found) return 0;
  std::fprintf(stderr, "--ring=%s: no ring on these GPUs has such a name\n",
               settings->ring.c_str());
  return 2;
}

}  // namespace
}  // namespace ringattn::worker

int main(int argc, char** argv) {
  ::testing::InitGoogleTest();
  return ringattn::worker::Main(argc, argv);
}
