#include "worker/comm/peer/peer_ring_transport.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"
#include "common/security/token.h"
#include "worker/comm/cuda/device_uuid.h"
#include "worker/comm/cuda/handshake.h"
#include "worker/comm/cuda/stream_communicator.h"
#include "worker/device/cuda/cuda_status.h"

namespace ringattn::worker {
namespace {

void Unmap(const PeerMapping& peer) {
  for (const DeviceRegion& region : peer.regions) {
    if (peer.mapper.unmap) peer.mapper.unmap(region.base);
  }
}

// A live rank replies at once; the ring's thread waits for it.
constexpr absl::Duration kLateRegionTimeout = absl::Seconds(5);

absl::Status MemoryOf(int peer, const absl::Status& status) {
  return {status.code(), absl::StrCat("memory of rank ", peer, ": ", status.message())};
}

absl::Status Cancelled() { return absl::CancelledError("forming the ring was cancelled"); }

}  // namespace

absl::StatusOr<std::unique_ptr<PeerRingTransport>> PeerRingTransport::Create(
    PeerTransportOptions options) {
  absl::StatusOr<const StreamFlags*> flags = StreamFlags::Load();
  if (!flags.ok()) return flags.status();
  absl::StatusOr<CudaEventPool*> events = CudaEventPool::ForDevice(options.cuda_index);
  if (!events.ok()) return events.status();
  std::unique_ptr<PeerRingTransport> transport(
      new PeerRingTransport(std::move(options), *events, *flags));
  if (absl::Status status = transport->Init(); !status.ok()) {
    return absl::FailedPreconditionError(status.message());
  }
  return transport;
}

PeerRingTransport::PeerRingTransport(PeerTransportOptions options, CudaEventPool* events,
                                     const StreamFlags* flags)
    : options_(std::move(options)), events_(events), flags_(flags) {}

PeerRingTransport::~PeerRingTransport() { Cancel(); }

absl::Status PeerRingTransport::Init() {
  const std::vector<DeviceRegion> regions = options_.regions();
  if (regions.empty()) {
    return absl::FailedPreconditionError("the device's memory is not allocated in regions");
  }
  absl::Status status = events_->UseDevice();
  const bool by_descriptor = regions[0].descriptor >= 0;
  if (status.ok() && by_descriptor) {
    const absl::StatusOr<const CudaDriver*> driver = CudaDriver::Load();
    if (!driver.ok()) return driver.status();
    driver_ = *driver;
    HandleServer::Options options;
    options.folder = options_.socket_folder;
    absl::StatusOr<std::unique_ptr<HandleServer>> opened = HandleServer::Open(std::move(options));
    if (!opened.ok()) return opened.status();
    handle_server_ = *std::move(opened);
  } else if (status.ok()) {
    cudaIpcMemHandle_t handle;
    status = CudaStatus(cudaIpcGetMemHandle(&handle, regions[0].base), "cudaIpcGetMemHandle");
  }
  int count = 0;
  if (status.ok()) status = CudaStatus(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (!status.ok()) return status;
  for (int device = 0; device < count; ++device) {
    absl::StatusOr<std::string> uuid = DeviceUuid(device);
    if (!uuid.ok()) return uuid.status();
    int reachable = 0;
    if (device == options_.cuda_index) {
      about_us_.device_uuid = *uuid;
      if (options_.shared_gpu) about_us_.reachable_uuids.push_back(*std::move(uuid));
    } else if (cudaDeviceCanAccessPeer(&reachable, options_.cuda_index, device) == cudaSuccess &&
               reachable != 0) {
      about_us_.reachable_uuids.push_back(*std::move(uuid));
    }
  }
  about_us_.sharing = by_descriptor ? PeerSharing::kVmm : PeerSharing::kIpc;
  about_us_.host_key = by_descriptor ? SocketKey(handle_server_->socket(), options_.host_id)
                                     : HostKey(options_.host_id);
  about_us_.process_id = getpid();
  return absl::OkStatus();
}

absl::StatusOr<std::string> PeerRingTransport::Prepare(uint64_t generation, int rank,
                                                       int world_size) {
  if (absl::Status status = RingAttempts::Check(rank, world_size); !status.ok()) return status;
  if (world_size > kMaxPeerRing) {
    return absl::FailedPreconditionError(absl::StrCat(
        "a ring of ", world_size, " exceeds the ", kMaxPeerRing, " ranks that can share memory"));
  }
  return PrepareEngine(generation, rank, world_size);
}

absl::StatusOr<std::string> PeerRingTransport::PrepareEngine(uint64_t generation, int rank,
                                                             int world_size) {
  if (absl::Status status = RingAttempts::Check(rank, world_size); !status.ok()) return status;
  Cancel();
  absl::StatusOr<std::unique_ptr<PeerSegment>> segment =
      PeerSegment::Create(generation, rank, world_size);
  if (!segment.ok()) return segment.status();
  absl::Status status = events_->UseDevice();
  if (status.ok()) status = PeerCopyEngine::PublishRegions(options_.regions(), **segment);
  if (!status.ok()) return status;
  PeerBlob blob = about_us_;
  auto attempt = std::make_shared<Attempt>();
  if (handle_server_ == nullptr) {
    blob.place = (*segment)->path();
  } else {
    blob.place = handle_server_->socket();
    blob.token = RandomToken();
    attempt->published = handle_server_->Publish(
        {generation, blob.token, (*segment)->descriptor(), options_.regions});
  }
  attempt->generation = generation;
  attempt->rank = rank;
  attempt->world_size = world_size;
  attempt->segment = *std::move(segment);
  attempts_.Prepare(std::move(attempt));
  return EncodePeerBlob(blob);
}

absl::StatusOr<std::unique_ptr<Communicator>> PeerRingTransport::Connect(
    uint64_t generation, const std::vector<std::string>& blobs, absl::Time deadline) {
  return attempts_.Connect(generation, blobs.size(), [&](RingAttempt& attempt) {
    return Join(static_cast<Attempt&>(attempt), blobs,
                std::min(deadline, MonotonicNow() + options_.connect_timeout));
  });
}

absl::StatusOr<std::unique_ptr<TransferEngine>> PeerRingTransport::ConnectEngine(
    uint64_t generation, const std::vector<std::string>& blobs, const std::vector<int>& peers,
    absl::Time deadline) {
  using Engine = absl::StatusOr<std::unique_ptr<TransferEngine>>;
  return attempts_.Connect(generation, blobs.size(), [&](RingAttempt& attempt) -> Engine {
    std::vector<int> ranks = peers;
    ranks.push_back(attempt.rank);
    const absl::StatusOr<std::vector<PeerBlob>> members = DecodePeerBlobs(blobs, ranks);
    if (!members.ok()) return members.status();
    return MakeEngine(static_cast<Attempt&>(attempt), *members, peers,
                      std::min(deadline, MonotonicNow() + options_.connect_timeout));
  });
}

absl::StatusOr<std::unique_ptr<TransferEngine>> PeerRingTransport::MakeEngine(
    Attempt& attempt, const std::vector<PeerBlob>& members, const std::vector<int>& peers,
    absl::Time deadline) const {
  absl::Status status = events_->UseDevice();
  if (status.ok()) status = attempt.segment->Register();
  if (!status.ok()) return status;
  std::vector<PeerMapping> mappings(attempt.world_size);
  for (int peer : peers) {
    if (attempt.cancelled.load()) status = Cancelled();
    absl::StatusOr<PeerMapping> mapping =
        status.ok() ? MapPeer(attempt, peer, members[peer], deadline) : status;
    if (mapping.ok()) {
      mappings[peer] = *std::move(mapping);
      continue;
    }
    for (PeerMapping& mapped : mappings) Unmap(mapped);
    return mapping.status();
  }
  const PeerCopyOptions options = {.rank = attempt.rank,
                                   .transport = TransportName(),
                                   .abort_timeout = options_.abort_timeout,
                                   .on_stuck = options_.on_stuck,
                                   .kept = attempt.published};
  return PeerCopyEngine::Create(options, events_, flags_, options_.regions,
                                std::move(attempt.segment), std::move(mappings));
}

absl::StatusOr<std::unique_ptr<Communicator>> PeerRingTransport::Join(
    Attempt& attempt, const std::vector<std::string>& blobs, absl::Time deadline) const {
  const absl::StatusOr<std::vector<PeerBlob>> members = DecodePeerBlobs(blobs);
  if (!members.ok()) return members.status();
  absl::Status status = events_->UseDevice();
  if (!status.ok()) return status;
  std::unique_ptr<TransferEngine> engine;
  if (attempt.world_size > 1) {
    std::vector<int> peers;
    for (int peer = 0; peer < attempt.world_size; ++peer) {
      if (peer != attempt.rank) peers.push_back(peer);
    }
    absl::StatusOr<std::unique_ptr<TransferEngine>> made =
        MakeEngine(attempt, *members, peers, deadline);
    if (!made.ok()) return made.status();
    engine = *std::move(made);
  }
  absl::StatusOr<std::unique_ptr<StreamCommunicator>> communicator =
      StreamCommunicator::Create(std::move(engine), TransportName(), events_, attempt.rank,
                                 attempt.world_size, options_.step_timeout);
  if (!communicator.ok()) return communicator.status();
  absl::StatusOr<std::unique_ptr<DeviceBuffer>> memory =
      options_.allocate(HandshakeBytes(attempt.world_size));
  if (!memory.ok()) return memory.status();
  status =
      Handshake(**communicator, (*memory)->data(), attempt.generation, deadline, attempt.cancelled);
  if (!status.ok()) return status;
  return *std::move(communicator);
}

absl::StatusOr<PeerMapping> PeerRingTransport::MapPeer(const Attempt& attempt, int peer,
                                                       const PeerBlob& blob,
                                                       absl::Time deadline) const {
  const PeerAddress address{blob.place, attempt.generation, blob.token};
  absl::StatusOr<std::unique_ptr<PeerSegment>> segment;
  if (handle_server_ != nullptr) {
    absl::StatusOr<ScopedDescriptor> shown = HandleServer::Fetch(
        address, kPeerSegmentItem, deadline, [&attempt] { return attempt.cancelled.load(); });
    if (!shown.ok()) return MemoryOf(peer, shown.status());
    segment = PeerSegment::Adopt(*std::move(shown), attempt.generation, peer, attempt.world_size);
  } else {
    segment = PeerSegment::Open(blob.place, attempt.generation, peer, attempt.world_size);
  }
  if (!segment.ok()) return segment.status();
  absl::Status status = (*segment)->Register();
  if (!status.ok()) return status;
  absl::StatusOr<PeerMapper> mapper =
      handle_server_ != nullptr ? VmmMapperOf(attempt, peer, blob, address) : MapperOf(peer, blob);
  if (!mapper.ok()) return mapper.status();
  PeerMapping mapping{*std::move(segment), *std::move(mapper), {}};
  status = PeerCopyEngine::MapRegions(mapping);
  if (!status.ok()) {
    Unmap(mapping);
    return status;
  }
  return mapping;
}

absl::StatusOr<PeerMapper> PeerRingTransport::VmmMapperOf(const Attempt& attempt, int peer,
                                                          const PeerBlob& blob,
                                                          PeerAddress address) const {
  int count = 0, gpu = -1;
  (void)cudaGetDeviceCount(&count);
  for (int device = 0; device < count && gpu < 0; ++device) {
    const absl::StatusOr<std::string> uuid = DeviceUuid(device);
    if (uuid.ok() && *uuid == blob.device_uuid) gpu = device;
  }
  if (gpu < 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("this worker does not see the GPU of rank ", peer));
  }
  // Mappings by address. Shared, because the mapper is copied.
  using Mapped = std::map<char*, std::unique_ptr<VmmMapping>>;
  auto mapped = std::make_shared<Mapped>();
  PeerMapper mapper;
  mapper.interrupted = std::make_shared<std::atomic<bool>>(false);
  // The wait is ended by the cancellation of forming, and later by the engine's end.
  const auto stop = [whole = attempt.shared_from_this(), interrupted = mapper.interrupted] {
    return whole->cancelled.load() || interrupted->load();
  };
  mapper.map = [events = events_, driver = driver_, peer, gpu, address = std::move(address), mapped,
                stop](int index, const PeerRegion& region) -> absl::StatusOr<char*> {
    // Closed as soon as it is mapped, because an open descriptor keeps the memory allocated.
    const absl::StatusOr<ScopedDescriptor> shown =
        HandleServer::Fetch(address, index, MonotonicNow() + kLateRegionTimeout, stop);
    if (!shown.ok()) return MemoryOf(peer, shown.status());
    absl::StatusOr<std::unique_ptr<VmmMapping>> mapping =
        VmmMapping::Map(events, driver, shown->get(), region.bytes, gpu);
    if (!mapping.ok()) {
      return absl::FailedPreconditionError(MemoryOf(peer, mapping.status()).message());
    }
    char* const base = reinterpret_cast<char*>((*mapping)->data());
    (*mapped)[base] = *std::move(mapping);
    return base;
  };
  mapper.unmap = [mapped](char* base) { mapped->erase(base); };
  mapper.outlives_peer = true;
  return mapper;
}

absl::StatusOr<PeerMapper> PeerRingTransport::MapperOf(int peer, const PeerBlob& blob) const {
  if (blob.process_id == getpid() && !options_.ipc_within_process) {
    int count = 0;
    (void)cudaGetDeviceCount(&count);
    for (int device = 0; device < count; ++device) {
      absl::StatusOr<std::string> uuid = DeviceUuid(device);
      if (!uuid.ok() || *uuid != blob.device_uuid) continue;
      const cudaError_t error = cudaDeviceEnablePeerAccess(device, 0);
      (void)cudaGetLastError();
      if (error != cudaSuccess && error != cudaErrorPeerAccessAlreadyEnabled) break;
      return PeerMapper{[](int, const PeerRegion& region) -> absl::StatusOr<char*> {
                          return reinterpret_cast<char*>(region.base);
                        },
                        nullptr};
    }
    return absl::FailedPreconditionError(
        absl::StrCat("this process has no access to the GPU of rank ", peer));
  }
  PeerMapper mapper;
  mapper.map = [peer](int, const PeerRegion& region) -> absl::StatusOr<char*> {
    cudaIpcMemHandle_t handle;
    std::memcpy(&handle, region.ipc_handle, sizeof(handle));
    void* base = nullptr;
    absl::Status status =
        CudaStatus(cudaIpcOpenMemHandle(&base, handle, cudaIpcMemLazyEnablePeerAccess),
                   "cudaIpcOpenMemHandle");
    if (status.ok()) return static_cast<char*>(base);
    return absl::FailedPreconditionError(
        absl::StrCat("memory of rank ", peer, ": ", status.message()));
  };
  mapper.unmap = [](char* base) { (void)cudaIpcCloseMemHandle(base); };
  return mapper;
}

}  // namespace ringattn::worker
