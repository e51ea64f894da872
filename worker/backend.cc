#include "worker/backend.h"

#include <sys/sysinfo.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/observability/log.h"
#include "common/process/container_limits.h"
#include "worker/comm/tcp/tcp_ring_transport.h"
#include "worker/comm/wire/wire_metrics.h"
#include "worker/comm/wire/wire_ring_transport.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/device_name.h"
#include "worker/measurement/device_measurement.h"

#ifdef RINGATTN_WITH_CUDA
#include "worker/cuda_backend.h"
#endif

namespace ringattn::worker {
namespace {

constexpr absl::Duration kComputeMeasurement = absl::Milliseconds(20);  // for each kind of call
constexpr absl::Duration kCallMeasurement = absl::Milliseconds(10);

#ifndef RINGATTN_WITH_CUDA
absl::StatusOr<int> CountCudaDevices() {
  return absl::UnimplementedError("this worker was built without CUDA");
}
absl::StatusOr<Backend> MakeCudaBackend(const BackendOptions&, int) {
  return CountCudaDevices().status();
}
#endif

std::unique_ptr<RingTransport> MakeWireTransport(const BackendOptions& options,
                                                 std::shared_ptr<WireCounters> counters) {
  return std::make_unique<WireRingTransport>(WireTransportOptions{
      .host = options.ring_host,
      .connections =
          options.wire_connections > 0 ? options.wire_connections : kDefaultWireConnections,
      .tls = [security = options.cluster_security] { return security.material(); },
      .step_timeout = options.ring_step_timeout,
      .connect_timeout = options.ring_connect_timeout,
      .counters = std::move(counters)});
}

absl::StatusOr<Backend> MakeCpuBackend(const BackendOptions& options) {
  Backend backend;
  backend.memory_limit_bytes = options.memory_limit_bytes > 0
                                   ? options.memory_limit_bytes
                                   : MachineMemoryBytes() / 10 * 8 / options.local_workers;
  backend.device = std::make_unique<CpuDevice>(options.threads, backend.memory_limit_bytes);
  if (options.ring_transport == "gloo") {
    if (!options.cluster_security.is_plain()) {
      LogWarning(
          "--ring_transport=gloo does not encrypt exchanges between workers, although the cluster "
          "has certificates");
    }
    backend.transport = std::make_unique<TcpRingTransport>(
        TcpTransportOptions{.host = options.ring_host,
                            .step_timeout = options.ring_step_timeout,
                            .connect_timeout = options.ring_connect_timeout});
  } else {
    auto counters = std::make_shared<WireCounters>();
    backend.transport = MakeWireTransport(options, counters);
    backend.export_transport = [counters](Metrics* metrics) { ExportWire(metrics, counters); };
  }
  absl::StatusOr<std::vector<KernelRate>> rates = MeasureKernelRates(
      *backend.device, {.rows = 512, .heads = options.threads}, kComputeMeasurement);
  if (!rates.ok()) return rates.status();
  absl::StatusOr<double> call = MeasureCallSeconds(*backend.device, kCallMeasurement);
  if (!call.ok()) return call.status();
  backend.kernel_rates = *std::move(rates);
  backend.call_overhead_seconds = *call;
  return backend;
}

}  // namespace

int64_t MachineMemoryBytes() {
  struct sysinfo info {};
  sysinfo(&info);
  const int64_t total = static_cast<int64_t>(info.totalram) * info.mem_unit;
  return std::min(total, ReadContainerLimits().memory_bytes.value_or(total));
}

absl::StatusOr<Backend> MakeBackend(const BackendOptions& options) {
  absl::StatusOr<DeviceName> name = ParseDeviceName(options.device);
  if (!name.ok()) return name.status();
  const bool automatic = name->automatic;
  if (automatic) {
    const absl::StatusOr<int> count = CountCudaDevices();
    *name = ChooseDevice(count.value_or(0), options.local_workers, options.local_rank);
    LogInfo("device chosen",
            {{"cuda_devices",
              count.ok() ? absl::StrCat(*count) : std::string(count.status().message())},
             {"local_workers", options.local_workers},
             {"device", name->kind == DeviceKind::kCpu ? std::string("cpu")
                                                       : absl::StrCat("cuda:", name->cuda_index)}});
  }
  if (name->kind == DeviceKind::kCpu) return MakeCpuBackend(options);
  absl::StatusOr<Backend> backend = MakeCudaBackend(options, name->cuda_index);
  if (backend.ok()) return backend;
  return absl::InvalidArgumentError(
      absl::StrCat("--device=cuda:", name->cuda_index, ": ", backend.status().message()));
}

}  // namespace ringattn::worker
