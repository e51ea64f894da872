#include "worker/comm/nccl/nccl_ring_transport.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"
#include "worker/comm/cuda/device_uuid.h"
#include "worker/comm/cuda/handshake.h"
#include "worker/comm/cuda/stream_communicator.h"
#include "worker/comm/nccl/nccl_blob.h"
#include "worker/comm/nccl/nccl_comm.h"
#include "worker/comm/nccl/nccl_engine.h"
#include "worker/device/cuda/cuda_status.h"

namespace ringattn::worker {
namespace {

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown host";
}

}  // namespace

absl::StatusOr<std::unique_ptr<NcclRingTransport>> NcclRingTransport::Create(
    NcclTransportOptions options) {
  absl::StatusOr<const NcclLibrary*> library = NcclLibrary::Load(options.library);
  if (!library.ok()) return library.status();
  absl::StatusOr<CudaEventPool*> events = CudaEventPool::ForDevice(options.device);
  if (!events.ok()) return events.status();
  absl::StatusOr<std::string> uuid = DeviceUuid(options.device);
  if (!uuid.ok()) return uuid.status();
  return std::unique_ptr<NcclRingTransport>(
      new NcclRingTransport(std::move(options), *library, *events, *std::move(uuid)));
}

NcclRingTransport::NcclRingTransport(NcclTransportOptions options, const NcclLibrary* library,
                                     CudaEventPool* events, std::string device_uuid)
    : options_(std::move(options)),
      library_(library),
      events_(events),
      device_uuid_(std::move(device_uuid)) {}

NcclRingTransport::~NcclRingTransport() { Cancel(); }

absl::StatusOr<std::string> NcclRingTransport::Prepare(uint64_t generation, int rank,
                                                       int world_size) {
  if (absl::Status status = RingAttempts::Check(rank, world_size); !status.ok()) return status;
  Cancel();
  const char* const host_id = std::getenv("NCCL_HOSTID");
  NcclBlob blob = {HostName(), device_uuid_, "", host_id != nullptr ? host_id : ""};
  if (rank == 0 && world_size == 1) {
    blob.unique_id.assign(kNcclUniqueIdBytes, '\0');  // a ring of one needs no rendezvous
  } else if (rank == 0) {
    if (absl::Status status = events_->UseDevice(); !status.ok()) return status;
    ncclUniqueId id;
    absl::Status status =
        library_->ToStatus(library_->GetUniqueId(&id), "ncclGetUniqueId", nullptr);
    if (!status.ok()) return status;
    blob.unique_id.assign(id.internal, sizeof(id.internal));
  }
  auto attempt = std::make_shared<RingAttempt>();
  attempt->generation = generation;
  attempt->rank = rank;
  attempt->world_size = world_size;
  attempts_.Prepare(std::move(attempt));
  return EncodeNcclBlob(blob);
}

absl::StatusOr<std::unique_ptr<Communicator>> NcclRingTransport::Connect(
    uint64_t generation, const std::vector<std::string>& blobs, absl::Time deadline) {
  return attempts_.Connect(
      generation, blobs.size(), [&](const RingAttempt& attempt) -> RingAttempts::Joined {
        absl::StatusOr<std::string> unique_id = UniqueIdOf(blobs);
        if (!unique_id.ok()) return unique_id.status();
        return Join(attempt, *unique_id,
                    std::min(deadline, MonotonicNow() + options_.connect_timeout));
      });
}

absl::StatusOr<std::unique_ptr<TransferEngine>> NcclRingTransport::ConnectEngine(
    uint64_t generation, const std::vector<std::string>& blobs, const std::vector<int>&,
    absl::Time deadline) {
  using Engine = absl::StatusOr<std::unique_ptr<TransferEngine>>;
  return attempts_.Connect(generation, blobs.size(), [&](const RingAttempt& attempt) -> Engine {
    absl::StatusOr<std::string> unique_id = UniqueIdOf(blobs);
    if (!unique_id.ok()) return unique_id.status();
    return MakeEngine(attempt, *unique_id,
                      std::min(deadline, MonotonicNow() + options_.connect_timeout));
  });
}

absl::StatusOr<std::unique_ptr<TransferEngine>> NcclRingTransport::MakeEngine(
    const RingAttempt& attempt, const std::string& unique_id, absl::Time deadline) const {
  const NcclCommOptions options = {attempt.rank, attempt.world_size, options_.max_ctas,
                                   options_.abort_timeout, options_.on_stuck};
  absl::StatusOr<std::unique_ptr<NcclComm>> comm =
      NcclComm::Join(library_, events_, options, unique_id, deadline, attempt.cancelled);
  if (!comm.ok()) return comm.status();
  return std::make_unique<NcclEngine>(*std::move(comm));
}

absl::StatusOr<std::unique_ptr<Communicator>> NcclRingTransport::Join(const RingAttempt& attempt,
                                                                      const std::string& unique_id,
                                                                      absl::Time deadline) const {
  if (absl::Status status = events_->UseDevice(); !status.ok()) return status;
  std::unique_ptr<TransferEngine> engine;
  if (attempt.world_size > 1) {
    absl::StatusOr<std::unique_ptr<TransferEngine>> made = MakeEngine(attempt, unique_id, deadline);
    if (!made.ok()) return made.status();
    engine = *std::move(made);
  }
  absl::StatusOr<std::unique_ptr<StreamCommunicator>> communicator =
      StreamCommunicator::Create(std::move(engine), kNcclTransport, events_, attempt.rank,
                                 attempt.world_size, options_.step_timeout);
  if (!communicator.ok()) return communicator.status();
  void* memory = nullptr;
  absl::Status status =
      CudaStatus(cudaMalloc(&memory, HandshakeBytes(attempt.world_size)), "cudaMalloc");
  if (!status.ok()) return status;
  status = Handshake(**communicator, memory, attempt.generation, deadline, attempt.cancelled);
  (void)cudaFree(memory);
  if (!status.ok()) return status;
  return *std::move(communicator);
}

}  // namespace ringattn::worker
