// TcpMesh: one rank's TCP connections to all other ranks of a generation, made by
// Gloo. The only file of this folder (with its .cc) that knows Gloo's pairs.
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
  // Opens one listening socket per peer on `host` (a name or numeric address of this
  // machine). Peers can connect from then on, whether or not Connect was called.
  // INVALID_ARGUMENT if this machine has no such address.
  static absl::StatusOr<std::shared_ptr<TcpMesh>> Listen(const std::string& host, int rank,
                                                         int world_size,
                                                         absl::Duration connect_timeout);
  ~TcpMesh();

  TcpMesh(const TcpMesh&) = delete;
  TcpMesh& operator=(const TcpMesh&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  // Where each peer finds this rank; opaque, the same machine architecture assumed.
  std::string AddressBlob() const;

  // Connects to every peer; blocks at most until `deadline`. UNAVAILABLE if a peer
  // cannot be reached, CANCELLED after Close().
  absl::Status Connect(const std::vector<std::string>& blobs, absl::Time deadline);

  // Calls `on_lost` (on any thread, once per peer at most) when a connection breaks.
  // Needed because Gloo tells queued transfers of it, but not one that is partly
  // sent or received: that would wait out its whole timeout.
  // REQUIRES: Connect succeeded; called once.
  void Watch(std::function<void(int peer, const std::string& reason)> on_lost);

  // Ends the watch: no call of on_lost after it returns. Implies Close().
  void StopWatching();

  // A buffer for one transfer at a time. Throws gloo::Exception.
  std::unique_ptr<gloo::transport::UnboundBuffer> NewBuffer(void* data, int64_t bytes);

  // Closes all connections: pending transfers fail here and at the peers. Idempotent.
  void Close();

 private:
  TcpMesh(int rank, int world_size) : rank_(rank), world_size_(world_size) {}

  absl::Status ConnectPeers(const std::vector<std::vector<char>>& addresses);
  bool closed() const ABSL_LOCKS_EXCLUDED(mutex_);

  // A receive that nobody answers: it ends when its connection does.
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
  std::vector<gloo::transport::Pair*> pairs_;  // by rank, owned by context_; own is null
  std::vector<std::unique_ptr<Canary>> canaries_;
  mutable absl::Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_TCP_TCP_MESH_H_
