#include "worker/comm/tcp/tcp_mesh.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"
#include "gloo/transport/address.h"
#include "gloo/transport/tcp/attr.h"
#include "gloo/transport/tcp/device.h"
#include "worker/comm/sockets/ring_address.h"
#include "worker/device/host_event.h"

namespace ringattn::worker {
namespace {

// Gloo waits five times a pair's timeout for its connection.
constexpr int kGlooConnectFactor = 5;

// A blob is a list of addresses, one per rank (empty for the rank itself), each preceded by its
// length in two bytes.
constexpr size_t kLengthBytes = 2;

// Distinct from all transfers' slots, which have a size in their low bits.
constexpr uint64_t kCanarySlot = 0;

// StopWatching ends the wait. Gloo cannot wait without limit: zero means no wait.
constexpr std::chrono::hours kCanaryPatience{24 * 365};

void AppendAddress(const std::vector<char>& address, std::string* blob) {
  blob->push_back(static_cast<char>(address.size() & 0xff));
  blob->push_back(static_cast<char>(address.size() >> 8));
  blob->append(address.data(), address.size());
}

absl::StatusOr<std::vector<char>> AddressFor(absl::string_view blob, int rank) {
  for (int index = 0;; ++index) {
    if (blob.size() < kLengthBytes) break;
    const size_t length =
        static_cast<uint8_t>(blob[0]) | static_cast<size_t>(static_cast<uint8_t>(blob[1])) << 8;
    blob.remove_prefix(kLengthBytes);
    if (blob.size() < length) break;
    if (index == rank) {
      if (length == 0) break;
      return std::vector<char>(blob.begin(), blob.begin() + length);
    }
    blob.remove_prefix(length);
  }
  return absl::InvalidArgumentError(absl::StrCat("a blob holds no address for rank ", rank));
}

}  // namespace

absl::StatusOr<std::shared_ptr<TcpMesh>> TcpMesh::Listen(const std::string& host, int rank,
                                                         int world_size,
                                                         absl::Duration connect_timeout) {
  // Gloo checks the address too, but then leaks the result of the lookup.
  if (absl::Status status = BindRingAddress(host).status(); !status.ok()) return status;
  std::shared_ptr<TcpMesh> mesh(new TcpMesh(rank, world_size));
  try {
    gloo::transport::tcp::attr attributes;
    attributes.hostname = host;
    mesh->device_ = gloo::transport::tcp::CreateDevice(attributes);
    mesh->context_ = mesh->device_->createContext(rank, world_size);
    mesh->context_->setTimeout(
        std::max(absl::ToChronoMilliseconds(connect_timeout / kGlooConnectFactor),
                 std::chrono::milliseconds(1)));
    for (int peer = 0; peer < world_size; ++peer) {
      mesh->pairs_.push_back(peer == rank ? nullptr : mesh->context_->createPair(peer).get());
    }
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot listen for ring peers on ", host, ": ", error.what()));
  }
  return mesh;
}

TcpMesh::~TcpMesh() { StopWatching(); }

std::string TcpMesh::AddressBlob() const {
  std::string blob;
  for (int peer = 0; peer < world_size_; ++peer) {
    AppendAddress(peer == rank_ ? std::vector<char>() : pairs_[peer]->address().bytes(), &blob);
  }
  return blob;
}

absl::Status TcpMesh::Connect(const std::vector<std::string>& blobs, absl::Time deadline) {
  if (static_cast<int>(blobs.size()) != world_size_) {
    return absl::InvalidArgumentError(
        absl::StrCat(blobs.size(), " blobs for ", world_size_, " ranks"));
  }
  std::vector<std::vector<char>> addresses(world_size_);
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    absl::StatusOr<std::vector<char>> address = AddressFor(blobs[peer], rank_);
    if (!address.ok()) return address.status();
    addresses[peer] = *std::move(address);
  }
  // Gloo's connect takes no deadline, but closing the pairs ends it.
  HostEvent done;
  std::thread connecting([&] { done.Finish(ConnectPeers(addresses)); });
  (void)done.Wait(deadline);
  const bool late = !done.Done();
  if (late) Close();
  connecting.join();
  absl::Status status = done.Wait(MonotonicNow());
  if (late && !status.ok()) {
    status = absl::UnavailableError(absl::StrCat("not in time: ", status.message()));
  }
  if (!status.ok()) Close();
  return status;
}

absl::Status TcpMesh::ConnectPeers(const std::vector<std::vector<char>>& addresses) {
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    try {
      pairs_[peer]->connect(addresses[peer]);
    } catch (const std::exception& error) {
      if (!closed()) {
        return absl::UnavailableError(
            absl::StrCat("connecting to rank ", peer, ": ", error.what()));
      }
    }
    if (closed()) {
      return absl::CancelledError(absl::StrCat("connecting to rank ", peer, " was cancelled"));
    }
  }
  return absl::OkStatus();
}

std::unique_ptr<gloo::transport::UnboundBuffer> TcpMesh::NewBuffer(void* data, int64_t bytes) {
  return context_->createUnboundBuffer(data, bytes);
}

void TcpMesh::Watch(std::function<void(int, const std::string&)> on_lost) {
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    canaries_.push_back(std::make_unique<Canary>());
    Canary* canary = canaries_.back().get();
    canary->peer = peer;
    canary->buffer = NewBuffer(&canary->byte, 1);
    canary->waiting = std::thread([canary, on_lost] {
      try {
        canary->buffer->recv(canary->peer, kCanarySlot);
        canary->buffer->waitRecv(kCanaryPatience);
      } catch (const std::exception& error) {
        on_lost(canary->peer, error.what());
      }
    });
  }
}

void TcpMesh::StopWatching() {
  for (const auto& canary : canaries_) canary->buffer->abortWaitRecv();
  for (const auto& canary : canaries_) canary->waiting.join();
  Close();
  canaries_.clear();
}

void TcpMesh::ClosePeer(int peer) { pairs_[peer]->close(); }

void TcpMesh::Close() {
  {
    absl::MutexLock lock(&mutex_);
    if (closed_) return;
    closed_ = true;
  }
  for (gloo::transport::Pair* pair : pairs_) {
    if (pair != nullptr) pair->close();
  }
}

bool TcpMesh::closed() const {
  absl::MutexLock lock(&mutex_);
  return closed_;
}

}  // namespace ringattn::worker
