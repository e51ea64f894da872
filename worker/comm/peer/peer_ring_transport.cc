#include "worker/comm/peer/peer_ring_transport.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
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
    return absl::FailedPreconditionError("the device's memory does not lie in regions");
  }
  absl::Status status = events_->UseDevice();
  cudaIpcMemHandle_t handle;
  if (status.ok()) {
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
    } else if (cudaDeviceCanAccessPeer(&reachable, options_.cuda_index, device) == cudaSuccess &&
               reachable != 0) {
      about_us_.reachable_uuids.push_back(*std::move(uuid));
    }
  }
  about_us_.host_key = HostKey();
  about_us_.process_id = getpid();
  return absl::OkStatus();
}

absl::StatusOr<std::string> PeerRingTransport::Prepare(uint64_t generation, int rank,
                                                       int world_size) {
  if (absl::Status status = RingAttempts::Check(rank, world_size); !status.ok()) return status;
  if (world_size > kMaxPeerRing) {
    return absl::FailedPreconditionError(absl::StrCat(
        "a ring of ", world_size, " is more than the ", kMaxPeerRing, " that can share memory"));
  }
  Cancel();
  absl::StatusOr<std::unique_ptr<PeerSegment>> segment =
      PeerSegment::Create(generation, rank, world_size);
  if (!segment.ok()) return segment.status();
  absl::Status status = events_->UseDevice();
  if (status.ok()) status = PeerCopyEngine::PublishRegions(options_.regions(), **segment);
  if (!status.ok()) return status;
  PeerBlob blob = about_us_;
  blob.segment_path = (*segment)->path();
  auto attempt = std::make_shared<Attempt>();
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
                std::min(deadline, absl::Now() + options_.connect_timeout));
  });
}

absl::StatusOr<std::unique_ptr<Communicator>> PeerRingTransport::Join(
    Attempt& attempt, const std::vector<std::string>& blobs, absl::Time deadline) const {
  absl::StatusOr<std::vector<PeerBlob>> members = DecodePeerBlobs(blobs);
  if (!members.ok()) return members.status();
  absl::Status status = events_->UseDevice();
  if (!status.ok()) return status;
  std::unique_ptr<TransferEngine> engine;
  if (attempt.world_size > 1) {
    status = attempt.segment->Register();
    if (!status.ok()) return status;
    std::vector<PeerMapping> mappings(attempt.world_size);
    for (int peer = 0; peer < attempt.world_size; ++peer) {
      if (peer == attempt.rank) continue;
      if (attempt.cancelled.load()) status = Cancelled();
      absl::StatusOr<PeerMapping> mapping =
          status.ok() ? MapPeer(attempt, peer, (*members)[peer]) : status;
      if (mapping.ok()) {
        mappings[peer] = *std::move(mapping);
        continue;
      }
      for (PeerMapping& mapped : mappings) Unmap(mapped);
      return mapping.status();
    }
    const PeerCopyOptions options = {attempt.rank, options_.abort_timeout, options_.on_stuck};
    absl::StatusOr<std::unique_ptr<PeerCopyEngine>> made =
        PeerCopyEngine::Create(options, events_, flags_, options_.regions,
                               std::move(attempt.segment), std::move(mappings));
    if (!made.ok()) return made.status();
    engine = *std::move(made);
  }
  absl::StatusOr<std::unique_ptr<StreamCommunicator>> communicator = StreamCommunicator::Create(
      std::move(engine), "peer", events_, attempt.rank, attempt.world_size, options_.step_timeout);
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
                                                       const PeerBlob& blob) const {
  absl::StatusOr<std::unique_ptr<PeerSegment>> segment =
      PeerSegment::Open(blob.segment_path, attempt.generation, peer, attempt.world_size);
  if (!segment.ok()) return segment.status();
  absl::Status status = (*segment)->Register();
  if (!status.ok()) return status;
  absl::StatusOr<PeerMapper> mapper = MapperOf(peer, blob);
  if (!mapper.ok()) return mapper.status();
  PeerMapping mapping{*std::move(segment), *std::move(mapper), {}};
  status = PeerCopyEngine::MapRegions(mapping);
  if (!status.ok()) {
    Unmap(mapping);
    return status;
  }
  return mapping;
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
      return PeerMapper{[](const PeerRegion& region) -> absl::StatusOr<char*> {
                          return reinterpret_cast<char*>(region.base);
                        },
                        nullptr};
    }
    return absl::FailedPreconditionError(
        absl::StrCat("no access to the GPU of rank ", peer, ", in this process"));
  }
  PeerMapper mapper;
  mapper.map = [peer](const PeerRegion& region) -> absl::StatusOr<char*> {
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
