// DeviceRegion: one allocation of cudaMalloc, the unit that CUDA shares between processes.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_DEVICE_REGION_H_
#define RINGATTN_WORKER_DEVICE_CUDA_DEVICE_REGION_H_

#include <cstdint>

namespace ringattn {

// Not owned.
struct DeviceRegion {
  char* base = nullptr;
  int64_t bytes = 0;
};

}  // namespace ringattn

#endif  // RINGATTN_WORKER_DEVICE_CUDA_DEVICE_REGION_H_
