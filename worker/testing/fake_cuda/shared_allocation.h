// A GPU allocation of a client, for tests with the fake driver: what a client in another process
// would own and pass on.
#ifndef RINGATTN_WORKER_TESTING_FAKE_CUDA_SHARED_ALLOCATION_H_
#define RINGATTN_WORKER_TESTING_FAKE_CUDA_SHARED_ALLOCATION_H_

#include <cuda.h>

#include <cstdint>
#include <string>

#include "common/local_memory/attach_protocol.h"
#include "common/local_memory/scoped_descriptor.h"
#include "gtest/gtest.h"

namespace ringattn::worker {

// REQUIRES: bytes is a multiple of 2 MiB.
class FakeAllocation {
 public:
  explicit FakeAllocation(int64_t bytes, int device = 0) : bytes_(bytes), device_(device) {
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    CUmemGenericAllocationHandle handle = 0;
    EXPECT_EQ(cuMemCreate(&handle, bytes, &properties, 0), CUDA_SUCCESS);
    EXPECT_EQ(cuMemAddressReserve(&address_, bytes, 0, 0, 0), CUDA_SUCCESS);
    EXPECT_EQ(cuMemMap(address_, bytes, 0, handle, 0), CUDA_SUCCESS);
    const CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, device},
                                    CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    EXPECT_EQ(cuMemSetAccess(address_, bytes, &access, 1), CUDA_SUCCESS);
    int fd = -1;
    EXPECT_EQ(
        cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        CUDA_SUCCESS);
    descriptor_ = ScopedDescriptor(fd);
    EXPECT_EQ(cuMemRelease(handle), CUDA_SUCCESS);
  }
  ~FakeAllocation() {
    cuMemUnmap(address_, bytes_);
    cuMemAddressFree(address_, bytes_);
  }
  FakeAllocation(const FakeAllocation&) = delete;
  FakeAllocation& operator=(const FakeAllocation&) = delete;

  uint8_t* data() const { return reinterpret_cast<uint8_t*>(address_); }
  int descriptor() const { return descriptor_.get(); }
  std::string uuid() const {
    std::string uuid(kDeviceUuidBytes, '\0');
    uuid.back() = static_cast<char>(device_ + 1);
    return uuid;
  }
  // Returns the client's description of the allocation.
  CudaAllocation Describe(uint64_t offset = 0) const {
    CudaAllocation stated;
    stated.device_uuid = uuid();
    stated.bytes = static_cast<uint64_t>(bytes_);
    stated.offset = offset;
    return stated;
  }

 private:
  const int64_t bytes_;
  const int device_;
  CUdeviceptr address_ = 0;
  ScopedDescriptor descriptor_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_TESTING_FAKE_CUDA_SHARED_ALLOCATION_H_
