// TcpMesh: one rank's TCP connections to all other ranks of a generation, created by Gloo. Only
// this file and its .cc use Gloo's pairs.
#ifndef RINGATTN_WORKER_COMM_TCP_TCP_MESH_H_
#define RINGATTN_WORKER_COMM_TCP_TCP_MESH_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "gloo/transport/context.h"
#include "gloo/transport/device.h"
#include "gloo/transport/pair.h"
#include "gloo/transport/unbound_buffer.h"

namespace ringattn::worker {

// Thread safe.
class TcpMesh {
 public:
  // Opens one listening socket per peer on `host`, a name or numeric address of this machine. Peers
  // can connect from then on, even before Connect is called. Returns INVALID_ARGUMENT if this
  // machine has no such address.
  static absl::StatusOr<std::shared_ptr<TcpMesh>> Listen(const std::string& host, int rank,
                                                         int world_size,
                                                         absl::Duration connect_timeout);
  ~TcpMesh();

  TcpMesh(const TcpMesh&) = delete;
  TcpMesh& operator=(const TcpMesh&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  // Returns this rank's addresses for its peers. Opaque; all machines must have the same
  // architecture.
  std::string AddressBlob() const;

  // Connects to every peer; blocks until `deadline` at most. Returns UNAVAILABLE if a peer cannot
  // be reached, or CANCELLED after Close().
  absl::Status Connect(const std::vector<std::string>& blobs, absl::Time deadline);

  // Calls `on_lost` on any thread, at most once per peer, when a connection breaks. Gloo reports
  // that to queued transfers, but not to one that is partly sent or received, which would wait for
  // its whole timeout. REQUIRES: Connect succeeded; called once.
  void Watch(std::function<void(int peer, const std::string& reason)> on_lost);

  // Ends the watch: on_lost is not called after this returns. Implies Close().
  void StopWatching();

  // Returns a buffer for one transfer at a time. Throws gloo::Exception.
  std::unique_ptr<gloo::transport::UnboundBuffer> NewBuffer(void* data, int64_t bytes);

  // Closes the connection to one peer, so that its pending transfers fail there. Idempotent.
  void ClosePeer(int peer);

  // Closes all connections, so that pending transfers fail here and at the peers. Idempotent.
  void Close();

 private:
  TcpMesh(int rank, int world_size) : rank_(rank), world_size_(world_size) {}

  absl::Status ConnectPeers(const std::vector<std::vector<char>>& addresses);
  bool closed() const ABSL_LOCKS_EXCLUDED(mutex_);

  // A receive that no peer answers: it ends when its connection does.
  struct Canary {
    int peer = 0;
    char byte = 0;
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
    std::thread waiting;
  };

  const int rank_;
  const int world_size_;
  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<gloo::transport::Context> context_;
  std::vector<gloo::transport::Pair*> pairs_;  // by rank, owned by context_; null for this rank
  std::vector<std::unique_ptr<Canary>> canaries_;
  mutable absl::Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_TCP_TCP_MESH_H_
