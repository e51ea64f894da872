#include "worker/comm/cuda/stream_flags.h"

#include "absl/strings/str_cat.h"
#include "worker/device/cuda/cuda_status.h"

namespace ringattn::worker {
namespace {

constexpr unsigned int kInterfaceVersion = 12000;

absl::Status DriverStatus(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(call, ": error ", static_cast<int>(result)));
}

}  // namespace

absl::StatusOr<const StreamFlags*> StreamFlags::Load() {
  static const absl::StatusOr<const StreamFlags*>* loaded = [] {
    auto* flags = new StreamFlags();
    const absl::Status status = flags->Init();
    return status.ok() ? new absl::StatusOr<const StreamFlags*>(flags)
                       : new absl::StatusOr<const StreamFlags*>(status);
  }();
  return *loaded;
}

absl::Status StreamFlags::Init() {
  // Looked up at run time, so that the program starts without a driver.
  const auto find = [](const char* name, Operation* operation) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, kInterfaceVersion,
                                                               cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || function == nullptr) {
      (void)cudaGetLastError();
      return absl::FailedPreconditionError(absl::StrCat("the CUDA driver has no ", name));
    }
    *operation = reinterpret_cast<Operation>(function);
    return absl::OkStatus();
  };
  absl::Status status = find("cuStreamWriteValue64", &write_);
  if (status.ok()) status = find("cuStreamWaitValue64", &wait_);
  return status;
}

absl::Status StreamFlags::Write(cudaStream_t stream, uint64_t* flag, uint64_t value) const {
  return DriverStatus(
      write_(stream, reinterpret_cast<CUdeviceptr>(flag), value, CU_STREAM_WRITE_VALUE_DEFAULT),
      "cuStreamWriteValue64");
}

absl::Status StreamFlags::WaitAtLeast(cudaStream_t stream, uint64_t* flag, uint64_t value) const {
  return DriverStatus(
      wait_(stream, reinterpret_cast<CUdeviceptr>(flag), value, CU_STREAM_WAIT_VALUE_GEQ),
      "cuStreamWaitValue64");
}

}  // namespace ringattn::worker
