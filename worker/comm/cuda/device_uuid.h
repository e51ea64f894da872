// The identity of a GPU, the same in every process.
#ifndef RINGATTN_WORKER_COMM_CUDA_DEVICE_UUID_H_
#define RINGATTN_WORKER_COMM_CUDA_DEVICE_UUID_H_

#include <string>

#include "absl/status/statusor.h"

namespace ringattn::worker {

// Returns 32 hexadecimal digits, or INTERNAL if CUDA does not know the device.
absl::StatusOr<std::string> DeviceUuid(int device);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_CUDA_DEVICE_UUID_H_
