// CudaDriver: the CUDA driver calls for memory that processes share.
#ifndef RINGATTN_WORKER_DEVICE_CUDA_CUDA_DRIVER_H_
#define RINGATTN_WORKER_DEVICE_CUDA_CUDA_DRIVER_H_

#include <cuda.h>

#include <string>

#include "absl/status/statusor.h"

namespace ringattn::worker {

// Loaded at run time, so that the program starts without a driver. Immutable; thread safe.
struct CudaDriver {
  // Returns FAILED_PRECONDITION with the name of a call that the driver lacks.
  static absl::StatusOr<const CudaDriver*> Load();

  // Formats an error: "cuMemMap: CUDA_ERROR_INVALID_VALUE (1)".
  std::string What(const char* call, CUresult result) const;

  decltype(&cuGetErrorName) get_error_name = nullptr;
  decltype(&cuDeviceGet) device_get = nullptr;
  decltype(&cuDeviceGetAttribute) device_attribute = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemExportToShareableHandle) export_handle = nullptr;
  decltype(&cuMemImportFromShareableHandle) import_handle = nullptr;
  decltype(&cuMemGetAllocationPropertiesFromHandle) properties = nullptr;
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free_address = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemGetAddressRange) address_range = nullptr;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CUDA_CUDA_DRIVER_H_
