// DeviceRegion: one allocation of a device, the unit that CUDA shares between processes.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_DEVICE_REGION_H_
#define RINGATTN_WORKER_DEVICE_CUDA_DEVICE_REGION_H_

#include <cstdint>
#include <functional>
#include <vector>

namespace ringattn::worker {

// How other processes get at regions.
enum class RegionSharing {
  kVmmOrIpc,  // the first of the two that the device and its driver have
  kVmm,       // cuMemCreate's, by file descriptors
  kIpc,       // cudaMalloc's, by CUDA's legacy handles, which equal process numbers break
};

// Not owned.
struct DeviceRegion {
  char* base = nullptr;
  int64_t bytes = 0;
  int descriptor = -1;  // of cuMemCreate's memory, to be passed on; negative: cudaMalloc's

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
