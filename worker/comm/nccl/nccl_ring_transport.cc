#include "worker/comm/nccl/nccl_ring_transport.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "worker/comm/nccl/nccl_blob.h"
#include "worker/comm/nccl/nccl_comm.h"
#include "worker/comm/nccl/nccl_communicator.h"
#include "worker/device/cuda/cuda_status.h"

namespace ringattn {
namespace {

using Kind = PeerTransfer::Kind;

constexpr absl::Duration kPoll = absl::Milliseconds(5);

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown host";
}

absl::StatusOr<std::string> DeviceUuid(int device) {
  cudaDeviceProp properties;
  absl::Status status =
      CudaStatus(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  if (!status.ok()) return status;
  return absl::BytesToHexString(
      absl::string_view(properties.uuid.bytes, sizeof(properties.uuid.bytes)));
}

absl::Status Cancelled() { return absl::CancelledError("forming the ring was cancelled"); }

// Every rank tells every other its number and the generation. After it all of NCCL's
// connections stand, which it makes at the first transfer between two ranks.
absl::Status Greet(Communicator& communicator, uint64_t generation, absl::Time deadline,
                   const std::atomic<bool>& cancelled) {
  const int world_size = communicator.world_size();
  const auto greeting = [generation](int rank) { return generation << 16 | rank; };
  std::vector<uint64_t> sent(world_size, greeting(communicator.rank())), received(world_size);
  const size_t bytes = world_size * sizeof(uint64_t);
  uint64_t* memory = nullptr;
  absl::Status status =
      CudaStatus(cudaMalloc(reinterpret_cast<void**>(&memory), 2 * bytes), "cudaMalloc");
  if (!status.ok()) return status;
  status = CudaStatus(cudaMemcpy(memory, sent.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  // A copy from pageable memory may return before it has arrived, and the communicator's
  // stream does not wait for the default one.
  if (status.ok()) status = CudaStatus(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  std::vector<PeerTransfer> group;
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer == communicator.rank()) continue;
    group.push_back({Kind::kSend, peer, memory + peer, sizeof(uint64_t)});
    group.push_back({Kind::kReceive, peer, memory + world_size + peer, sizeof(uint64_t)});
  }
  RunControl control;
  EventRef done;
  if (status.ok()) {
    done = communicator.Start(std::move(group), {}, &control);
    status = absl::DeadlineExceededError("");
  }
  while (absl::IsDeadlineExceeded(status) && absl::Now() < deadline && !cancelled.load()) {
    status = done->Wait(std::min(deadline, absl::Now() + kPoll));
  }
  if (absl::IsDeadlineExceeded(status)) {
    communicator.Abort(cancelled.load() ? "cancelled" : "not all ranks took part in time");
    // Bounded by the abort: `memory` and `control` are in use until then.
    status = done->Wait(absl::InfiniteFuture());
    if (status.ok()) status = absl::UnavailableError("a peer did not greet in time");
  }
  if (status.ok()) {
    status = CudaStatus(
        cudaMemcpy(received.data(), memory + world_size, bytes, cudaMemcpyDeviceToHost),
        "cudaMemcpy");
  }
  for (int peer = 0; peer < world_size && status.ok(); ++peer) {
    if (peer != communicator.rank() && received[peer] != greeting(peer)) {
      status = absl::UnavailableError(absl::StrCat("rank ", peer, " did not greet as expected"));
    }
  }
  (void)cudaFree(memory);
  return cancelled.load() ? Cancelled() : status;
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
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " of ", world_size));
  }
  Cancel();
  NcclBlob blob = {HostName(), device_uuid_, ""};
  if (rank == 0 && world_size == 1) {
    blob.unique_id.assign(kNcclUniqueIdBytes, '\0');  // nobody to meet
  } else if (rank == 0) {
    if (absl::Status status = events_->UseDevice(); !status.ok()) return status;
    ncclUniqueId id;
    absl::Status status =
        library_->ToStatus(library_->GetUniqueId(&id), "ncclGetUniqueId", nullptr);
    if (!status.ok()) return status;
    blob.unique_id.assign(id.internal, sizeof(id.internal));
  }
  auto attempt = std::make_shared<Attempt>();
  attempt->generation = generation;
  attempt->rank = rank;
  attempt->world_size = world_size;
  absl::MutexLock lock(&mutex_);
  prepared_ = std::move(attempt);
  return EncodeNcclBlob(blob);
}

absl::StatusOr<std::unique_ptr<Communicator>> NcclRingTransport::Connect(
    uint64_t generation, const std::vector<std::string>& blobs, absl::Time deadline) {
  std::shared_ptr<Attempt> attempt;
  {
    absl::MutexLock lock(&mutex_);
    if (prepared_ == nullptr || prepared_->generation != generation) {
      return absl::CancelledError(absl::StrCat("generation ", generation, " is not prepared"));
    }
    attempt = prepared_;
  }
  absl::StatusOr<std::unique_ptr<Communicator>> communicator =
      absl::InvalidArgumentError(absl::StrCat("a ring of ", attempt->world_size, " was prepared, ",
                                              blobs.size(), " blobs came"));
  if (static_cast<int>(blobs.size()) == attempt->world_size) {
    absl::StatusOr<std::string> unique_id = UniqueIdOf(blobs);
    communicator = unique_id.ok()
                       ? Join(*attempt, *unique_id,
                              std::min(deadline, absl::Now() + options_.connect_timeout))
                       : absl::StatusOr<std::unique_ptr<Communicator>>(unique_id.status());
  }
  absl::MutexLock lock(&mutex_);
  // Cancel must find the attempt until here.
  if (prepared_ == attempt) prepared_ = nullptr;
  if (communicator.ok() && attempt->cancelled.load()) return Cancelled();
  return communicator;
}

absl::StatusOr<std::unique_ptr<Communicator>> NcclRingTransport::Join(
    const Attempt& attempt, const std::string& unique_id, absl::Time deadline) const {
  std::unique_ptr<NcclComm> comm;
  if (attempt.world_size > 1) {
    const NcclCommOptions options = {attempt.rank, attempt.world_size, options_.max_ctas,
                                     options_.abort_timeout, options_.on_stuck};
    absl::StatusOr<std::unique_ptr<NcclComm>> joined =
        NcclComm::Join(library_, events_, options, unique_id, deadline, attempt.cancelled);
    if (!joined.ok()) return joined.status();
    comm = *std::move(joined);
  }
  absl::StatusOr<std::unique_ptr<NcclCommunicator>> communicator = NcclCommunicator::Create(
      std::move(comm), events_, attempt.rank, attempt.world_size, options_.step_timeout);
  if (!communicator.ok()) return communicator.status();
  absl::Status status = Greet(**communicator, attempt.generation, deadline, attempt.cancelled);
  if (!status.ok()) return status;
  return *std::move(communicator);
}

void NcclRingTransport::Cancel() {
  absl::MutexLock lock(&mutex_);
  if (prepared_ != nullptr) prepared_->cancelled = true;
  prepared_ = nullptr;
}

}  // namespace ringattn
