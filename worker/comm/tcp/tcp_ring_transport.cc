#include "worker/comm/tcp/tcp_ring_transport.h"

#include <csignal>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/comm/tcp/tcp_communicator.h"

namespace ringattn::worker {

TcpRingTransport::TcpRingTransport(TcpTransportOptions options) : options_(std::move(options)) {
  std::signal(SIGPIPE, SIG_IGN);
}

TcpRingTransport::~TcpRingTransport() { Cancel(); }

absl::StatusOr<std::string> TcpRingTransport::Prepare(uint64_t generation, int rank,
                                                      int world_size) {
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " of ", world_size));
  }
  Cancel();
  absl::StatusOr<std::shared_ptr<TcpMesh>> mesh =
      TcpMesh::Listen(options_.host, rank, world_size, options_.connect_timeout);
  if (!mesh.ok()) return mesh.status();
  absl::MutexLock lock(&mutex_);
  generation_ = generation;
  prepared_ = *std::move(mesh);
  return prepared_->AddressBlob();
}

absl::StatusOr<std::unique_ptr<Communicator>> TcpRingTransport::Connect(
    uint64_t generation, const std::vector<std::string>& blobs, absl::Time deadline) {
  std::shared_ptr<TcpMesh> mesh;
  {
    absl::MutexLock lock(&mutex_);
    if (prepared_ == nullptr || generation_ != generation) {
      return absl::CancelledError(absl::StrCat("generation ", generation, " is not prepared"));
    }
    mesh = prepared_;
  }
  absl::Status status = mesh->Connect(blobs, deadline);
  {
    // Cancel must be able to find the mesh until here.
    absl::MutexLock lock(&mutex_);
    if (prepared_ != mesh && status.ok()) status = absl::CancelledError("superseded");
    if (prepared_ == mesh) prepared_ = nullptr;
  }
  if (!status.ok()) return status;
  return std::make_unique<TcpCommunicator>(std::move(mesh), options_.step_timeout);
}

void TcpRingTransport::Cancel() {
  std::shared_ptr<TcpMesh> mesh;
  {
    absl::MutexLock lock(&mutex_);
    mesh = std::move(prepared_);
    prepared_ = nullptr;
  }
  if (mesh != nullptr) mesh->Close();
}

}  // namespace ringattn::worker
