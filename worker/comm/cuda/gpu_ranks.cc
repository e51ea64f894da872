#include "worker/comm/cuda/gpu_ranks.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "gtest/gtest.h"
#include "worker/device/cuda/cuda_event.h"

namespace ringattn::worker {
namespace {

constexpr int kMaxRanks = 8;

#define CUDA_OK(call) EXPECT_EQ((call), cudaSuccess) << #call

// Copies may return before the device is done with them, and ring streams do not wait for the
// default stream.
void CopyNow(int device, void* to, const void* from, int64_t bytes, cudaMemcpyKind kind) {
  CUDA_OK(cudaSetDevice(device));
  CUDA_OK(cudaMemcpy(to, from, bytes, kind));
  CUDA_OK(cudaStreamSynchronize(nullptr));
}

}  // namespace

int TestGpuCount() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? std::min(count, kMaxRanks) : 0;
}

RingUnderTest GpuRing(const std::string& name) {
  RingUnderTest ring;
  ring.name = name;
  ring.max_world_size = TestGpuCount();
  ring.long_transfer_bytes = int64_t{256} << 20;
  ring.sends_to_itself = true;
  return ring;
}

GpuRank::GpuRank(int device, std::unique_ptr<RingTransport> transport)
    : device_(device), transport_(std::move(transport)) {}

GpuRank::~GpuRank() {
  if (compute_ == nullptr) return;
  CUDA_OK(cudaSetDevice(device_));
  CUDA_OK(cudaStreamDestroy(static_cast<cudaStream_t>(compute_)));
}

void* GpuRank::Allocate(int64_t bytes) {
  CUDA_OK(cudaSetDevice(device_));
  return TakeMemory(bytes + 1);  // so that 0 bytes have an address too
}

void GpuRank::Free(void* data) {
  (void)cudaSetDevice(device_);
  GiveMemory(data);
}

void* GpuRank::TakeMemory(int64_t bytes) {
  void* data = nullptr;
  return cudaMalloc(&data, bytes) == cudaSuccess ? data : nullptr;
}

void GpuRank::GiveMemory(void* data) { (void)cudaFree(data); }

void GpuRank::Write(void* data, const void* host, int64_t bytes) {
  CopyNow(device_, data, host, bytes, cudaMemcpyHostToDevice);
}

void GpuRank::Read(void* host, const void* data, int64_t bytes) {
  CopyNow(device_, host, data, bytes, cudaMemcpyDeviceToHost);
}

EventRef GpuRank::FillWhen(const std::atomic<bool>* go, void* data, int64_t bytes, uint8_t value) {
  CUDA_OK(cudaSetDevice(device_));
  if (compute_ == nullptr) {
    cudaStream_t stream = nullptr;
    CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    compute_ = stream;
  }
  const auto stream = static_cast<cudaStream_t>(compute_);
  CUDA_OK(cudaLaunchHostFunc(
      stream,
      [](void* flag) {
        while (!static_cast<const std::atomic<bool>*>(flag)->load()) std::this_thread::yield();
      },
      const_cast<std::atomic<bool>*>(go)));
  auto events = CudaEventPool::ForDevice(device_);
  EXPECT_TRUE(events.ok()) << events.status();
  auto filled = std::make_shared<CudaEvent>(*events, nullptr, 0);
  EXPECT_TRUE(filled->RecordBegin(stream).ok());
  CUDA_OK(cudaMemsetAsync(data, value, bytes, stream));
  EXPECT_TRUE(filled->RecordEnd(stream).ok());
  return filled;
}

}  // namespace ringattn::worker
