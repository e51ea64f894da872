// Rings over two emulated hosts, one host, and hosts of one rank each.
#include <cstdlib>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/ring_under_test.h"
#include "worker/comm/cuda/gpu_ranks.h"
#include "worker/comm/mixed/emulated_hosts.h"
#include "worker/comm/wire_cuda/wire_cuda_ranks.h"

namespace ringattn::worker {
namespace {

enum class Network { kNccl, kWire, kWireTls };

RingUnderTest MixedRing(const std::string& name, int (*host_of)(int rank, int world_size),
                        Network network = Network::kNccl) {
  RingUnderTest ring = GpuRing(name);
  std::optional<TlsMaterial> tls;
  if (network == Network::kWireTls) tls = TestTlsMaterial();
  ring.make_ranks = [host_of, network, tls](const TestRankOptions& options) {
    std::vector<std::unique_ptr<TestRank>> ranks;
    for (int rank = 0; rank < options.world_size; ++rank) {
      const std::string host = absl::StrCat("host", host_of(rank, options.world_size));
      const bool nccl = network == Network::kNccl;
      ranks.push_back(MakeEmulatedRank(
          {.device = rank, .host_id = host, .nccl = nccl, .wire = !nccl, .tls = tls}, options));
    }
    return ranks;
  };
  return ring;
}

}  // namespace

std::vector<RingUnderTest> RingsUnderTest() {
  // As workers do (CudaDevice), before CUDA starts: streams that share a queue wait for each other.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  return {
      MixedRing("two_hosts", [](int rank, int world_size) { return 2 * rank / world_size; }),
      MixedRing("alternating_hosts", [](int rank, int) { return rank % 2; }),
      // The first rank is alone, and all others are together.
      MixedRing("uneven_hosts", [](int rank, int) { return rank == 0 ? 0 : 1; }),
      MixedRing("one_host", [](int, int) { return 0; }),
      MixedRing(
          "two_hosts_wire", [](int rank, int world_size) { return 2 * rank / world_size; },
          Network::kWire),
      MixedRing(
          "alternating_hosts_wire", [](int rank, int) { return rank % 2; }, Network::kWireTls),
      MixedRing(
          "uneven_hosts_wire", [](int rank, int) { return rank == 0 ? 0 : 1; }, Network::kWire),
  };
}

std::vector<int> TestCtas() { return {4}; }

}  // namespace ringattn::worker
