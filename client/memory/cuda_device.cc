#include "client/memory/cuda_device.h"

#include <map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

namespace ringattn::client {

absl::StatusOr<const CudaDevice*> CudaDevice::Get(int device) {
  const absl::StatusOr<const CudaDriver*> loaded = CudaDriver::Load();
  if (!loaded.ok()) return loaded.status();
  const CudaDriver& driver = **loaded;
  int count = 0, handle = 0;
  absl::Status status = driver.Check("cuDeviceGetCount", driver.DeviceGetCount(&count));
  if (!status.ok()) return status;
  if (device < 0 || device >= count) {
    return absl::InvalidArgumentError(absl::StrCat("device: is ", device, "; this process can use ",
                                                   count, " CUDA devices, numbered from 0"));
  }
  static absl::Mutex mutex;
  static auto* const devices = new std::map<int, std::unique_ptr<CudaDevice>>();
  const absl::MutexLock lock(&mutex);
  std::unique_ptr<CudaDevice>& kept = (*devices)[device];
  if (kept != nullptr) return kept.get();
  cuda::Context context = nullptr;
  status = driver.Check("cuDeviceGet", driver.DeviceGet(&handle, device));
  if (status.ok()) {
    status = driver.Check("cuDevicePrimaryCtxRetain", driver.PrimaryCtxRetain(&context, handle));
  }
  if (!status.ok()) return status;
  kept.reset(new CudaDevice(&driver, context));
  return kept.get();
}

absl::Status CudaDevice::Synchronize() const {
  const InContext current(driver_, context_);
  if (!current.status().ok()) return current.status();
  return driver_.Check("cuCtxSynchronize", driver_.CtxSynchronize());
}

absl::Status CudaDevice::CopyToHost(void* host, uint64_t on_device, int64_t bytes) const {
  const InContext current(driver_, context_);
  if (!current.status().ok()) return current.status();
  return driver_.Check("cuMemcpyDtoH", driver_.MemcpyDtoH(host, on_device, bytes));
}

absl::Status CudaDevice::CopyFromHost(uint64_t on_device, const void* host, int64_t bytes) const {
  const InContext current(driver_, context_);
  if (!current.status().ok()) return current.status();
  return driver_.Check("cuMemcpyHtoD", driver_.MemcpyHtoD(on_device, host, bytes));
}

absl::Status CudaDevice::StartCopy(uint64_t to, uint64_t from, int64_t bytes) const {
  const InContext current(driver_, context_);
  if (!current.status().ok()) return current.status();
  return driver_.Check("cuMemcpyDtoD", driver_.MemcpyDtoD(to, from, bytes));
}

}  // namespace ringattn::client
