// DeviceRegion: one allocation of a device, the unit that CUDA shares between processes.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_DEVICE_REGION_H_
#define RINGATTN_WORKER_DEVICE_CUDA_DEVICE_REGION_H_

#include <cstdint>
#include <functional>
#include <vector>

namespace ringattn::worker {

// How other processes map regions.
enum class RegionSharing {
  kVmmOrIpc,  // the first of the two that device and driver support
  kVmm,       // cuMemCreate, shared as file descriptors
  kIpc,       // cudaMalloc, shared as legacy handles, which fail between equal process ids
};

// Not owned.
struct DeviceRegion {
  char* base = nullptr;
  int64_t bytes = 0;
  int descriptor = -1;  // of cuMemCreate memory, to be passed on; negative: cudaMalloc

  bool Contains(const void* data, int64_t size) const {
    const int64_t offset = static_cast<const char*>(data) - base;
    return offset >= 0 && size <= bytes && offset <= bytes - size;
  }
};

// Returns all regions that may contain a device's buffers. The list only grows: a region keeps its
// index and its memory. Thread safe.
using DeviceRegions = std::function<std::vector<DeviceRegion>()>;

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_DEVICE_REGION_H_
