#include "worker/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/local_memory/local_socket.h"
#include "common/observability/log.h"
#include "common/process/loopback.h"
#include "worker/comm/mixed/mixed_ring_transport.h"
#include "worker/comm/mixed/ring_choice_metrics.h"
#include "worker/comm/nccl/nccl_ring_transport.h"
#include "worker/comm/nccl/rdma_devices.h"
#include "worker/comm/peer/peer_ring_transport.h"
#include "worker/comm/single_rank/single_rank_transport.h"
#include "worker/comm/wire/wire_metrics.h"
#include "worker/comm/wire_cuda/cuda_wire_transport.h"
#include "worker/device/cuda/cuda_device.h"
#include "worker/device/cuda/cuda_kv_caches.h"
#include "worker/device/cuda/pci_slot.h"
#include "worker/measurement/device_measurement.h"

namespace ringattn::worker {
namespace {

// 5e11 operations per forward: a few milliseconds on tensor cores, with work for every SM.
constexpr MeasuredCall kMeasuredCall{.rows = 8192, .heads = 16};
// For score terms and deterministic calls, whose exact kernels are slow: half a millisecond on
// tensor cores, tens of them without, and 50 MiB of bias and mask.
constexpr MeasuredCall kMeasuredCallWithTerms{.rows = 4096, .heads = 16, .pairs_per_head = false};
constexpr absl::Duration kComputeMeasurement = absl::Milliseconds(40);  // for each kind of call
constexpr absl::Duration kCallMeasurement = absl::Milliseconds(10);

// Free memory at the start, minus a reserve for what NCCL (buffers per peer and channel) and CUDA
// itself allocate later.
int64_t DefaultMemoryLimit(int64_t free_bytes) { return free_bytes / 10 * 9; }

// Copies between GPUs of this machine need memory that other processes can map.
bool SharesMemory(const BackendOptions& options) {
  if (options.ring_transport == "peer") return true;
  if (options.ring_transport == "nccl" || options.ring_transport == "wire") return false;
  return options.local_workers > 1 || !options.peer_socket_dir.empty();
}

bool OffersNccl(const BackendOptions& options) {
  return options.ring_transport == "nccl" || options.ring_transport == "peer+nccl" ||
         options.ring_transport == "auto";
}

bool OffersWire(const BackendOptions& options) {
  return options.ring_transport == "wire" || options.ring_transport == "peer+wire" ||
         options.ring_transport == "auto";
}

RegionSharing SharingOf(const BackendOptions& options) {
  if (options.peer_memory == "vmm") return RegionSharing::kVmm;
  return options.peer_memory == "ipc" ? RegionSharing::kIpc : RegionSharing::kVmmOrIpc;
}

// Logs how the ring's memory is shared, and why if it is not the preferred way.
void LogSharing(const CudaDevice& device) {
  const bool by_descriptor = device.regions().front().descriptor >= 0;
  if (device.why_not_vmm().empty()) {
    return LogInfo("ring memory", {{"peer_memory", by_descriptor ? "vmm" : "ipc"}});
  }
  LogWarning("ring memory is shared by legacy handles",
             {{"peer_memory", "ipc"}, {"reason", device.why_not_vmm()}});
}

// Returns null if NCCL is not available and need not be.
absl::StatusOr<std::unique_ptr<EngineTransport>> MakeNcclTransport(const BackendOptions& options,
                                                                   int cuda_index) {
  NcclTransportOptions nccl_options{.device = cuda_index,
                                    .step_timeout = options.ring_step_timeout,
                                    .connect_timeout = options.ring_connect_timeout,
                                    .on_stuck = options.on_broken,
                                    .library = options.nccl_library};
  if (options.nccl_max_ctas > 0) nccl_options.max_ctas = options.nccl_max_ctas;
  absl::StatusOr<std::unique_ptr<NcclRingTransport>> nccl = NcclRingTransport::Create(nccl_options);
  if (nccl.ok()) {
    LogInfo("ring transport", {{"nccl", (*nccl)->nccl_version()}});
    return *std::move(nccl);
  }
  // An explicitly requested NCCL must be available.
  if (!options.nccl_library.empty() || options.ring_transport != "auto") return nccl.status();
  LogWarning("NCCL is not available", {{"reason", nccl.status().message()}});
  return nullptr;
}

absl::StatusOr<std::unique_ptr<EngineTransport>> MakeWireTransport(
    const BackendOptions& options, int cuda_index, std::shared_ptr<WireCounters> counters) {
  const int by_default = options.cluster_security.is_plain() ? kDefaultCudaWireConnections
                                                             : kDefaultCudaWireTlsConnections;
  const int connections = options.wire_connections > 0 ? options.wire_connections : by_default;
  return CudaWireTransport::Create(
      {.device = cuda_index,
       .wire = {.host = options.ring_host,
                .connections = connections,
                .tls = [security = options.cluster_security] { return security.material(); },
                .step_timeout = options.ring_step_timeout,
                .connect_timeout = options.ring_connect_timeout,
                .counters = std::move(counters)},
       .engine = {.on_stuck = options.on_broken}});
}

// What decides between NCCL and sockets when a ring forms.
MixedBlob NetworkFacts(const BackendOptions& options) {
  const std::string rdma = ActiveRdmaDevices();
  if (!rdma.empty()) LogInfo("RDMA", {{"devices", rdma}});
  MixedBlob facts;
  facts.host = options.host_id.empty() ? HostId() : options.host_id;
  facts.tls = !options.cluster_security.is_plain();
  facts.insecure_ring = options.insecure_ring;
  facts.rdma = !rdma.empty();
  const bool is_ipv6 = options.ring_host.find(':') != std::string::npos;
  facts.loopback = IsLoopback(is_ipv6 ? absl::StrCat("[", options.ring_host, "]:0")
                                      : absl::StrCat(options.ring_host, ":0"));
  if (facts.tls && options.insecure_ring) {
    LogWarning("--insecure_ring permits exchanges between hosts in plain text, by NCCL");
  }
  return facts;
}

absl::StatusOr<std::unique_ptr<EngineTransport>> MakePeerTransport(const BackendOptions& options,
                                                                   int cuda_index,
                                                                   CudaDevice* device) {
  LogSharing(*device);
  return PeerRingTransport::Create(
      {.cuda_index = cuda_index,
       .regions = [device] { return device->regions(); },
       .allocate = [device](int64_t bytes) { return device->Allocate(bytes); },
       .step_timeout = options.ring_step_timeout,
       .connect_timeout = options.ring_connect_timeout,
       .on_stuck = options.on_broken,
       .socket_folder = options.peer_socket_dir,
       .host_id = options.host_id,
       .shared_gpu = options.shared_gpu});
}

// `can_copy`: this worker could use copy engines.
void LogChoice(const RingPaths& paths, bool can_copy) {
  const std::string network(NetworkName(paths.network.engine));
  switch (paths.kind) {
    case RingPaths::Kind::kCopies:
      return LogInfo("the ring uses copy engines");
    case RingPaths::Kind::kNetwork:
      LogInfo("the ring uses a network",
              {{"network", network}, {"network_reason", paths.network.reason}});
      // This worker could copy directly but the ring cannot, which deserves a warning.
      if (can_copy) LogWarning("the ring uses no copy engines", {{"reason", paths.across}});
      return;
    case RingPaths::Kind::kMixed:
      break;
  }
  LogInfo("the ring uses copy engines between ranks of one machine, and a network between others",
          {{"machines", paths.Islands()},
           {"reason", paths.across},
           {"network", network},
           {"network_reason", paths.network.reason}});
  if (paths.within.empty()) return;
  LogWarning("ranks of one machine exchange over the network",
             {{"network", network}, {"reason", paths.within}});
}

// All flags and machines give the same kind of transport, so that every worker can read every
// other's blobs: rings may include machines with one worker and with several.
absl::StatusOr<std::unique_ptr<RingTransport>> MakeTransport(
    const BackendOptions& options, int cuda_index, CudaDevice* device,
    std::shared_ptr<WireCounters> counters, std::shared_ptr<LastNetworkEngine> last) {
  const bool only_peer = options.ring_transport == "peer";
  MixedTransportOptions mixed;
  if (SharesMemory(options)) {
    absl::StatusOr<std::unique_ptr<EngineTransport>> made =
        MakePeerTransport(options, cuda_index, device);
    if (!made.ok() && only_peer) return made.status();
    if (made.ok()) {
      mixed.copies = *std::move(made);
    } else {
      LogWarning("copy engines are not available between this machine's GPUs",
                 {{"reason", made.status().message()}});
    }
  }
  if (OffersNccl(options)) {
    absl::StatusOr<std::unique_ptr<EngineTransport>> nccl = MakeNcclTransport(options, cuda_index);
    if (!nccl.ok()) return nccl.status();
    mixed.nccl = *std::move(nccl);
  }
  if (OffersWire(options)) {
    absl::StatusOr<std::unique_ptr<EngineTransport>> wire =
        MakeWireTransport(options, cuda_index, std::move(counters));
    if (!wire.ok()) return wire.status();
    mixed.wire = *std::move(wire);
  }
  if (only_peer) {
    mixed.without_network = std::make_unique<SingleRankTransport>(
        absl::FailedPreconditionError("--ring_transport=peer"));
  }
  mixed.facts = NetworkFacts(options);
  mixed.device = cuda_index;
  mixed.allocate = [device](int64_t bytes) { return device->Allocate(bytes); };
  mixed.step_timeout = options.ring_step_timeout;
  mixed.connect_timeout = options.ring_connect_timeout;
  mixed.on_choice = [can_copy = mixed.copies != nullptr, last](const RingPaths& paths) {
    last->store(paths.network.engine);
    LogChoice(paths, can_copy);
  };
  return MixedRingTransport::Create(std::move(mixed));
}

// Returns the device's position in the machine; nullopt if CUDA does not report it.
std::optional<uint64_t> DeviceSlot(int device) {
  int domain = 0, bus = 0, number = 0;
  if (cudaDeviceGetAttribute(&domain, cudaDevAttrPciDomainId, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bus, cudaDevAttrPciBusId, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&number, cudaDevAttrPciDeviceId, device) != cudaSuccess) {
    return std::nullopt;
  }
  return PciSlot(
      {static_cast<uint32_t>(domain), static_cast<uint32_t>(bus), static_cast<uint32_t>(number)});
}

}  // namespace

absl::StatusOr<int> CountCudaDevices() { return CudaDeviceCount(); }

absl::StatusOr<Backend> MakeCudaBackend(const BackendOptions& options, int cuda_index) {
  Backend backend;
  backend.host_memory = false;
  backend.memory_limit_bytes = options.memory_limit_bytes;
  if (backend.memory_limit_bytes == 0) {
    absl::StatusOr<int64_t> free = CudaFreeBytes(cuda_index);
    if (!free.ok()) return free.status();
    backend.memory_limit_bytes = DefaultMemoryLimit(*free);
  }
  absl::StatusOr<std::unique_ptr<CudaDevice>> device = CudaDevice::Create(
      {.device = cuda_index,
       .pinned_pool_bytes = options.pinned_pool_bytes,
       .in_regions = SharesMemory(options),
       .region_sharing = SharingOf(options),
       .memory_limit_bytes = backend.memory_limit_bytes,
       .kernel_family = options.kernel_family == "auto" ? "" : options.kernel_family,
       .make_kv_caches = MakeCudaKvCaches,
       .on_broken = options.on_broken});
  if (!device.ok()) return device.status();
  absl::StatusOr<std::vector<KernelRate>> rates =
      MeasureKernelRates(**device, kMeasuredCall, kComputeMeasurement, &kMeasuredCallWithTerms);
  if (!rates.ok()) return rates.status();
  absl::StatusOr<double> call = MeasureCallSeconds(**device, kCallMeasurement);
  if (!call.ok()) return call.status();
  backend.kernel_rates = *std::move(rates);
  backend.call_overhead_seconds = *call;
  backend.device_slot = DeviceSlot(cuda_index);
  auto counters = std::make_shared<WireCounters>();
  auto last = std::make_shared<LastNetworkEngine>(NetworkEngine::kNone);
  absl::StatusOr<std::unique_ptr<RingTransport>> transport =
      MakeTransport(options, cuda_index, device->get(), counters, last);
  if (!transport.ok()) return transport.status();
  backend.export_transport = [counters, last](Metrics* metrics) {
    ExportWire(metrics, counters);
    ExportRingChoice(metrics, last);
  };
  backend.transport = *std::move(transport);
  backend.device = *std::move(device);
  return backend;
}

}  // namespace ringattn::worker
