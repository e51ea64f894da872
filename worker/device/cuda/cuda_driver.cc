#include "worker/device/cuda/cuda_driver.h"

#include <cuda_runtime_api.h>

#include <memory>

#include "absl/strings/str_cat.h"

namespace ringattn::worker {
namespace {

constexpr unsigned int kInterfaceVersion = 12000;

template <typename Function>
absl::Status Find(const char* name, Function* function) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &address, kInterfaceVersion,
                                                             cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || address == nullptr) {
    (void)cudaGetLastError();
    return absl::FailedPreconditionError(absl::StrCat("the CUDA driver has no ", name));
  }
  *function = reinterpret_cast<Function>(address);
  return absl::OkStatus();
}

absl::Status FindAll(CudaDriver* driver) {
  absl::Status status = Find("cuGetErrorName", &driver->get_error_name);
  status.Update(Find("cuDeviceGet", &driver->device_get));
  status.Update(Find("cuDeviceGetAttribute", &driver->device_attribute));
  status.Update(Find("cuMemCreate", &driver->create));
  status.Update(Find("cuMemExportToShareableHandle", &driver->export_handle));
  status.Update(Find("cuMemImportFromShareableHandle", &driver->import_handle));
  status.Update(Find("cuMemGetAllocationPropertiesFromHandle", &driver->properties));
  status.Update(Find("cuMemGetAllocationGranularity", &driver->granularity));
  status.Update(Find("cuMemAddressReserve", &driver->reserve));
  status.Update(Find("cuMemAddressFree", &driver->free_address));
  status.Update(Find("cuMemMap", &driver->map));
  status.Update(Find("cuMemUnmap", &driver->unmap));
  status.Update(Find("cuMemSetAccess", &driver->set_access));
  status.Update(Find("cuMemRelease", &driver->release));
  status.Update(Find("cuMemGetAddressRange", &driver->address_range));
  return status;
}

}  // namespace

absl::StatusOr<const CudaDriver*> CudaDriver::Load() {
  static const auto* const loaded = [] {
    auto driver = std::make_unique<CudaDriver>();
    const absl::Status status = FindAll(driver.get());
    return status.ok() ? new absl::StatusOr<const CudaDriver*>(driver.release())
                       : new absl::StatusOr<const CudaDriver*>(status);
  }();
  return *loaded;
}

std::string CudaDriver::What(const char* call, CUresult result) const {
  const char* name = nullptr;
  if (get_error_name(result, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown error";
  return absl::StrCat(call, ": ", name, " (", static_cast<int>(result), ")");
}

}  // namespace ringattn::worker
