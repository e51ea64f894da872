#include "worker/comm/cuda/device_uuid.h"

#include <cuda_runtime_api.h>

#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"
#include "worker/device/cuda/cuda_status.h"

namespace ringattn::worker {

absl::StatusOr<std::string> DeviceUuid(int device) {
  cudaDeviceProp properties;
  absl::Status status =
      CudaStatus(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  if (!status.ok()) return status;
  return absl::BytesToHexString(
      absl::string_view(properties.uuid.bytes, sizeof(properties.uuid.bytes)));
}

}  // namespace ringattn::worker
