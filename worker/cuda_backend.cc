#include "worker/cuda_backend.h"

#include <utility>

#include "common/observability/log.h"
#include "worker/comm/lone/lone_ring_transport.h"
#include "worker/comm/nccl/nccl_ring_transport.h"
#include "worker/device/cuda/cuda_device.h"
#include "worker/service/measurement.h"

namespace ringattn {
namespace {

// 5e11 operations: a few milliseconds, and every SM has work.
constexpr MeasuredCall kMeasuredCall{.rows = 8192, .heads = 16};
constexpr absl::Duration kComputeMeasurement = absl::Milliseconds(60);
constexpr absl::Duration kCallMeasurement = absl::Milliseconds(10);

// What is free at the start belongs to this worker, but for what NCCL (buffers for every
// peer and channel) and the pool's own granularity take later.
int64_t DefaultMemoryLimit(const CudaDevice& device) { return device.free_bytes() / 10 * 9; }

}  // namespace

absl::StatusOr<int> CountCudaDevices() { return CudaDeviceCount(); }

absl::StatusOr<Backend> MakeCudaBackend(const BackendOptions& options, int cuda_index) {
  absl::StatusOr<std::unique_ptr<CudaDevice>> device =
      CudaDevice::Create({.device = cuda_index,
                          .pinned_pool_bytes = options.pinned_pool_bytes,
                          .on_broken = options.on_broken});
  if (!device.ok()) return device.status();
  Backend backend;
  backend.host_memory = false;
  backend.memory_limit_bytes = options.memory_limit_bytes > 0 ? options.memory_limit_bytes
                                                              : DefaultMemoryLimit(**device);
  absl::StatusOr<double> flops =
      MeasureFlopsPerSecond(**device, kMeasuredCall, kComputeMeasurement);
  if (!flops.ok()) return flops.status();
  absl::StatusOr<double> call = MeasureCallSeconds(**device, kCallMeasurement);
  if (!call.ok()) return call.status();
  // Before a ring is formed no peer can be measured. A copy from the host is what two
  // GPUs without a faster link exchange at; the ring measures itself once it stands.
  absl::StatusOr<double> link = (*device)->MeasureHostLinkBytesPerSecond();
  if (!link.ok()) return link.status();
  backend.flops_per_second = *flops;
  backend.link_bytes_per_second = *link;
  backend.call_overhead_seconds = *call;
  NcclTransportOptions nccl_options{.device = cuda_index,
                                    .step_timeout = options.transport.step_timeout,
                                    .connect_timeout = options.transport.connect_timeout,
                                    .on_stuck = options.on_broken,
                                    .library = options.nccl_library};
  if (options.nccl_max_ctas > 0) nccl_options.max_ctas = options.nccl_max_ctas;
  absl::StatusOr<std::unique_ptr<NcclRingTransport>> nccl = NcclRingTransport::Create(nccl_options);
  // One that was named has to be there.
  if (!nccl.ok() && !options.nccl_library.empty()) return nccl.status();
  backend.transport_name = "nccl";
  if (nccl.ok()) {
    LogInfo("ring transport", {{"nccl", (*nccl)->nccl_version()}});
    backend.transport = *std::move(nccl);
  } else {
    // One GPU needs no transport, and a machine with one may well lack the library.
    LogWarning("no NCCL: only rings of one GPU", {{"reason", nccl.status().message()}});
    backend.transport = std::make_unique<LoneRingTransport>(nccl.status());
  }
  backend.device = *std::move(device);
  return backend;
}

}  // namespace ringattn
