// Ranks of the contract's cases (worker/comm/contract) whose devices are GPUs, or fakes of
// them; one rank per GPU in threads of one process.
#ifndef RINGATTN_WORKER_COMM_CUDA_GPU_RANKS_H_
#define RINGATTN_WORKER_COMM_CUDA_GPU_RANKS_H_

#include <memory>

#include "worker/comm/contract/ring_under_test.h"

namespace ringattn::worker {

// At most 8; 0 without a driver.
int TestGpuCount();

// What all rings of GPUs have in common; make_ranks is left to the transport.
RingUnderTest GpuRing(const std::string& name);

// Memory and work of GPU `device`. Where its memory comes from is the transport's business.
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
  // cudaMalloc and cudaFree unless overridden; the device is current.
  virtual void* TakeMemory(int64_t bytes);
  virtual void GiveMemory(void* data);

 private:
  const int device_;
  const std::unique_ptr<RingTransport> transport_;
  void* compute_ = nullptr;  // the stream that computes, once there is one
};

// Numbers of CTAs whose rates are worth measuring; {0} where a transport takes none. Defined
// by the program.
std::vector<int> TestCtas();

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CUDA_GPU_RANKS_H_
