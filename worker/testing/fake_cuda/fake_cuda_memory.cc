// The part of the CUDA runtime that CudaDevice uses in addition to a ring (fake_cuda.cc): pinned
// memory and the stream-ordered pool, on host memory.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "worker/testing/fake_cuda/fake_cuda.h"

namespace {
std::mutex registered_mutex;
std::map<char*, size_t> registered;
}  // namespace

extern "C" {

cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned int) {
  *data = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return *data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cudaFreeHost(void* data) {
  std::free(data);
  return cudaSuccess;
}

// Registering memory twice, or unregistering memory that is not registered, is an error.
cudaError_t cudaHostRegister(void* data, size_t bytes, unsigned int) {
  std::lock_guard<std::mutex> lock(registered_mutex);
  for (const auto& [begin, size] : registered) {
    if (static_cast<char*>(data) < begin + size && begin < static_cast<char*>(data) + bytes) {
      return cudaErrorHostMemoryAlreadyRegistered;
    }
  }
  registered[static_cast<char*>(data)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* data) {
  std::lock_guard<std::mutex> lock(registered_mutex);
  return registered.erase(static_cast<char*>(data)) == 1 ? cudaSuccess
                                                         : cudaErrorHostMemoryNotRegistered;
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
  ++Faults().memory_queries;
  *total = size_t{80} << 30;
  *free = size_t{70} << 30;
  return cudaSuccess;
}

}  // extern "C"
