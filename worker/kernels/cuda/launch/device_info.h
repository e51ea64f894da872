// The properties of a device on which the choice of a kernel depends.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_DEVICE_INFO_H_
#define RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_DEVICE_INFO_H_

namespace ringattn::worker::cuda {

// Tests lower shared_bytes_per_block to exercise the code for smaller devices.
struct DeviceInfo {
  int sm_count = 0;
  int compute_major = 0;
  int shared_bytes_per_block = 0;  // the opt-in maximum
};

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_DEVICE_INFO_H_
