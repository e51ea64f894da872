#include <utility>

#include "gtest/gtest.h"
#include "worker/comm/contract/ring_under_test.h"
#include "worker/comm/cuda/gpu_ranks.h"
#include "worker/comm/peer/peer_ranks.h"

namespace ringattn::worker {

std::vector<RingUnderTest> RingsUnderTest() {
  std::vector<RingUnderTest> rings;
  for (const auto& [name, sharing] :
       {std::pair{"peer", RegionSharing::kVmm}, std::pair{"peer_ipc", RegionSharing::kIpc}}) {
    RingUnderTest ring = GpuRing(name);
    ring.make_ranks = [sharing = sharing](const TestRankOptions& options) {
      std::vector<std::unique_ptr<TestRank>> ranks;
      for (int rank = 0; rank < options.world_size; ++rank) {
        auto transport = PeerRingTransport::Create(TestPeerOptions(rank, sharing, options));
        EXPECT_TRUE(transport.ok()) << transport.status();
        ranks.push_back(MakePeerRank(rank, sharing, *std::move(transport)));
      }
      return ranks;
    };
    rings.push_back(std::move(ring));
  }
  return rings;
}

std::vector<int> TestCtas() { return {0}; }

}  // namespace ringattn::worker
