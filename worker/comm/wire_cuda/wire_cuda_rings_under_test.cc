// Rings of GPUs over sockets, in plain text and with TLS, with few slots and many connections.
#include <cstdlib>

#include "worker/comm/contract/ring_under_test.h"
#include "worker/comm/cuda/gpu_ranks.h"
#include "worker/comm/wire_cuda/wire_cuda_ranks.h"

namespace ringattn::worker {

std::vector<RingUnderTest> RingsUnderTest() {
  // As workers do (CudaDevice), before CUDA starts: streams that share a queue wait for each other.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  return {
      WireCudaRing("plain", 2, /*tls=*/false),
      WireCudaRing("tls", 2, /*tls=*/true),
      WireCudaRing("one_connection", 1, /*tls=*/false),
      WireCudaRing("one_slot", 4, /*tls=*/false, /*slots=*/1),
      WireCudaRing("tls_two_slots", 8, /*tls=*/true, /*slots=*/2),
  };
}

std::vector<int> TestCtas() { return {0}; }

}  // namespace ringattn::worker
