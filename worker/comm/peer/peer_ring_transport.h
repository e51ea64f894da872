// PeerRingTransport: forms rings of GPUs of one machine whose memory the ranks map into
// one another, for PeerCopyEngine: by descriptors of cuMemCreate's memory where regions have them
// (DeviceRegion::descriptor), else by CUDA's legacy handles.
#ifndef RINGATTN_WORKER_COMM_PEER_PEER_RING_TRANSPORT_H_
#define RINGATTN_WORKER_COMM_PEER_PEER_RING_TRANSPORT_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/comm/peer/handle_server.h"
#include "worker/comm/peer/peer_blob.h"
#include "worker/comm/peer/peer_copy_engine.h"
#include "worker/comm/peer/peer_segment.h"
#include "worker/comm/peer/stream_flags.h"
#include "worker/comm/ring_attempts.h"
#include "worker/device/cuda/cuda_event.h"
#include "worker/device/cuda/device_region.h"
#include "worker/device/cuda/vmm_memory.h"
#include "worker/device/device.h"

namespace ringattn::worker {

// More would need more streams than a device has queues.
inline constexpr int kMaxPeerRing = 16;

struct PeerTransportOptions {
  int cuda_index = 0;
  // Where the device's buffers come from; sends must lie in them. There is one at least.
  DeviceRegions regions;
  // Memory of the regions, for the first exchange. Both callable while the transport lives.
  std::function<absl::StatusOr<std::unique_ptr<DeviceBuffer>>(int64_t bytes)> allocate;
  absl::Duration step_timeout = absl::Minutes(10);     // as NcclTransportOptions
  absl::Duration connect_timeout = absl::Seconds(30);  // as NcclTransportOptions
  absl::Duration abort_timeout = absl::Seconds(5);
  std::function<void(const std::string& what)> on_stuck;
  // For descriptors: the folder of this rank's socket (HandleServer::Options), seen under the same
  // path by all; empty: the ranks are in one network namespace.
  std::string socket_folder;
  // Maps memory of ranks in this very process like that of others. CUDA refuses it; fakes
  // of it do not.
  bool ipc_within_process = false;
};

// Thread safe.
class PeerRingTransport : public RingTransport {
 public:
  // FAILED_PRECONDITION if the driver or the device cannot share memory so, or for a folder
  // without room for a socket.
  static absl::StatusOr<std::unique_ptr<PeerRingTransport>> Create(PeerTransportOptions options);
  ~PeerRingTransport() override;

  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) override;
  // FAILED_PRECONDITION if these ranks cannot share memory (DecodePeerBlobs), or if mapping
  // it fails though they should. The communicator is of transport "peer", by legacy handles
  // "peer_ipc".
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(uint64_t generation,
                                                        const std::vector<std::string>& blobs,
                                                        absl::Time deadline) override;
  void Cancel() override { attempts_.Cancel(); }

 private:
  struct Attempt : RingAttempt, std::enable_shared_from_this<Attempt> {
    std::unique_ptr<PeerSegment> segment;
    std::shared_ptr<const void> offer;  // at the door; null without one
  };

  PeerRingTransport(PeerTransportOptions options, CudaEventPool* events, const StreamFlags* flags);
  absl::Status Init();
  absl::StatusOr<std::unique_ptr<Communicator>> Join(Attempt& attempt,
                                                     const std::vector<std::string>& blobs,
                                                     absl::Time deadline) const;
  // With the regions that the peer has by now.
  absl::StatusOr<PeerMapping> MapPeer(const Attempt& attempt, int peer, const PeerBlob& blob,
                                      absl::Time deadline) const;
  absl::StatusOr<PeerMapper> MapperOf(int peer, const PeerBlob& blob) const;
  // Of the peer that the address is of.
  absl::StatusOr<PeerMapper> VmmMapperOf(const Attempt& attempt, int peer, const PeerBlob& blob,
                                         PeerAddress address) const;

  const PeerTransportOptions options_;
  CudaEventPool* const events_;
  const StreamFlags* const flags_;
  PeerBlob about_us_;                   // but for the segment and the token
  const CudaDriver* driver_ = nullptr;  // with a door
  std::unique_ptr<HandleServer> door_;  // null: regions have no descriptors

  RingAttempts attempts_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_PEER_PEER_RING_TRANSPORT_H_
