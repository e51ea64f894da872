// The client library declares itself what it uses of CUDA's driver (client/memory/cuda_driver.h):
// that is what cuda.h says.
#include <cuda.h>

#include <cstddef>

#include "client/memory/cuda_driver.h"
#include "gtest/gtest.h"

namespace ringattn::client::cuda {
namespace {

static_assert(kSuccess == CUDA_SUCCESS && kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(kAllocationPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(kPosixDescriptor == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(kAccessReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(kGranularityMinimum == CU_MEM_ALLOC_GRANULARITY_MINIMUM);
static_assert(kAttributeDeviceOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(sizeof(Pointer) == sizeof(CUdeviceptr));
static_assert(sizeof(Allocation) == sizeof(CUmemGenericAllocationHandle));
static_assert(sizeof(Uuid) == sizeof(CUuuid) && sizeof(IpcHandle) == sizeof(CUipcMemHandle));
static_assert(sizeof(AllocationProperties) == sizeof(CUmemAllocationProp));
static_assert(offsetof(AllocationProperties, type) == offsetof(CUmemAllocationProp, type));
static_assert(offsetof(AllocationProperties, handle_types) ==
              offsetof(CUmemAllocationProp, requestedHandleTypes));
static_assert(offsetof(AllocationProperties, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(AllocationProperties, flags) == offsetof(CUmemAllocationProp, allocFlags));
static_assert(sizeof(AccessDescription) == sizeof(CUmemAccessDesc));
static_assert(offsetof(AccessDescription, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(offsetof(Location, id) == offsetof(CUmemLocation, id));

// That this compiled is the test; the names of functions are in cuda_memory_fake_test.
TEST(CudaAbiTest, IsCudas) { EXPECT_EQ(sizeof(AllocationProperties), 32u); }

}  // namespace
}  // namespace ringattn::client::cuda
