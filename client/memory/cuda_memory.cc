#include "client/memory/cuda_memory.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/memory/cuda_device.h"

namespace ringattn::client {
namespace {

absl::Status Unfit(absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("data: ", why));
}

}  // namespace

absl::Status CudaMemory::UseDevice(int device) {
  int count = 0;
  absl::Status status = driver_.Check("cuDeviceGetCount", driver_.DeviceGetCount(&count));
  if (!status.ok()) return status;
  if (device < 0 || device >= count) {
    return absl::InvalidArgumentError(absl::StrCat("device: is ", device, "; this process can use ",
                                                   count, " CUDA devices, numbered from 0"));
  }
  int handle = 0;
  status = driver_.Check("cuDeviceGet", driver_.DeviceGet(&handle, device));
  if (!status.ok()) return status;
  cuda::Uuid uuid = {};
  status = driver_.Check("cuDeviceGetUuid", driver_.DeviceGetUuid(&uuid, handle));
  if (!status.ok()) return status;
  status = driver_.Check("cuDevicePrimaryCtxRetain", driver_.PrimaryCtxRetain(&context_, handle));
  if (!status.ok()) return status;
  device_ = handle;
  message_.cuda.device_uuid = std::string(uuid.bytes, sizeof(uuid.bytes));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const CudaMemory>> CudaMemory::Allocate(int device, int64_t bytes) {
  if (bytes < 1)
    return absl::InvalidArgumentError("bytes is less than 1; a region needs at least 1");
  const absl::StatusOr<const CudaDriver*> driver = CudaDriver::Load();
  if (!driver.ok()) return driver.status();
  std::shared_ptr<CudaMemory> memory(new CudaMemory(*driver));
  absl::Status status = memory->UseDevice(device);
  if (status.ok()) status = memory->Create(bytes);
  if (!status.ok()) return status;
  return memory;
}

absl::StatusOr<std::shared_ptr<const CudaMemory>> CudaMemory::AllocateLinear(int device,
                                                                             int64_t bytes) {
  if (bytes < 1)
    return absl::InvalidArgumentError("bytes is less than 1; a region needs at least 1");
  const absl::StatusOr<const CudaDriver*> driver = CudaDriver::Load();
  if (!driver.ok()) return driver.status();
  std::shared_ptr<CudaMemory> memory(new CudaMemory(*driver));
  absl::Status status = memory->UseDevice(device);
  if (!status.ok()) return status;
  const InContext current(**driver, memory->context_);
  if (!current.status().ok()) return current.status();
  status = (*driver)->Check("cuMemAlloc", (*driver)->MemAlloc(&memory->linear_, bytes));
  if (!status.ok()) {
    memory->linear_ = 0;
    return status;
  }
  memory->data_ = reinterpret_cast<uint8_t*>(memory->linear_);
  memory->bytes_ = bytes;
  status = memory->AdoptLinear();
  if (!status.ok()) return status;
  return memory;
}

absl::Status CudaMemory::Create(int64_t bytes) {
  const InContext current(driver_, context_);
  if (!current.status().ok()) return current.status();
  cuda::AllocationProperties properties;
  properties.location.id = device_;
  size_t page = 0;
  absl::Status status = driver_.Check(
      "cuMemGetAllocationGranularity",
      driver_.MemGetAllocationGranularity(&page, &properties, cuda::kGranularityMinimum));
  if (!status.ok()) return status;
  const auto pages = static_cast<int64_t>(page);
  bytes_ = (bytes + pages - 1) / pages * pages;
  status = driver_.Check("cuMemCreate", driver_.MemCreate(&allocation_, bytes_, &properties, 0));
  if (!status.ok()) {
    allocation_ = 0;
    return status;
  }
  status = driver_.Check("cuMemAddressReserve",
                         driver_.MemAddressReserve(&reserved_, bytes_, page, 0, 0));
  if (!status.ok()) {
    reserved_ = 0;
    return status;
  }
  status = driver_.Check("cuMemMap", driver_.MemMap(reserved_, bytes_, 0, allocation_, 0));
  if (!status.ok()) return status;
  is_mapped_ = true;
  cuda::AccessDescription access;
  access.location.id = device_;
  status = driver_.Check("cuMemSetAccess", driver_.MemSetAccess(reserved_, bytes_, &access, 1));
  if (!status.ok()) return status;
  data_ = reinterpret_cast<uint8_t*>(reserved_);
  message_.memory = MemoryKind::kCudaVmm;
  message_.cuda.bytes = static_cast<uint64_t>(bytes_);
  return Export(allocation_);
}

absl::Status CudaMemory::Export(cuda::Allocation allocation) {
  int fd = -1;
  const absl::Status status =
      driver_.Check("cuMemExportToShareableHandle",
                    driver_.MemExportToShareableHandle(&fd, allocation, cuda::kPosixDescriptor, 0));
  if (status.ok()) descriptor_ = ScopedDescriptor(fd);
  return status;
}

absl::StatusOr<std::shared_ptr<const CudaMemory>> CudaMemory::Adopt(void* data, int64_t bytes) {
  if (bytes < 1)
    return absl::InvalidArgumentError("bytes is less than 1; a region needs at least 1");
  const absl::StatusOr<const CudaDriver*> driver = CudaDriver::Load();
  if (!driver.ok()) return driver.status();
  std::shared_ptr<CudaMemory> memory(new CudaMemory(*driver));
  memory->data_ = static_cast<uint8_t*>(data);
  memory->bytes_ = bytes;
  int ordinal = -1;
  absl::Status status =
      (*driver)->Check("cuPointerGetAttribute",
                       (*driver)->PointerGetAttribute(&ordinal, cuda::kAttributeDeviceOrdinal,
                                                      reinterpret_cast<cuda::Pointer>(data)));
  if (!status.ok()) return Unfit(absl::StrCat("is not CUDA memory: ", status.message()));
  status = memory->UseDevice(ordinal);
  if (!status.ok()) return status;
  const InContext current(**driver, memory->context_);
  if (!current.status().ok()) return current.status();
  cuda::Allocation allocation = 0;
  if ((*driver)->MemRetainAllocationHandle(&allocation, data) == cuda::kSuccess) {
    status = memory->AdoptVmm(allocation);
    (*driver)->MemRelease(allocation);
  } else {
    status = memory->AdoptLinear();
  }
  if (!status.ok()) return status;
  return memory;
}

absl::Status CudaMemory::CheckInside(uint64_t base, uint64_t allocation_bytes) {
  const uint64_t offset = reinterpret_cast<uint64_t>(data_) - base;
  const auto bytes = static_cast<uint64_t>(bytes_);
  if (bytes > allocation_bytes || offset > allocation_bytes - bytes) {
    return Unfit(absl::StrCat("extends beyond its allocation, which has ", allocation_bytes,
                              " bytes and begins ", offset,
                              " before it; a region lies in one allocation, and a segment that "
                              "grows (PyTorch's expandable_segments) consists of several"));
  }
  message_.cuda.bytes = allocation_bytes;
  message_.cuda.offset = offset;
  return absl::OkStatus();
}

absl::Status CudaMemory::AdoptVmm(cuda::Allocation allocation) {
  cuda::Pointer base = 0;
  size_t allocated = 0;
  absl::Status status = driver_.Check(
      "cuMemGetAddressRange",
      driver_.MemGetAddressRange(&base, &allocated, reinterpret_cast<cuda::Pointer>(data_)));
  if (!status.ok()) return status;
  status = CheckInside(base, allocated);
  if (!status.ok()) return status;
  message_.memory = MemoryKind::kCudaVmm;
  status = Export(allocation);
  if (status.ok()) return status;
  return Unfit(
      absl::StrCat("its allocation cannot be exported, because it was made without "
                   "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: ",
                   status.message()));
}

absl::Status CudaMemory::AdoptLinear() {
  cuda::Pointer base = 0;
  size_t allocated = 0;
  absl::Status status = driver_.Check(
      "cuMemGetAddressRange",
      driver_.MemGetAddressRange(&base, &allocated, reinterpret_cast<cuda::Pointer>(data_)));
  if (!status.ok()) return Unfit(absl::StrCat("is not CUDA memory: ", status.message()));
  status = CheckInside(base, allocated);
  if (!status.ok()) return status;
  cuda::IpcHandle handle = {};
  status = driver_.Check("cuIpcGetMemHandle", driver_.IpcGetMemHandle(&handle, base));
  if (!status.ok()) {
    return Unfit(
        absl::StrCat("cannot be shared: only memory of cuMemCreate and of cudaMalloc can, "
                     "not that of a stream's pool: ",
                     status.message()));
  }
  message_.memory = MemoryKind::kCudaIpc;
  message_.cuda.exporter_pid = static_cast<uint32_t>(getpid());
  message_.cuda.ipc_handle = std::string(handle.bytes, sizeof(handle.bytes));
  return absl::OkStatus();
}

CudaMemory::~CudaMemory() {
  if (context_ == nullptr) return;
  {
    const InContext current(driver_, context_);
    if (is_mapped_) driver_.MemUnmap(reserved_, bytes_);
    if (reserved_ != 0) driver_.MemAddressFree(reserved_, bytes_);
    if (allocation_ != 0) driver_.MemRelease(allocation_);
    if (linear_ != 0) driver_.MemFree(linear_);
  }
  driver_.PrimaryCtxRelease(device_);
}

absl::Status CudaMemory::CopyToHost(void* host, const uint8_t* on_device, int64_t bytes) const {
  const InContext current(driver_, context_);
  if (!current.status().ok()) return current.status();
  return driver_.Check("cuMemcpyDtoH",
                       driver_.MemcpyDtoH(host, reinterpret_cast<cuda::Pointer>(on_device), bytes));
}

absl::Status CudaMemory::CopyFromHost(uint8_t* on_device, const void* host, int64_t bytes) const {
  const InContext current(driver_, context_);
  if (!current.status().ok()) return current.status();
  return driver_.Check("cuMemcpyHtoD",
                       driver_.MemcpyHtoD(reinterpret_cast<cuda::Pointer>(on_device), host, bytes));
}

}  // namespace ringattn::client
