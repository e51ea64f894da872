// Measures the rates of hops in rings of GPUs over two emulated hosts of two GPUs each, and of the
// same hops in a ring of one host. Ranks are processes, as workers are. Prints one JSON object.
//
//   mixed_hop_rate [--bytes=N] [--rounds=N]
//
// Needs four GPUs that reach each other, and NCCL. NCCL regards ranks with different NCCL_HOSTID as
// hosts, and connects them over the interface that NCCL_SOCKET_IFNAME names (here: lo unless set).
// Patterns, each a group of transfers on every rank:
//   pair  with the other rank of the host, `bytes` in both directions
//   ring  at the same time: `bytes` from the first to the second rank of each host, and 64 KiB from
//         there to the next host
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "worker/comm/contract/forked_ring.h"
#include "worker/comm/contract/ring_fixture.h"
#include "worker/comm/mixed/emulated_hosts.h"

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;

constexpr int kRanks = 4, kRanksPerHost = 2;
constexpr int64_t kNetworkBytes = 64 << 10;
constexpr int kWarmUps = 3;

struct Settings {
  int64_t bytes = int64_t{256} << 20;
  int rounds = 20;
};

// The measurements of one ring, in memory that the ranks share. Seconds of the fastest
// group, by rank.
struct Measured {
  double pair[kRanks] = {};
  double ring[kRanks] = {};
  bool uses_copies = false;  // rank 0 exchanges with rank 1 by copy engines
};

// The rank of this process. Its transport is created when its rank is known.
class HostRank : public RingTransport {
 public:
  // `shares`: ranks of one host may use copy engines.
  HostRank(bool shares, std::unique_ptr<TestRank>* made) : shares_(shares), made_(made) {}

  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) override {
    const std::string host = absl::StrCat("host", rank / kRanksPerHost);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);  // as workers do
    setenv("NCCL_HOSTID", host.c_str(), 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    setenv("NCCL_IB_DISABLE", "1", 0);
    TestRankOptions options;
    options.world_size = world_size;
    *made_ = MakeEmulatedRank({.device = rank, .host_id = shares_ ? host : ""}, options);
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
  const bool shares_;
  std::unique_ptr<TestRank>* const made_;
};

// Returns the seconds of the fastest group, or a negative number if one fails.
double Fastest(Communicator& ring, const std::vector<PeerTransfer>& group, int rounds) {
  double fastest = 1e9;
  RunControl control;
  for (int round = -kWarmUps; round < rounds; ++round) {
    const EventRef done = ring.Start(group, {}, &control);
    const absl::Status status = done->Wait(Soon());
    if (!status.ok()) {
      std::fprintf(stderr, "rank %d: %s\n", ring.rank(), status.ToString().c_str());
      return -1;
    }
    if (round < 0) continue;
    fastest = std::min(fastest, absl::ToDoubleSeconds(done->end_time() - done->begin_time()));
  }
  return fastest;
}

int Measure(Communicator& ring, TestRank& memory, const Settings& settings, Measured* measured) {
  const int rank = ring.rank(), world_size = ring.world_size();
  Memory sent(&memory, settings.bytes), received(&memory, settings.bytes);
  const int neighbour = rank ^ 1;
  if (rank == 0) measured->uses_copies = !ring.takes_compute_units(neighbour);
  measured->pair[rank] = Fastest(ring,
                                 {{Kind::kSend, neighbour, sent.data(), settings.bytes},
                                  {Kind::kReceive, neighbour, received.data(), settings.bytes}},
                                 settings.rounds);
  const bool is_first = rank % kRanksPerHost == 0;
  const int next = (rank + 1) % world_size, previous = (rank + world_size - 1) % world_size;
  const int64_t out = is_first ? settings.bytes : kNetworkBytes;
  const int64_t in = is_first ? kNetworkBytes : settings.bytes;
  measured->ring[rank] = Fastest(
      ring,
      {{Kind::kSend, next, sent.data(), out}, {Kind::kReceive, previous, received.data(), in}},
      settings.rounds);
  return measured->pair[rank] > 0 && measured->ring[rank] > 0 ? 0 : 1;
}

// Runs a ring of `ranks` processes. Exits if it fails.
Measured Run(int ranks, bool shares, const Settings& settings) {
  void* memory =
      mmap(nullptr, sizeof(Measured), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* measured = new (memory) Measured;
  std::unique_ptr<TestRank> made;  // each process has its own
  {
    ForkedRing ring(
        ranks, [&] { return std::make_unique<HostRank>(shares, &made); },
        [&](Communicator& communicator) {
          return Measure(communicator, *made, settings, measured);
        });
    ring.ExpectSuccess();
  }
  if (::testing::Test::HasFailure()) std::exit(1);
  const Measured result = *measured;
  munmap(memory, sizeof(Measured));
  return result;
}

// Bytes per second of the slowest rank.
double Rate(const double (&seconds)[kRanks], int ranks, int64_t bytes) {
  return static_cast<double>(bytes) / *std::max_element(seconds, seconds + ranks);
}

int Main(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; ++i) {
    absl::string_view option = argv[i];
    const bool known = absl::ConsumePrefix(&option, "--bytes=")
                           ? absl::SimpleAtoi(option, &settings.bytes)
                           : absl::ConsumePrefix(&option, "--rounds=") &&
                                 absl::SimpleAtoi(option, &settings.rounds);
    if (known && settings.bytes >= kNetworkBytes && settings.bytes <= int64_t{512} << 20 &&
        settings.rounds >= 1) {
      continue;
    }
    std::fprintf(stderr, "%s: the options are --bytes=65536 to 536870912 and --rounds=1 or more\n",
                 argv[i]);
    return 2;
  }
  std::string json = absl::StrCat("{\"bytes\":", settings.bytes, ",\"rings\":[");
  const char* comma = "";
  for (const auto& [name, ranks, shares] :
       {std::tuple("one host, copy engines", kRanksPerHost, true),
        std::tuple("two hosts, copy engines and NCCL", kRanks, true),
        std::tuple("one host, NCCL", kRanksPerHost, false),
        std::tuple("two hosts, NCCL", kRanks, false)}) {
    const Measured measured = Run(ranks, shares, settings);
    if (measured.uses_copies != shares) {
      std::fprintf(stderr, "%s: the hop inside a host used another transport\n", name);
      return 1;
    }
    absl::StrAppend(&json, comma, "{\"ring\":\"", name,
                    "\",\"pair_bytes_per_second\":", Rate(measured.pair, ranks, settings.bytes),
                    ",\"ring_bytes_per_second\":", Rate(measured.ring, ranks, settings.bytes), "}");
    comma = ",";
  }
  std::printf("%s]}\n", json.c_str());
  return 0;
}

}  // namespace
}  // namespace ringattn::worker

int main(int argc, char** argv) {
  ::testing::InitGoogleTest();
  return ringattn::worker::Main(argc, argv);
}
