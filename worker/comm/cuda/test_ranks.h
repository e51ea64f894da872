// What the ring cases (ring_cases.cc) need of the transport that they are linked with.
#ifndef RINGATTN_WORKER_COMM_CUDA_TEST_RANKS_H_
#define RINGATTN_WORKER_COMM_CUDA_TEST_RANKS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"

namespace ringattn::worker {

struct TestRankOptions {
  int device = 0;
  absl::Duration step_timeout;
  int max_ctas = 0;  // where the transport takes SMs
  std::function<void(const std::string&)> on_stuck;
};

// A transport for a rank on that device.
absl::StatusOr<std::unique_ptr<RingTransport>> MakeTestTransport(const TestRankOptions& options);

// Numbers of CTAs worth measuring; {0} where there are none.
std::vector<int> TestCtas();

// Memory of a device that its rank may send. The device is current.
void* TestAllocate(int device, int64_t bytes);
void TestFree(int device, void* data);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CUDA_TEST_RANKS_H_
