#include "worker/comm/wire/wire_connector.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/monotonic_time.h"
#include "common/security/token.h"
#include "worker/comm/ring_attempts.h"
#include "worker/comm/wire/wire_blob.h"
#include "worker/comm/wire/wire_forming.h"
#include "worker/comm/wire/wire_listener.h"
#include "worker/comm/wire/wire_stream.h"

namespace ringattn::worker {

// A ring that is being formed.
struct WireConnector::Attempt {
  ~Attempt() {
    if (cancelled >= 0) close(cancelled);
  }

  uint64_t generation = 0;
  int rank = 0;
  size_t world_size = 0;
  std::string blob;
  std::shared_ptr<WireTls> tls;  // null: plain text
  std::unique_ptr<WireListener> listener;
  int cancelled = -1;  // event; readable once cancelled
};

absl::StatusOr<std::string> WireConnector::Prepare(uint64_t generation, int rank, int world_size) {
  if (absl::Status status = RingAttempts::Check(rank, world_size); !status.ok()) return status;
  Cancel();
  auto attempt = std::make_shared<Attempt>();
  attempt->generation = generation;
  attempt->rank = rank;
  attempt->world_size = static_cast<size_t>(world_size);
  if (const std::optional<TlsMaterial> material = options_.tls(); material.has_value()) {
    absl::StatusOr<std::shared_ptr<WireTls>> tls = WireTls::Make(*material);
    if (!tls.ok()) return tls.status();
    attempt->tls = *std::move(tls);
  }
  absl::StatusOr<std::unique_ptr<WireListener>> listener = WireListener::Open(options_.host);
  if (!listener.ok()) return listener.status();
  attempt->listener = *std::move(listener);
  attempt->cancelled = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (attempt->cancelled < 0) return absl::ErrnoToStatus(errno, "eventfd");
  attempt->blob = FormatWireBlob({.tls = attempt->tls != nullptr,
                                  .stripes = options_.connections,
                                  .address = attempt->listener->address(),
                                  .secret = RandomToken()});
  absl::MutexLock lock(&mutex_);
  prepared_ = attempt;
  return attempt->blob;
}

absl::StatusOr<WireConnector::Joined> WireConnector::Connect(
    uint64_t generation, const std::vector<std::string>& blobs,
    const std::optional<std::vector<int>>& peers, absl::Time deadline) {
  std::shared_ptr<Attempt> attempt;
  {
    absl::MutexLock lock(&mutex_);
    if (prepared_ == nullptr || prepared_->generation != generation) {
      return absl::CancelledError(absl::StrCat("generation ", generation, " is not prepared"));
    }
    attempt = prepared_;
  }
  absl::StatusOr<WireFormingOptions> forming = Forming(*attempt, blobs, peers);
  if (!forming.ok()) return forming.status();
  absl::StatusOr<WireStreams> streams =
      WireForming(*std::move(forming))
          .Run(std::min(deadline, MonotonicNow() + options_.connect_timeout));
  {
    // Cancel must be able to find the attempt until here.
    absl::MutexLock lock(&mutex_);
    if (prepared_ == attempt) {
      prepared_ = nullptr;
    } else if (streams.ok()) {
      return absl::CancelledError("forming the ring was cancelled");
    }
  }
  if (!streams.ok()) return streams.status();
  return Joined{attempt->rank, static_cast<int>(attempt->world_size), *std::move(streams)};
}

absl::StatusOr<WireFormingOptions> WireConnector::Forming(
    const Attempt& attempt, const std::vector<std::string>& blobs,
    const std::optional<std::vector<int>>& peers) const {
  if (blobs.size() != attempt.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat(blobs.size(), " blobs for ", attempt.world_size, " ranks"));
  }
  WireFormingOptions forming{.generation = attempt.generation,
                             .rank = attempt.rank,
                             .blobs = {},
                             .peers = peers.value_or(std::vector<int>()),
                             .listener = attempt.listener->fd(),
                             .cancelled = attempt.cancelled,
                             .tls = attempt.tls,
                             .handshake_timeout = options_.handshake_timeout,
                             .counters = options_.counters};
  const bool tls = attempt.tls != nullptr;
  for (int rank = 0; rank < static_cast<int>(blobs.size()); ++rank) {
    absl::StatusOr<WireBlob> blob = ParseWireBlob(blobs[rank]);
    if (!blob.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", rank, ": ", blob.status().message()));
    }
    if (blob->tls != tls) {
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", tls ? rank : attempt.rank, " has no cluster certificate, but rank ",
          tls ? attempt.rank : rank, " has one; give all workers --cluster_tls_cert or none"));
    }
    forming.blobs.push_back(*std::move(blob));
    if (!peers.has_value() && rank != attempt.rank) forming.peers.push_back(rank);
  }
  if (blobs[attempt.rank] != attempt.blob) {
    return absl::InvalidArgumentError("the blob is not the one that this rank returned");
  }
  return forming;
}

void WireConnector::Cancel() {
  std::shared_ptr<Attempt> attempt;
  {
    absl::MutexLock lock(&mutex_);
    attempt = std::exchange(prepared_, nullptr);
  }
  if (attempt == nullptr) return;
  const uint64_t one = 1;
  (void)!write(attempt->cancelled, &one, sizeof(one));
}

}  // namespace ringattn::worker
