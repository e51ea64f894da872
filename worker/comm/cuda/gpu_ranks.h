// Ranks for the contract's cases (worker/comm/contract) on GPUs or fakes of them: one rank per GPU,
// in threads of one process.
#ifndef RINGATTN_WORKER_COMM_CUDA_GPU_RANKS_H_
#define RINGATTN_WORKER_COMM_CUDA_GPU_RANKS_H_

#include <memory>

#include "worker/comm/contract/ring_under_test.h"

namespace ringattn::worker {

// Returns at most 8; 0 without a driver.
int TestGpuCount();

// Returns the common parameters of GPU rings; the transport sets make_ranks.
RingUnderTest GpuRing(const std::string& name);

// Memory and work of GPU `device`. Derived classes choose the source of the memory.
class GpuRank : public TestRank {
 public:
  GpuRank(int device, std::unique_ptr<RingTransport> transport);
  ~GpuRank() override;

  RingTransport& transport() override { return *transport_; }
  void* Allocate(int64_t bytes) override;
  void Free(void* data) override;
  void Write(void* data, const void* host, int64_t bytes) override;
  void Read(void* host, const void* data, int64_t bytes) override;
  EventRef FillWhen(const std::atomic<bool>* go, void* data, int64_t bytes, uint8_t value) override;

 protected:
  // cudaMalloc and cudaFree unless overridden. The device is current.
  virtual void* TakeMemory(int64_t bytes);
  virtual void GiveMemory(void* data);

 private:
  const int device_;
  const std::unique_ptr<RingTransport> transport_;
  void* compute_ = nullptr;  // the compute stream, created on first use
};

// Numbers of CTAs whose rates to measure; {0} if the transport uses none. Defined by the program.
std::vector<int> TestCtas();

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CUDA_GPU_RANKS_H_
