#include "worker/device/cuda/vmm_memory.h"

#include "absl/strings/str_cat.h"

namespace ringattn::worker {
namespace {

CUmemAllocationProp SharedOn(int device) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  return properties;
}

}  // namespace

// ---------------------------------------------------------------------- VmmRegion

absl::Status VmmRegion::CheckSupport(const CudaDriver& driver, int device) {
  CUdevice handle = 0;
  CUresult result = driver.device_get(&handle, device);
  if (result != CUDA_SUCCESS) {
    return absl::FailedPreconditionError(driver.What("cuDeviceGet", result));
  }
  for (const auto& [attribute, what] :
       {std::pair{CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                  "has no virtual memory management"},
        std::pair{CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                  "does not share memory by file descriptors"}}) {
    int is_there = 0;
    result = driver.device_attribute(&is_there, attribute, handle);
    if (result != CUDA_SUCCESS) {
      return absl::FailedPreconditionError(driver.What("cuDeviceGetAttribute", result));
    }
    if (is_there == 0) {
      return absl::FailedPreconditionError(absl::StrCat("CUDA device ", device, " ", what));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<VmmRegion>> VmmRegion::Create(CudaEventPool* events,
                                                             const CudaDriver* driver,
                                                             int64_t bytes) {
  if (absl::Status status = events->UseDevice(); !status.ok()) return status;
  std::unique_ptr<VmmRegion> region(new VmmRegion(events, driver));
  if (absl::Status status = region->Init(bytes); !status.ok()) return status;
  return region;
}

absl::Status VmmRegion::Init(int64_t bytes) {
  const auto refused = [this](const char* call, CUresult result) {
    const std::string what = driver_.What(call, result);
    return result == CUDA_ERROR_OUT_OF_MEMORY ? absl::ResourceExhaustedError(what)
                                              : absl::FailedPreconditionError(what);
  };
  const CUmemAllocationProp properties = SharedOn(events_->device());
  size_t page = 0;
  CUresult result = driver_.granularity(&page, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  if (result != CUDA_SUCCESS) return refused("cuMemGetAllocationGranularity", result);
  if (page == 0) return absl::FailedPreconditionError("the driver reports no page size");
  bytes_ = (static_cast<size_t>(bytes) + page - 1) / page * page;
  result = driver_.create(&handle_, bytes_, &properties, 0);
  if (result != CUDA_SUCCESS) return refused("cuMemCreate", result);
  has_handle_ = true;
  int descriptor = -1;
  result = driver_.export_handle(&descriptor, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (result != CUDA_SUCCESS) return refused("cuMemExportToShareableHandle", result);
  descriptor_ = ScopedDescriptor(descriptor);
  result = driver_.reserve(&address_, bytes_, page, 0, 0);
  if (result != CUDA_SUCCESS) {
    address_ = 0;
    return refused("cuMemAddressReserve", result);
  }
  result = driver_.map(address_, bytes_, 0, handle_, 0);
  if (result != CUDA_SUCCESS) return refused("cuMemMap", result);
  is_mapped_ = true;
  CUmemAccessDesc access = {};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  result = driver_.set_access(address_, bytes_, &access, 1);
  return result == CUDA_SUCCESS ? absl::OkStatus() : refused("cuMemSetAccess", result);
}

VmmRegion::~VmmRegion() {
  if (!events_->UseDevice().ok()) return;
  if (is_mapped_) (void)driver_.unmap(address_, bytes_);
  if (address_ != 0) (void)driver_.free_address(address_, bytes_);
  if (has_handle_) (void)driver_.release(handle_);
}

// --------------------------------------------------------------------- VmmMapping

absl::StatusOr<std::unique_ptr<VmmMapping>> VmmMapping::Map(CudaEventPool* events,
                                                            const CudaDriver* driver,
                                                            int descriptor, int64_t bytes,
                                                            int gpu) {
  std::unique_ptr<VmmMapping> mapping(new VmmMapping(events, driver));
  if (absl::Status status = mapping->Init(descriptor, bytes, gpu); !status.ok()) return status;
  return mapping;
}

// Undoes a complete or partial import, in reverse order.
VmmMapping::~VmmMapping() {
  if (!events_->UseDevice().ok()) return;
  if (is_mapped_) (void)driver_.unmap(address_, bytes_);
  if (address_ != 0) (void)driver_.free_address(address_, bytes_);
  if (has_handle_) (void)driver_.release(handle_);
}

absl::Status VmmMapping::Init(int descriptor, int64_t bytes, int gpu) {
  CUresult result =
      driver_.import_handle(&handle_, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)),
                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (result != CUDA_SUCCESS) {
    return absl::InvalidArgumentError(
        absl::StrCat("the descriptor does not refer to shareable CUDA memory: ",
                     driver_.What("cuMemImportFromShareableHandle", result)));
  }
  has_handle_ = true;
  CUmemAllocationProp properties = {};
  result = driver_.properties(&properties, handle_);
  if (result != CUDA_SUCCESS) {
    return Failed("cuMemGetAllocationPropertiesFromHandle", result);
  }
  if (properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE || properties.location.id != gpu) {
    return absl::InvalidArgumentError(
        "the descriptor's memory is on another GPU than the client stated");
  }
  size_t granularity = 0;
  result = driver_.granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  if (result != CUDA_SUCCESS) return Failed("cuMemGetAllocationGranularity", result);
  if (granularity == 0 || bytes % static_cast<int64_t>(granularity) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("the stated size of the allocation is ", bytes,
                                                   " bytes, which is not a multiple of the GPU's ",
                                                   granularity));
  }
  bytes_ = bytes;
  result = driver_.reserve(&address_, bytes_, granularity, 0, 0);
  if (result != CUDA_SUCCESS) {
    address_ = 0;
    return Failed("cuMemAddressReserve", result);
  }
  // The driver cannot report the size of an allocation, but it does not map beyond its end.
  result = driver_.map(address_, bytes_, 0, handle_, 0);
  if (result == CUDA_ERROR_INVALID_VALUE) {
    return absl::InvalidArgumentError(
        absl::StrCat("the allocation does not have the ", bytes_, " bytes that the client stated"));
  }
  if (result != CUDA_SUCCESS) return Failed("cuMemMap", result);
  is_mapped_ = true;
  CUmemAccessDesc access = {};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, events_->device()};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  result = driver_.set_access(address_, bytes_, &access, 1);
  return result == CUDA_SUCCESS ? absl::OkStatus() : Failed("cuMemSetAccess", result);
}

absl::Status VmmMapping::Failed(const char* call, CUresult result) const {
  return absl::ResourceExhaustedError(driver_.What(call, result));
}

}  // namespace ringattn::worker
