#include "worker/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <optional>
#include <utility>

#include "common/observability/log.h"
#include "worker/comm/mixed/mixed_ring_transport.h"
#include "worker/comm/nccl/nccl_ring_transport.h"
#include "worker/comm/peer/peer_ring_transport.h"
#include "worker/comm/single_rank/single_rank_transport.h"
#include "worker/device/cuda/cuda_device.h"
#include "worker/device/cuda/cuda_kv_caches.h"
#include "worker/device/cuda/pci_slot.h"
#include "worker/service/measurement.h"

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
  return options.ring_transport == "peer" ||
         (options.ring_transport == "auto" &&
          (options.local_workers > 1 || !options.peer_socket_dir.empty()));
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

// Returns null if NCCL is not available and need not be; *why is then set.
absl::StatusOr<std::unique_ptr<EngineTransport>> MakeNcclTransport(const BackendOptions& options,
                                                                   int cuda_index,
                                                                   absl::Status* why) {
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
  if (!options.nccl_library.empty() || options.ring_transport == "nccl") return nccl.status();
  // A single GPU needs no transport, and its machine may lack the library.
  LogWarning("NCCL is not available", {{"reason", nccl.status().message()}});
  *why = nccl.status();
  return nullptr;
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
       .host_id = options.host_id});
}

// `can_copy`: this worker could use copy engines.
void LogChoice(const RingPaths& paths, bool can_copy) {
  switch (paths.kind) {
    case RingPaths::Kind::kCopies:
      return LogInfo("the ring uses copy engines");
    case RingPaths::Kind::kNetwork:
      // This worker could copy directly but the ring cannot, which deserves a warning.
      if (can_copy) return LogWarning("the ring uses NCCL", {{"reason", paths.across}});
      return LogInfo("the ring uses NCCL");
    case RingPaths::Kind::kMixed:
      break;
  }
  LogInfo("the ring uses copy engines between ranks of one machine, and NCCL between others",
          {{"machines", paths.Islands()}, {"reason", paths.across}});
  if (paths.within.empty()) return;
  LogWarning("ranks of one machine exchange by NCCL", {{"reason", paths.within}});
}

// All flags and machines give the same kind of transport, so that every worker can read every
// other's blobs: rings may include machines with one worker and with several.
absl::StatusOr<std::unique_ptr<RingTransport>> MakeTransport(const BackendOptions& options,
                                                             int cuda_index, CudaDevice* device) {
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
  absl::Status no_network = absl::FailedPreconditionError("--ring_transport=peer");
  if (!only_peer) {
    absl::StatusOr<std::unique_ptr<EngineTransport>> nccl =
        MakeNcclTransport(options, cuda_index, &no_network);
    if (!nccl.ok()) return nccl.status();
    mixed.network = *std::move(nccl);
  }
  if (mixed.network == nullptr) {
    mixed.without_network = std::make_unique<SingleRankTransport>(no_network);
  }
  mixed.device = cuda_index;
  mixed.allocate = [device](int64_t bytes) { return device->Allocate(bytes); };
  mixed.step_timeout = options.ring_step_timeout;
  mixed.connect_timeout = options.ring_connect_timeout;
  mixed.on_choice = [can_copy = mixed.copies != nullptr](const RingPaths& paths) {
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
  absl::StatusOr<std::unique_ptr<RingTransport>> transport =
      MakeTransport(options, cuda_index, device->get());
  if (!transport.ok()) return transport.status();
  backend.transport = *std::move(transport);
  backend.device = *std::move(device);
  return backend;
}

}  // namespace ringattn::worker
