#include "client/memory/cuda_driver.h"

#include <dlfcn.h>

#include <memory>

#include "absl/strings/str_cat.h"

namespace ringattn::client {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";

}  // namespace

absl::StatusOr<const CudaDriver*> CudaDriver::Load() {
  static const auto* const loaded = [] {
    std::unique_ptr<CudaDriver> driver(new CudaDriver());
    const absl::Status status = driver->FindAll();
    return status.ok() ? new absl::StatusOr<const CudaDriver*>(driver.release())
                       : new absl::StatusOr<const CudaDriver*>(status);
  }();
  return *loaded;
}

absl::Status CudaDriver::FindAll() {
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("no CUDA driver: ", kLibrary, " cannot be loaded: ", dlerror()));
  }
  absl::Status status;
  const auto find = [&](const char* name, auto* function) {
    void* const address = dlsym(library, name);
    if (address == nullptr) {
      status.Update(absl::FailedPreconditionError(
          absl::StrCat("the CUDA driver has no ", name, "; install a newer driver")));
    }
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(address);
  };
  // The names to which cuda.h of CUDA 12 and 13 maps these calls.
  find("cuInit", &Init);
  find("cuGetErrorName", &GetErrorName);
  find("cuDeviceGetCount", &DeviceGetCount);
  find("cuDeviceGet", &DeviceGet);
  find("cuDeviceGetUuid_v2", &DeviceGetUuid);
  find("cuDevicePrimaryCtxRetain", &PrimaryCtxRetain);
  find("cuDevicePrimaryCtxRelease_v2", &PrimaryCtxRelease);
  find("cuCtxPushCurrent_v2", &CtxPushCurrent);
  find("cuCtxPopCurrent_v2", &CtxPopCurrent);
  find("cuCtxSynchronize", &CtxSynchronize);
  find("cuPointerGetAttribute", &PointerGetAttribute);
  find("cuMemGetAddressRange_v2", &MemGetAddressRange);
  find("cuIpcGetMemHandle", &IpcGetMemHandle);
  find("cuMemAlloc_v2", &MemAlloc);
  find("cuMemFree_v2", &MemFree);
  find("cuMemcpyDtoH_v2", &MemcpyDtoH);
  find("cuMemcpyHtoD_v2", &MemcpyHtoD);
  find("cuMemcpyDtoD_v2", &MemcpyDtoD);
  find("cuMemGetAllocationGranularity", &MemGetAllocationGranularity);
  find("cuMemCreate", &MemCreate);
  find("cuMemRelease", &MemRelease);
  find("cuMemRetainAllocationHandle", &MemRetainAllocationHandle);
  find("cuMemExportToShareableHandle", &MemExportToShareableHandle);
  find("cuMemAddressReserve", &MemAddressReserve);
  find("cuMemAddressFree", &MemAddressFree);
  find("cuMemMap", &MemMap);
  find("cuMemUnmap", &MemUnmap);
  find("cuMemSetAccess", &MemSetAccess);
  if (!status.ok()) return status;
  const cuda::Result result = Init(0);
  if (result == cuda::kSuccess) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("no CUDA driver: ", Check("cuInit", result).message()));
}

absl::Status CudaDriver::Check(const char* call, cuda::Result result) const {
  if (result == cuda::kSuccess) return absl::OkStatus();
  const char* name = nullptr;
  if (GetErrorName(result, &name) != cuda::kSuccess || name == nullptr) name = "unknown error";
  const std::string detail = absl::StrCat(call, ": ", name, " (", result, ")");
  return result == cuda::kOutOfMemory ? absl::ResourceExhaustedError(detail)
                                      : absl::InternalError(detail);
}

}  // namespace ringattn::client
