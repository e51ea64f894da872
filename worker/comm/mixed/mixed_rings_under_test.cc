// Rings over two emulated hosts, one host, and hosts of one rank each.
#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "worker/comm/contract/ring_under_test.h"
#include "worker/comm/cuda/gpu_ranks.h"
#include "worker/comm/mixed/emulated_hosts.h"

namespace ringattn::worker {
namespace {

RingUnderTest MixedRing(const std::string& name, int (*host_of)(int rank, int world_size)) {
  RingUnderTest ring = GpuRing(name);
  ring.make_ranks = [host_of](const TestRankOptions& options) {
    std::vector<std::unique_ptr<TestRank>> ranks;
    for (int rank = 0; rank < options.world_size; ++rank) {
      const std::string host = absl::StrCat("host", host_of(rank, options.world_size));
      ranks.push_back(MakeEmulatedRank({.device = rank, .host_id = host}, options));
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
  };
}

std::vector<int> TestCtas() { return {4}; }

}  // namespace ringattn::worker
