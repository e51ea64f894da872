// K/V caches in a GPU's memory, computed by the paged kernels.
//
// A call of a step copies its tensors to the device, replays the CUDA graph of its batch class, and
// waits for the results. A graph holds the append and the attention; it reads the rows, the block
// tables and the plane from device memory. It is captured when a batch class first occurs. A replay
// allocates nothing and plans nothing on the host.
//
// Tests: tests/sweep/kv_gpu_sweep, worker/kernels/cuda/paged/check/paged_check.cc
#ifndef RINGATTN_WORKER_DEVICE_CUDA_CUDA_KV_CACHES_H_
#define RINGATTN_WORKER_DEVICE_CUDA_CUDA_KV_CACHES_H_

#include <memory>
#include <string>

#include "worker/device/cuda/cuda_event.h"
#include "worker/device/device.h"
#include "worker/kernels/cuda/launch/device_info.h"

namespace ringattn::worker {

// The caches of `device`, whose CUDA device is that of `events`. Both must outlive them.
std::unique_ptr<DeviceKvCaches> MakeCudaKvCaches(CudaEventPool* events, Device* device,
                                                 const cuda::DeviceInfo& info);

// The same, but all block tables stay in device memory, as long ones do. For tests.
std::unique_ptr<DeviceKvCaches> MakeResidentCudaKvCaches(CudaEventPool* events, Device* device,
                                                         const cuda::DeviceInfo& info);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_CUDA_KV_CACHES_H_
