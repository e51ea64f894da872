#include <utility>

#include "gtest/gtest.h"
#include "worker/comm/contract/ring_under_test.h"
#include "worker/comm/cuda/gpu_ranks.h"
#include "worker/comm/nccl/nccl_ring_transport.h"

namespace ringattn::worker {

std::vector<RingUnderTest> RingsUnderTest() {
  RingUnderTest ring = GpuRing("nccl");
  ring.make_ranks = [](const TestRankOptions& options) {
    std::vector<std::unique_ptr<TestRank>> ranks;
    for (int rank = 0; rank < options.world_size; ++rank) {
      NcclTransportOptions nccl;
      nccl.device = rank;
      nccl.step_timeout = options.step_timeout;
      nccl.max_ctas = options.max_ctas;
      nccl.on_stuck = options.on_stuck;
      auto transport = NcclRingTransport::Create(std::move(nccl));
      EXPECT_TRUE(transport.ok()) << transport.status();
      ranks.push_back(std::make_unique<GpuRank>(rank, *std::move(transport)));
    }
    return ranks;
  };
  return {ring};
}

std::vector<int> TestCtas() { return {2, 4, 8, 16}; }

}  // namespace ringattn::worker
