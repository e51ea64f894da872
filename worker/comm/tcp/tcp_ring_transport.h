// TcpRingTransport: forms rings of processes over TCP (Gloo). Prepare opens one listening socket
// per peer, and its blob has their addresses; Connect joins them. Connections are neither encrypted
// nor authenticated, so a private network is assumed.
//
// Tests: tcp_ring_transport_test.cc, tcp_ring_processes_test.cc
#ifndef RINGATTN_WORKER_COMM_TCP_TCP_RING_TRANSPORT_H_
#define RINGATTN_WORKER_COMM_TCP_TCP_RING_TRANSPORT_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "worker/comm/communicator.h"
#include "worker/comm/tcp/tcp_mesh.h"

namespace ringattn::worker {

struct TcpTransportOptions {
  // A name or address of this machine that peers can reach.
  std::string host = "127.0.0.1";
  // Time limit for one group of transfers. Large, because a slow rank is not an error; the
  // coordinator decides which rank has stalled a ring.
  absl::Duration step_timeout = absl::Minutes(10);
  // Upper limit of Connect, even if its deadline is later.
  absl::Duration connect_timeout = absl::Seconds(30);
};

// Thread safe. Ignores SIGPIPE in the whole process, because Gloo writes to sockets whose peer may
// be gone.
class TcpRingTransport : public RingTransport {
 public:
  explicit TcpRingTransport(TcpTransportOptions options);
  ~TcpRingTransport() override;

  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) override;
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(uint64_t generation,
                                                        const std::vector<std::string>& blobs,
                                                        absl::Time deadline) override;
  void Cancel() override;

 private:
  const TcpTransportOptions options_;
  absl::Mutex mutex_;
  uint64_t generation_ ABSL_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<TcpMesh> prepared_ ABSL_GUARDED_BY(mutex_);  // until connected
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_TCP_TCP_RING_TRANSPORT_H_
