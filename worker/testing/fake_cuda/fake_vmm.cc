// The part of CUDA's driver that shares memory between processes. Allocations are memfds, so
// processes see each other's writes, and exported descriptors are real. Linked next to the fake
// runtime (fake_cuda.cc), or built with FAKE_VMM_OPAQUE as a separate libcuda.so.1 for programs
// that load a driver. In that build the host can reach device memory only through the driver's
// copies, as with a GPU.
#include "worker/testing/fake_cuda/fake_vmm.h"

#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace {

constexpr size_t kGranularity = size_t{2} << 20;
constexpr char kName[] = "fake_vmm_gpu";

#ifdef FAKE_VMM_OPAQUE
constexpr int kDeviceAccess = PROT_NONE;
#else
constexpr int kDeviceAccess = PROT_READ | PROT_WRITE;
#endif

int DeviceCount() {
  const char* count = std::getenv("FAKE_GPUS");
  return count == nullptr ? 3 : std::atoi(count);
}

struct Allocation {
  Allocation(int fd, int device, size_t bytes, bool exportable)
      : fd(fd), device(device), bytes(bytes), exportable(exportable) {
    ++FakeVmm().handles;
  }
  ~Allocation() {
    close(fd);
    --FakeVmm().handles;
  }
  const int fd;
  const int device;
  const size_t bytes;
  const bool exportable;
};

struct Mapping {
  size_t bytes = 0;
  std::shared_ptr<Allocation> allocation;
};

struct Tables {
  std::mutex mutex;
  std::map<CUdeviceptr, Mapping> mappings;
  std::map<CUdeviceptr, size_t> linear;  // from cudaMalloc and cuMemAlloc
  std::map<CUdeviceptr, int> devices;    // from cuMemAlloc
};
Tables& All() {
  static auto* tables = new Tables();
  return *tables;
}

// A handle is a pointer to a shared pointer to its allocation.
std::shared_ptr<Allocation>& Of(CUmemGenericAllocationHandle handle) {
  return *reinterpret_cast<std::shared_ptr<Allocation>*>(handle);
}
CUmemGenericAllocationHandle NewHandle(std::shared_ptr<Allocation> allocation) {
  return reinterpret_cast<CUmemGenericAllocationHandle>(
      new std::shared_ptr<Allocation>(std::move(allocation)));
}

// Returns the entry that contains `pointer`, or the end. REQUIRES: the tables' lock is held.
template <typename Map, typename Size>
typename Map::iterator Holding(Map& map, CUdeviceptr pointer, const Size& size) {
  auto after = map.upper_bound(pointer);
  if (after == map.begin()) return map.end();
  --after;
  return pointer < after->first + size(after->second) ? after : map.end();
}
std::map<CUdeviceptr, Mapping>::iterator MappingOf(CUdeviceptr pointer) {
  return Holding(All().mappings, pointer, [](const Mapping& m) { return m.bytes; });
}
std::map<CUdeviceptr, size_t>::iterator LinearOf(CUdeviceptr pointer) {
  return Holding(All().linear, pointer, [](size_t bytes) { return bytes; });
}

// Parses "/memfd:fake_vmm_gpu1 (deleted)" as device 1. Returns a negative value for memory that is
// not this driver's.
int DeviceOf(int fd) {
  char path[64], name[256] = {};
  std::snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  if (readlink(path, name, sizeof(name) - 1) <= 0) return -1;
  std::string prefix = "/memfd:";
  prefix += kName;
  if (std::strncmp(name, prefix.c_str(), prefix.size()) != 0) return -1;
  return std::atoi(name + prefix.size());
}

CUresult CopyHost(CUdeviceptr device, void* host, size_t bytes, bool to_host) {
  const std::lock_guard<std::mutex> lock(All().mutex);
  const auto mapping = MappingOf(device);
  if (mapping == All().mappings.end()) {
    const auto linear = LinearOf(device);
    if (linear == All().linear.end() || device + bytes > linear->first + linear->second) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    void* const memory = reinterpret_cast<void*>(device);
    std::memcpy(to_host ? host : memory, to_host ? memory : host, bytes);
    return CUDA_SUCCESS;
  }
  const off_t offset = static_cast<off_t>(device - mapping->first);
  if (offset + bytes > mapping->second.bytes) return CUDA_ERROR_INVALID_VALUE;
  const int fd = mapping->second.allocation->fd;
  const ssize_t moved = to_host ? pread(fd, host, bytes, offset) : pwrite(fd, host, bytes, offset);
  return moved == static_cast<ssize_t>(bytes) ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

}  // namespace

FakeVmmState& FakeVmm() {
  static auto* state = new FakeVmmState();
  return *state;
}

void FakeVmmNote(void* base, size_t bytes) {
  const std::lock_guard<std::mutex> lock(All().mutex);
  if (bytes > 0) {
    All().linear[reinterpret_cast<CUdeviceptr>(base)] = bytes;
  } else {
    All().linear.erase(reinterpret_cast<CUdeviceptr>(base));
  }
}

extern "C" {

CUresult cuInit(unsigned int) { return CUDA_SUCCESS; }

CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "fake error";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  *count = DeviceCount();
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < DeviceCount() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = 0;
  if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ||
      attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) {
    *value = FakeVmm().no_vmm ? 0 : 1;
  }
  return CUDA_SUCCESS;
}

// Same value as cudaGetDeviceProperties.
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  std::memset(uuid, 0, sizeof(*uuid));
  uuid->bytes[15] = static_cast<char>(device + 1);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(static_cast<intptr_t>(device + 1));
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent(CUcontext*) { return CUDA_SUCCESS; }
// Counts calls. Programs that load the library find the counter by name.
__attribute__((visibility("default"))) unsigned fake_vmm_synchronized = 0;
CUresult cuCtxSynchronize() {
  __atomic_add_fetch(&fake_vmm_synchronized, 1, __ATOMIC_RELAXED);
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) return CUDA_ERROR_NOT_SUPPORTED;
  const std::lock_guard<std::mutex> lock(All().mutex);
  const auto mapping = MappingOf(pointer);
  if (mapping != All().mappings.end()) {
    *static_cast<int*>(data) = mapping->second.allocation->device;
    return CUDA_SUCCESS;
  }
  const auto linear = LinearOf(pointer);
  if (linear == All().linear.end()) return CUDA_ERROR_INVALID_VALUE;
  *static_cast<int*>(data) = All().devices[linear->first];
  return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
  const std::lock_guard<std::mutex> lock(All().mutex);
  const auto mapping = MappingOf(pointer);
  if (mapping != All().mappings.end()) {
    *base = mapping->first;
    *bytes = mapping->second.bytes;
    return CUDA_SUCCESS;
  }
  const auto linear = LinearOf(pointer);
  if (linear == All().linear.end()) return CUDA_ERROR_NOT_FOUND;
  *base = linear->first;
  *bytes = linear->second;
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr* pointer, size_t bytes) {
  *pointer = reinterpret_cast<CUdeviceptr>(std::malloc(bytes));
  FakeVmmNote(reinterpret_cast<void*>(*pointer), bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr pointer) {
  FakeVmmNote(reinterpret_cast<void*>(pointer), 0);
  std::free(reinterpret_cast<void*>(pointer));
  return CUDA_SUCCESS;
}
// Same as cudaIpcGetMemHandle: the address and the size.
CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr pointer) {
  const std::lock_guard<std::mutex> lock(All().mutex);
  const auto linear = LinearOf(pointer);
  if (linear == All().linear.end()) return CUDA_ERROR_INVALID_VALUE;
  std::memset(handle, 0, sizeof(*handle));
  std::memcpy(handle->reserved, &linear->first, sizeof(linear->first));
  std::memcpy(handle->reserved + sizeof(linear->first), &linear->second, sizeof(linear->second));
  return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoH(void* host, CUdeviceptr device, size_t bytes) {
  return CopyHost(device, host, bytes, /*to_host=*/true);
}
CUresult cuMemcpyHtoD(CUdeviceptr device, const void* host, size_t bytes) {
  return CopyHost(device, const_cast<void*>(host), bytes, /*to_host=*/false);
}

CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  std::string through(bytes, 0);
  const CUresult result = CopyHost(from, through.data(), bytes, /*to_host=*/true);
  if (result != CUDA_SUCCESS) return result;
  return CopyHost(to, through.data(), bytes, /*to_host=*/false);
}

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                     const CUmemAllocationProp* properties, unsigned long long) {
  const int device = properties->location.id;
  if (bytes == 0 || bytes % kGranularity != 0 || device < 0 || device >= DeviceCount() ||
      properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (FakeVmm().refuse_create) return CUDA_ERROR_NOT_PERMITTED;
  if (FakeVmm().hold_creates) ++FakeVmm().held_creates;
  while (FakeVmm().hold_creates) std::this_thread::sleep_for(std::chrono::microseconds(100));
  if (bytes > size_t{1} << 40) return CUDA_ERROR_OUT_OF_MEMORY;
  const int fd = memfd_create((kName + std::to_string(device)).c_str(), MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  const bool exportable =
      (properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0;
  *handle = NewHandle(std::make_shared<Allocation>(fd, device, bytes, exportable));
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  delete &Of(handle);
  return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* shared, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !Of(handle)->exportable) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int fd = fcntl(Of(handle)->fd, F_DUPFD_CLOEXEC, 0);
  std::memcpy(shared, &fd, sizeof(fd));
  return fd >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shared,
                                        CUmemAllocationHandleType) {
  if (FakeVmm().hold_imports) ++FakeVmm().held_imports;
  while (FakeVmm().hold_imports) std::this_thread::sleep_for(std::chrono::microseconds(100));
  const int given = static_cast<int>(reinterpret_cast<intptr_t>(shared));
  const int device = DeviceOf(given);
  struct stat file = {};
  if (device < 0 || fstat(given, &file) != 0) return CUDA_ERROR_INVALID_VALUE;
  const int fd = fcntl(given, F_DUPFD_CLOEXEC, 0);
  *handle =
      NewHandle(std::make_shared<Allocation>(fd, device, static_cast<size_t>(file.st_size), true));
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties,
                                                CUmemGenericAllocationHandle handle) {
  std::memset(properties, 0, sizeof(*properties));
  properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties->location = {CU_MEM_LOCATION_TYPE_DEVICE, Of(handle)->device};
  return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  const std::lock_guard<std::mutex> lock(All().mutex);
  const auto mapping = MappingOf(reinterpret_cast<CUdeviceptr>(address));
  if (mapping == All().mappings.end()) return CUDA_ERROR_INVALID_VALUE;
  *handle = NewHandle(mapping->second.allocation);
  return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t bytes, size_t, CUdeviceptr,
                             unsigned long long) {
  void* const data = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *pointer = reinterpret_cast<CUdeviceptr>(data);
  ++FakeVmm().reservations;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
  munmap(reinterpret_cast<void*>(pointer), bytes);
  --FakeVmm().reservations;
  return CUDA_SUCCESS;
}

// Without access, as on a GPU.
CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long) {
  const std::shared_ptr<Allocation>& allocation = Of(handle);
  if (offset != 0 || bytes % kGranularity != 0 || bytes > allocation->bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  void* const data = mmap(reinterpret_cast<void*>(pointer), bytes, PROT_NONE,
                          MAP_SHARED | MAP_FIXED, allocation->fd, 0);
  if (data == MAP_FAILED) return CUDA_ERROR_MAP_FAILED;
  const std::lock_guard<std::mutex> lock(All().mutex);
  All().mappings[pointer] = {bytes, allocation};
  ++FakeVmm().mappings;
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc* access,
                        size_t count) {
  if (FakeVmm().refuse_access) return CUDA_ERROR_NOT_SUPPORTED;
  if (count != 1 || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE ||
      access->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      access->location.id >= DeviceCount()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int changed = mprotect(reinterpret_cast<void*>(pointer), bytes, kDeviceAccess);
  return changed == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
  const std::lock_guard<std::mutex> lock(All().mutex);
  if (All().mappings.erase(pointer) == 0) return CUDA_ERROR_INVALID_VALUE;
  mmap(reinterpret_cast<void*>(pointer), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED,
       -1, 0);
  --FakeVmm().mappings;
  return CUDA_SUCCESS;
}

#ifdef FAKE_VMM_OPAQUE
// The part of streams that programs without the runtime use (tests/gpu/import_rates.py). Everything
// is done synchronously.
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuStreamCreate(CUstream* stream, unsigned int) {
  *stream = nullptr;
  return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) {
  return cuMemcpyDtoD(to, from, bytes);
}
#endif

}  // extern "C"
