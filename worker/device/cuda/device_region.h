// DeviceRegion: one allocation of cudaMalloc, the unit that CUDA shares between processes.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_DEVICE_REGION_H_
#define RINGATTN_WORKER_DEVICE_CUDA_DEVICE_REGION_H_

#include <cstdint>
#include <functional>
#include <vector>

namespace ringattn::worker {

// Not owned.
struct DeviceRegion {
  char* base = nullptr;
  int64_t bytes = 0;

  bool Contains(const void* data, int64_t size) const {
    const int64_t offset = static_cast<const char*>(data) - base;
    return offset >= 0 && size <= bytes && offset <= bytes - size;
  }
};

// All regions that a device's buffers may lie in. Only ever longer: a region keeps its
// place in the list and its memory. Thread safe.
using DeviceRegions = std::function<std::vector<DeviceRegion>()>;

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_DEVICE_REGION_H_
