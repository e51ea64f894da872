#include <cuda_runtime_api.h>

#include <utility>

#include "worker/comm/cuda/test_ranks.h"
#include "worker/comm/nccl/nccl_ring_transport.h"

namespace ringattn::worker {

absl::StatusOr<std::unique_ptr<RingTransport>> MakeTestTransport(const TestRankOptions& options) {
  NcclTransportOptions nccl;
  nccl.device = options.device;
  nccl.step_timeout = options.step_timeout;
  nccl.max_ctas = options.max_ctas;
  nccl.on_stuck = options.on_stuck;
  return NcclRingTransport::Create(std::move(nccl));
}

std::vector<int> TestCtas() { return {2, 4, 8, 16}; }

void* TestAllocate(int, int64_t bytes) {
  void* data = nullptr;
  return cudaMalloc(&data, bytes) == cudaSuccess ? data : nullptr;
}

void TestFree(int, void* data) { (void)cudaFree(data); }

}  // namespace ringattn::worker
