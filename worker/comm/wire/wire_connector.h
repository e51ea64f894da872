// WireConnector: the two phases of forming a ring over sockets. Prepare opens a listening socket,
// and its blob has the socket's address and a secret. Connect joins ranks by several connections
// each. Only processes that know all blobs can connect. If the cluster has certificates,
// connections use TLS 1.3 and both ends verify each other.
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_CONNECTOR_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_CONNECTOR_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/security/tls_material.h"
#include "worker/comm/wire/wire_counters.h"
#include "worker/comm/wire/wire_forming.h"

namespace ringattn::worker {

// Two busy processor cores moved the same bytes with 1 to 8 connections, within the noise
// (tests/bench/results/ring_rate.csv). With two, a second core can help.
inline constexpr int kDefaultWireConnections = 2;

struct WireTransportOptions {
  // A name or address of this machine that peers can reach (--ring_address). Rings listen there,
  // and peers connect to it.
  std::string host = "127.0.0.1";
  // TCP connections per peer, 1 to kMaxWireStripes. Two ranks use the smaller number of both. Each
  // connection index has a thread, except the first on CPU workers.
  int connections = kDefaultWireConnections;
  // Returns the certificates for TLS; nullopt: plain text. Called for each ring, so replaced files
  // apply to the next one.
  std::function<std::optional<TlsMaterial>()> tls = [] { return std::nullopt; };
  // Time limit for one group of transfers. Large, because a slow rank is not an error; the
  // coordinator decides which rank has stalled a ring.
  absl::Duration step_timeout = absl::Minutes(10);
  // Upper limit of Connect, even if its deadline is later.
  absl::Duration connect_timeout = absl::Seconds(30);
  // How long an incoming connection may take to prove that it belongs to the ring.
  absl::Duration handshake_timeout = absl::Seconds(5);
  std::shared_ptr<WireCounters> counters = std::make_shared<WireCounters>();
};

// Thread safe.
class WireConnector {
 public:
  struct Joined {
    int rank = 0;
    int world_size = 0;
    WireStreams streams;
  };

  explicit WireConnector(WireTransportOptions options) : options_(std::move(options)) {}
  ~WireConnector() { Cancel(); }

  // As RingTransport.
  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size);
  // Connects to `peers`, each of which must call it with this rank among its peers; nullopt: to all
  // other ranks. Returns the errors of RingTransport::Connect, and FAILED_PRECONDITION if some
  // ranks use TLS and others do not.
  absl::StatusOr<Joined> Connect(uint64_t generation, const std::vector<std::string>& blobs,
                                 const std::optional<std::vector<int>>& peers, absl::Time deadline);
  void Cancel();

 private:
  struct Attempt;

  // Returns what the attempt needs to form the ring.
  absl::StatusOr<WireFormingOptions> Forming(const Attempt& attempt,
                                             const std::vector<std::string>& blobs,
                                             const std::optional<std::vector<int>>& peers) const;

  const WireTransportOptions options_;
  absl::Mutex mutex_;
  std::shared_ptr<Attempt> prepared_ ABSL_GUARDED_BY(mutex_);  // until connected
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_CONNECTOR_H_
