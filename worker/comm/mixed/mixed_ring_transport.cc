#include "worker/comm/mixed/mixed_ring_transport.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"
#include "worker/comm/cuda/handshake.h"
#include "worker/comm/cuda/stream_communicator.h"
#include "worker/comm/mixed/mixed_blob.h"
#include "worker/comm/mixed/mixed_engine.h"

namespace ringattn::worker {

absl::StatusOr<std::unique_ptr<MixedRingTransport>> MixedRingTransport::Create(
    MixedTransportOptions options) {
  absl::StatusOr<CudaEventPool*> events = CudaEventPool::ForDevice(options.device);
  if (!events.ok()) return events.status();
  return std::unique_ptr<MixedRingTransport>(new MixedRingTransport(std::move(options), *events));
}

MixedRingTransport::~MixedRingTransport() { Cancel(); }

absl::StatusOr<std::string> MixedRingTransport::Prepare(uint64_t generation, int rank,
                                                        int world_size) {
  if (absl::Status status = RingAttempts::Check(rank, world_size); !status.ok()) return status;
  Cancel();
  bool offers_copies = options_.copies != nullptr;
  if (offers_copies) {
    absl::MutexLock lock(&mutex_);
    offers_copies = failures_ < kGiveUpAfter;
  }
  MixedBlob blob = options_.facts;
  if (offers_copies) {
    blob.copies = options_.copies->PrepareEngine(generation, rank, world_size).value_or("");
  }
  absl::Status missing;
  for (const auto& [transport, part] : {std::pair(Alone(NetworkEngine::kNccl), &blob.nccl),
                                        std::pair(Alone(NetworkEngine::kWire), &blob.wire)}) {
    if (transport == nullptr) continue;
    absl::StatusOr<std::string> prepared = transport->Prepare(generation, rank, world_size);
    if (prepared.ok()) {
      *part = *std::move(prepared);
    } else if (part == &blob.wire) {
      return prepared.status();  // an address or certificates that cannot be used
    }
    missing.Update(prepared.status());
  }
  if (blob.copies.empty() && blob.nccl.empty() && blob.wire.empty()) return missing;
  auto attempt = std::make_shared<RingAttempt>();
  attempt->generation = generation;
  attempt->rank = rank;
  attempt->world_size = world_size;
  attempts_.Prepare(std::move(attempt));
  return EncodeMixedBlob(blob);
}

absl::StatusOr<std::unique_ptr<Communicator>> MixedRingTransport::Connect(
    uint64_t generation, const std::vector<std::string>& blobs, absl::Time deadline) {
  return attempts_.Connect(generation, blobs.size(), [&](const RingAttempt& attempt) {
    return Join(attempt, blobs, std::min(deadline, MonotonicNow() + options_.connect_timeout));
  });
}

void MixedRingTransport::Cancel() {
  attempts_.Cancel();
  CancelParts();
}

void MixedRingTransport::CancelParts() {
  if (options_.copies != nullptr) options_.copies->Cancel();
  CancelAllBut(nullptr);
}

RingTransport* MixedRingTransport::Alone(NetworkEngine engine) const {
  if (engine == NetworkEngine::kWire) return options_.wire.get();
  return options_.nccl != nullptr ? options_.nccl.get() : options_.without_network.get();
}

void MixedRingTransport::CancelAllBut(const RingTransport* chosen) {
  for (RingTransport* transport : {Alone(NetworkEngine::kNccl), Alone(NetworkEngine::kWire)}) {
    if (transport != nullptr && transport != chosen) transport->Cancel();
  }
}

MixedRingTransport::Joined MixedRingTransport::Join(const RingAttempt& attempt,
                                                    const std::vector<std::string>& blobs,
                                                    absl::Time deadline) {
  std::vector<MixedBlob> members;
  Blobs parts;
  for (int rank = 0; rank < attempt.world_size; ++rank) {
    absl::StatusOr<MixedBlob> member = DecodeMixedBlob(blobs[rank], rank);
    if (!member.ok()) return member.status();
    parts.copies.push_back(member->copies);
    parts.nccl.push_back(member->nccl);
    parts.wire.push_back(member->wire);
    members.push_back(*std::move(member));
  }
  if (options_.copies == nullptr && !parts.copies[attempt.rank].empty()) {
    return absl::InvalidArgumentError(
        "this rank's blob offers copy engines, so it is not the one that the rank returned");
  }
  const absl::StatusOr<RingPaths> paths = ChoosePaths(members);
  if (!paths.ok()) return paths.status();
  const bool wire = paths->network.engine == NetworkEngine::kWire;
  RingTransport* const network = Alone(paths->network.engine);
  if (paths->kind != RingPaths::Kind::kCopies && network == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("this rank's blob offers ", NetworkName(paths->network.engine),
                     ", so it is not the one that the rank returned"));
  }
  if (options_.on_choice) options_.on_choice(*paths);
  switch (paths->kind) {
    case RingPaths::Kind::kCopies: {
      CancelAllBut(nullptr);
      Joined joined = options_.copies->Connect(attempt.generation, parts.copies, deadline);
      NoteCopies(joined.status());
      return joined;
    }
    case RingPaths::Kind::kNetwork:
      if (options_.copies != nullptr) options_.copies->Cancel();
      CancelAllBut(network);
      return network->Connect(attempt.generation, wire ? parts.wire : parts.nccl, deadline);
    case RingPaths::Kind::kMixed:
      break;
  }
  return JoinMixed(attempt, parts, *paths, deadline);
}

MixedRingTransport::Joined MixedRingTransport::JoinMixed(const RingAttempt& attempt,
                                                         const Blobs& blobs, const RingPaths& paths,
                                                         absl::Time deadline) {
  if (absl::Status status = events_->UseDevice(); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<TransferEngine>> engine =
      MakeEngine(attempt, blobs, paths, deadline);
  if (!engine.ok()) return engine.status();
  absl::StatusOr<std::unique_ptr<StreamCommunicator>> communicator =
      StreamCommunicator::Create(*std::move(engine), /*alone=*/"", events_, attempt.rank,
                                 attempt.world_size, options_.step_timeout);
  if (!communicator.ok()) return communicator.status();
  absl::StatusOr<std::unique_ptr<DeviceBuffer>> memory =
      options_.allocate(HandshakeBytes(attempt.world_size));
  if (!memory.ok()) return memory.status();
  absl::Status status =
      Handshake(**communicator, (*memory)->data(), attempt.generation, deadline, attempt.cancelled);
  if (!status.ok()) return status;
  return *std::move(communicator);
}

absl::StatusOr<std::unique_ptr<TransferEngine>> MixedRingTransport::MakeEngine(
    const RingAttempt& attempt, const Blobs& blobs, const RingPaths& paths, absl::Time deadline) {
  const int rank = attempt.rank;
  const std::vector<int> inside = paths.PeersInside(rank);
  std::unique_ptr<TransferEngine> copies;
  if (!inside.empty()) {
    absl::StatusOr<std::unique_ptr<TransferEngine>> made =
        options_.copies->ConnectEngine(attempt.generation, blobs.copies, inside, deadline);
    NoteCopies(made.status());
    if (!made.ok()) return made.status();
    copies = *std::move(made);
  } else if (options_.copies != nullptr) {
    options_.copies->Cancel();
  }
  const bool wire = paths.network.engine == NetworkEngine::kWire;
  EngineTransport* const transport = wire ? options_.wire.get() : options_.nccl.get();
  if (transport == nullptr) {
    return absl::InvalidArgumentError(
        "this rank's blob offers NCCL, so it is not the one that the rank returned");
  }
  CancelAllBut(transport);
  absl::StatusOr<std::unique_ptr<TransferEngine>> network = transport->ConnectEngine(
      attempt.generation, wire ? blobs.wire : blobs.nccl, paths.PeersOutside(rank), deadline);
  if (!network.ok() || copies == nullptr) return network;
  std::vector<bool> by_copies(attempt.world_size, false);
  by_copies[rank] = true;
  for (int peer : inside) by_copies[peer] = true;
  return MixedEngine::Create(std::move(copies), *std::move(network), std::move(by_copies), events_);
}

void MixedRingTransport::NoteCopies(const absl::Status& connected) {
  absl::MutexLock lock(&mutex_);
  if (connected.ok()) failures_ = 0;
  if (absl::IsFailedPrecondition(connected)) ++failures_;
}

}  // namespace ringattn::worker
