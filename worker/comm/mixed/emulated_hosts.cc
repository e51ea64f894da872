#include "worker/comm/mixed/emulated_hosts.h"

#include <utility>

#include "gtest/gtest.h"
#include "worker/comm/mixed/mixed_ring_transport.h"
#include "worker/comm/nccl/nccl_ring_transport.h"
#include "worker/comm/peer/peer_ranks.h"
#include "worker/comm/wire_cuda/wire_cuda_ranks.h"

namespace ringattn::worker {

std::unique_ptr<TestRank> MakeEmulatedRank(const EmulatedRank& rank,
                                           const TestRankOptions& options) {
  PeerTransportOptions peer = TestPeerOptions(rank.device, RegionSharing::kVmm, options);
  MixedTransportOptions mixed;
  mixed.device = rank.device;
  mixed.allocate = peer.allocate;
  mixed.step_timeout = options.step_timeout;
  mixed.on_choice = rank.on_choice;
  if (!rank.host_id.empty()) {
    peer.host_id = rank.host_id;
    peer.shared_gpu = rank.shared_gpu;
    auto copies = PeerRingTransport::Create(std::move(peer));
    EXPECT_TRUE(copies.ok()) << copies.status();
    mixed.copies = *std::move(copies);
  }
  if (rank.nccl) {
    auto nccl = NcclRingTransport::Create({.device = rank.device,
                                           .step_timeout = options.step_timeout,
                                           .max_ctas = options.max_ctas,
                                           .on_stuck = options.on_stuck});
    EXPECT_TRUE(nccl.ok()) << nccl.status();
    mixed.nccl = *std::move(nccl);
  }
  if (rank.wire) {
    auto wire = CudaWireTransport::Create(
        TestWireOptions(rank.device, /*connections=*/2, rank.tls, options));
    EXPECT_TRUE(wire.ok()) << wire.status();
    mixed.wire = *std::move(wire);
  }
  mixed.facts = rank.facts;
  mixed.facts.host = rank.host_id;
  auto transport = MixedRingTransport::Create(std::move(mixed));
  EXPECT_TRUE(transport.ok()) << transport.status();
  return MakePeerRank(rank.device, RegionSharing::kVmm, *std::move(transport));
}

}  // namespace ringattn::worker
