#include "worker/kernels/cuda/cuda_kernels.h"

#include "worker/kernels/cuda/launch/elementwise.h"
#include "worker/kernels/cuda/launch/launch.h"
#include "worker/kernels/cuda/part_rows.h"
#include "worker/kernels/cuda/probabilities.h"
#include "worker/kernels/cuda/zero_rows.h"

namespace ringattn::worker::cuda {

absl::StatusOr<DeviceInfo> QueryDevice(int device) {
  DeviceInfo info;
  cudaError_t error =
      cudaDeviceGetAttribute(&info.sm_count, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&info.compute_major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&info.shared_bytes_per_block,
                                   cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  absl::Status status = ToStatus(error, "device query");
  if (!status.ok()) return status;
  return info;
}

absl::Status LoadKernels(const DeviceInfo& device) {
  std::vector<KernelEntry> entries;
  for (const void* address : ElementwiseKernels()) entries.push_back({address, 0});
  for (const void* address : PartRowsKernels()) entries.push_back({address, 0});
  for (const void* address : ProbabilityKernels()) entries.push_back({address, 0});
  for (const void* address : ZeroRowsKernels()) entries.push_back({address, 0});
  for (const KernelFamily& family : Families()) {
    for (const KernelEntry& entry : family.entries(device)) entries.push_back(entry);
  }
  for (const KernelEntry& entry : entries) {
    if (absl::Status status = LoadKernel(entry); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status StartDelta(const DeltaCall& call, cudaStream_t stream) {
  return ToStatus(LaunchDelta(call, stream), "delta launch");
}

absl::Status StartSinkGradient(const SinkGradientCall& call, cudaStream_t stream) {
  return ToStatus(LaunchSinkGradient(call, stream), "sink gradient launch");
}

absl::Status StartZero(const ZeroCall& call, cudaStream_t stream) {
  if (call.bytes == 0) return absl::OkStatus();
  return ToStatus(cudaMemsetAsync(call.target, 0, call.bytes, stream), "zero");
}

absl::Status StartAdd(const AddCall& call, cudaStream_t stream) {
  return ToStatus(LaunchAdd(call, stream), "add launch");
}

absl::Status StartConvert(const ConvertCall& call, cudaStream_t stream) {
  return ToStatus(LaunchConvert(call, stream), "convert launch");
}

absl::Status StartMerge(const MergeCall& call, cudaStream_t stream) {
  return ToStatus(LaunchMerge(call, stream), "merge launch");
}

absl::Status StartCopy(const CopyCall& call, cudaStream_t stream) {
  return ToStatus(LaunchCopy(call, stream), "copy launch");
}

}  // namespace ringattn::worker::cuda
