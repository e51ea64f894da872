// TcpRingTransport: forms rings of processes over TCP (Gloo). The two phases need
// nothing but the blobs: Prepare opens listening sockets, one per peer, and its blob
// says where; Connect joins them. Connections are neither encrypted nor
// authenticated: a private network is assumed.
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
  // Name or address of this machine that the peers can reach.
  std::string host = "127.0.0.1";
  // Bound of one group of transfers. Large: a slow rank is no fault, and who is to
  // blame for a stalled ring is decided elsewhere.
  absl::Duration step_timeout = absl::Minutes(10);
  // Upper bound of Connect whatever its deadline.
  absl::Duration connect_timeout = absl::Seconds(30);
};

// Thread safe. Ignores SIGPIPE in the whole process, since Gloo writes to sockets
// whose other end may be gone.
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
