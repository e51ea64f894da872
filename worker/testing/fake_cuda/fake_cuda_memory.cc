// What CudaDevice uses of the CUDA runtime beyond what a ring does (fake_cuda.cc): pinned
// memory and the stream-ordered pool, on host memory.
#include <cuda_runtime_api.h>

#include <cstdlib>

#include "worker/testing/fake_cuda/fake_cuda.h"

extern "C" {

cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned int) {
  *data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cudaFreeHost(void* data) {
  std::free(data);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = nullptr;
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

cudaError_t cudaMallocFromPoolAsync(void** data, size_t bytes, cudaMemPool_t, cudaStream_t) {
  if (bytes > size_t{1} << 40) return cudaErrorMemoryAllocation;
  return cudaHostAlloc(data, bytes, 0);
}

cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  FakeCudaEnqueue(stream, [data] { std::free(data); });
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = size_t{80} << 30;
  *free = size_t{70} << 30;
  return cudaSuccess;
}

}  // extern "C"
