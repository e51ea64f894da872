#include "worker/comm/wire_cuda/wire_cuda_ranks.h"

#include <utility>

#include "common/security/test_certificates.h"
#include "gtest/gtest.h"
#include "worker/comm/cuda/gpu_ranks.h"

namespace ringattn::worker {

TlsMaterial TestTlsMaterial() {
  const TestAuthority authority("cluster");
  const TestCertificate issued = authority.Issue("worker");
  return {.identity_pem = issued.key + issued.certificate, .authorities_pem = authority.pem()};
}

CudaWireTransportOptions TestWireOptions(int device, int connections,
                                         std::optional<TlsMaterial> tls,
                                         const TestRankOptions& options) {
  return {.device = device,
          .wire = {.connections = connections,
                   .tls = [tls = std::move(tls)] { return tls; },
                   .step_timeout = options.step_timeout},
          .engine = {.on_stuck = options.on_stuck}};
}

RingUnderTest WireCudaRing(const std::string& name, int connections, bool tls, int slots) {
  RingUnderTest ring = GpuRing(name);
  ring.isolates_peers = true;
  std::optional<TlsMaterial> material;
  if (tls) material = TestTlsMaterial();
  ring.make_ranks = [=](const TestRankOptions& options) {
    std::vector<std::unique_ptr<TestRank>> ranks;
    for (int rank = 0; rank < options.world_size; ++rank) {
      CudaWireTransportOptions wire = TestWireOptions(rank, connections, material, options);
      wire.engine.slots = slots;
      auto transport = CudaWireTransport::Create(std::move(wire));
      EXPECT_TRUE(transport.ok()) << transport.status();
      ranks.push_back(std::make_unique<GpuRank>(rank, *std::move(transport)));
    }
    return ranks;
  };
  return ring;
}

}  // namespace ringattn::worker
