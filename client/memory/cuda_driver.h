// CudaDriver: the CUDA driver calls that a client uses. They are loaded at the first use, so the
// library needs neither CUDA's headers nor its libraries and runs without a driver.
// Tests: cuda_memory_test.cc, tests/cuda_memory.
#ifndef RINGATTN_CLIENT_MEMORY_CUDA_DRIVER_H_
#define RINGATTN_CLIENT_MEMORY_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringattn::client {

// Declarations of cuda.h. tests/cuda_memory/cuda_abi_test.cc compares the two.
namespace cuda {

using Result = int;  // 0: success
using Context = void*;
using Pointer = unsigned long long;
using Allocation = unsigned long long;

inline constexpr Result kSuccess = 0;
inline constexpr Result kOutOfMemory = 2;
inline constexpr int kLocationDevice = 1;
inline constexpr int kAllocationPinned = 1;
inline constexpr int kPosixDescriptor = 1;
inline constexpr int kAccessReadWrite = 3;
inline constexpr int kGranularityMinimum = 0;
inline constexpr int kAttributeDeviceOrdinal = 9;

struct Location {
  int type = kLocationDevice;
  int id = 0;
};
struct AllocationProperties {
  int type = kAllocationPinned;
  int handle_types = kPosixDescriptor;
  Location location;
  void* windows_only = nullptr;
  unsigned char flags[8] = {};
};
struct AccessDescription {
  Location location;
  int flags = kAccessReadWrite;
};
struct Uuid {
  char bytes[16];
};
struct IpcHandle {
  char bytes[64];
};

}  // namespace cuda

// Immutable; exists until the process ends. Thread safe.
class CudaDriver {
 public:
  // Returns FAILED_PRECONDITION if this machine has no driver or the driver lacks a call, which the
  // message names.
  static absl::StatusOr<const CudaDriver*> Load();

  // Returns OK, RESOURCE_EXHAUSTED if the driver is out of memory, or INTERNAL. The message has the
  // form "cuMemMap: CUDA_ERROR_... (1)".
  absl::Status Check(const char* call, cuda::Result result) const;

  cuda::Result (*Init)(unsigned flags);
  cuda::Result (*GetErrorName)(cuda::Result error, const char** name);
  cuda::Result (*DeviceGetCount)(int* count);
  cuda::Result (*DeviceGet)(int* device, int ordinal);
  cuda::Result (*DeviceGetUuid)(cuda::Uuid* uuid, int device);
  cuda::Result (*PrimaryCtxRetain)(cuda::Context* context, int device);
  cuda::Result (*PrimaryCtxRelease)(int device);
  cuda::Result (*CtxPushCurrent)(cuda::Context context);
  cuda::Result (*CtxPopCurrent)(cuda::Context* context);
  cuda::Result (*CtxSynchronize)();
  cuda::Result (*PointerGetAttribute)(void* data, int attribute, cuda::Pointer pointer);
  cuda::Result (*MemGetAddressRange)(cuda::Pointer* base, size_t* bytes, cuda::Pointer pointer);
  cuda::Result (*IpcGetMemHandle)(cuda::IpcHandle* handle, cuda::Pointer pointer);
  cuda::Result (*MemAlloc)(cuda::Pointer* pointer, size_t bytes);
  cuda::Result (*MemFree)(cuda::Pointer pointer);
  cuda::Result (*MemcpyDtoH)(void* host, cuda::Pointer device, size_t bytes);
  cuda::Result (*MemcpyHtoD)(cuda::Pointer device, const void* host, size_t bytes);
  cuda::Result (*MemcpyDtoD)(cuda::Pointer to, cuda::Pointer from, size_t bytes);
  cuda::Result (*MemGetAllocationGranularity)(size_t* bytes,
                                              const cuda::AllocationProperties* properties,
                                              int option);
  cuda::Result (*MemCreate)(cuda::Allocation* allocation, size_t bytes,
                            const cuda::AllocationProperties* properties, unsigned long long flags);
  cuda::Result (*MemRelease)(cuda::Allocation allocation);
  cuda::Result (*MemRetainAllocationHandle)(cuda::Allocation* allocation, void* address);
  cuda::Result (*MemExportToShareableHandle)(void* handle, cuda::Allocation allocation, int type,
                                             unsigned long long flags);
  cuda::Result (*MemAddressReserve)(cuda::Pointer* pointer, size_t bytes, size_t alignment,
                                    cuda::Pointer wish, unsigned long long flags);
  cuda::Result (*MemAddressFree)(cuda::Pointer pointer, size_t bytes);
  cuda::Result (*MemMap)(cuda::Pointer pointer, size_t bytes, size_t offset,
                         cuda::Allocation allocation, unsigned long long flags);
  cuda::Result (*MemUnmap)(cuda::Pointer pointer, size_t bytes);
  cuda::Result (*MemSetAccess)(cuda::Pointer pointer, size_t bytes,
                               const cuda::AccessDescription* access, size_t count);

 private:
  CudaDriver() = default;
  absl::Status FindAll();
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_MEMORY_CUDA_DRIVER_H_
