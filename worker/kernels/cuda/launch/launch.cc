#include "worker/kernels/cuda/launch/launch.h"

#include "absl/strings/str_cat.h"

namespace ringattn::worker::cuda {

absl::Status ToStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", cudaGetErrorString(error)));
}

void AddEntries(const TileKernel& kernel, std::vector<KernelEntry>& entries) {
  for (const void* address : {kernel.bf16, kernel.fp16, kernel.fp32}) {
    if (address != nullptr) entries.push_back({address, kernel.shared_bytes});
  }
}

absl::Status LoadKernel(const KernelEntry& entry) {
  cudaFuncAttributes attributes;
  absl::Status status =
      ToStatus(cudaFuncGetAttributes(&attributes, entry.address), "loading a kernel");
  if (!status.ok() || entry.shared_bytes == 0) return status;
  return ToStatus(cudaFuncSetAttribute(entry.address, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       entry.shared_bytes),
                  "shared memory of a kernel");
}

absl::Status LaunchTiles(const TileKernel& kernel, DType dtype, int64_t tiles, int64_t heads,
                         int64_t batch, const void* params, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(heads),
                  static_cast<unsigned>(batch));
  void* arguments[] = {const_cast<void*>(params)};
  return ToStatus(cudaLaunchKernel(kernel.Entry(dtype), grid, dim3(kernel.threads), arguments,
                                   kernel.shared_bytes, stream),
                  "attention kernel launch");
}

}  // namespace ringattn::worker::cuda
