// PeerRingTransport: forms rings of GPUs on one machine whose ranks map each other's memory, for
// PeerCopyEngine. Memory is shared by descriptors of cuMemCreate if regions have them
// (DeviceRegion::descriptor), else by CUDA's legacy handles.
//
// Tests: peer_faults_test.cc, peer_rings_under_test.cc, peer_vmm_test.cc
#ifndef RINGATTN_WORKER_COMM_PEER_PEER_RING_TRANSPORT_H_
#define RINGATTN_WORKER_COMM_PEER_PEER_RING_TRANSPORT_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/comm/cuda/engine_transport.h"
#include "worker/comm/cuda/stream_flags.h"
#include "worker/comm/peer/handle_server.h"
#include "worker/comm/peer/peer_blob.h"
#include "worker/comm/peer/peer_copy_engine.h"
#include "worker/comm/peer/peer_segment.h"
#include "worker/comm/ring_attempts.h"
#include "worker/device/cuda/cuda_event.h"
#include "worker/device/cuda/device_region.h"
#include "worker/device/cuda/vmm_memory.h"
#include "worker/device/device.h"

namespace ringattn::worker {

struct PeerTransportOptions {
  int cuda_index = 0;
  // The source of the device's buffers. Sends must lie within them. At least one exists.
  DeviceRegions regions;
  // Allocates memory of the regions, for the first exchange. Both must be callable while the
  // transport lives.
  std::function<absl::StatusOr<std::unique_ptr<DeviceBuffer>>(int64_t bytes)> allocate;
  absl::Duration step_timeout = absl::Minutes(10);     // see NcclTransportOptions
  absl::Duration connect_timeout = absl::Seconds(30);  // see NcclTransportOptions
  absl::Duration abort_timeout = absl::Seconds(5);
  std::function<void(const std::string& what)> on_stuck;
  // For descriptors: the folder of this rank's socket (HandleServer::Options), which all ranks see
  // under the same path. Empty: all ranks are in one network namespace.
  std::string socket_folder;
  // Ranks with different ids do not share memory, as if they were on different machines. Empty:
  // the machine decides.
  std::string host_id;
  // Ranks on one GPU exchange as if each had its own. For tests: they take each other's time.
  bool shared_gpu = false;
  // Maps memory of ranks in this process like that of other processes. CUDA does not support this,
  // but its fake does.
  bool ipc_within_process = false;
};

// Thread safe.
class PeerRingTransport : public EngineTransport {
 public:
  // Returns FAILED_PRECONDITION if the driver or device cannot share memory in this way, or if the
  // folder cannot hold a socket.
  static absl::StatusOr<std::unique_ptr<PeerRingTransport>> Create(PeerTransportOptions options);
  ~PeerRingTransport() override;

  absl::StatusOr<std::string> Prepare(uint64_t generation, int rank, int world_size) override;
  // Returns FAILED_PRECONDITION if these ranks cannot share memory (DecodePeerBlobs), or if mapping
  // unexpectedly fails. The communicator's transport is "peer", or "peer_ipc" with legacy handles.
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(uint64_t generation,
                                                        const std::vector<std::string>& blobs,
                                                        absl::Time deadline) override;
  absl::StatusOr<std::string> PrepareEngine(uint64_t generation, int rank, int world_size) override;
  // Returns FAILED_PRECONDITION as Connect does.
  absl::StatusOr<std::unique_ptr<TransferEngine>> ConnectEngine(
      uint64_t generation, const std::vector<std::string>& blobs, const std::vector<int>& peers,
      absl::Time deadline) override;
  void Cancel() override { attempts_.Cancel(); }

 private:
  struct Attempt : RingAttempt, std::enable_shared_from_this<Attempt> {
    std::unique_ptr<PeerSegment> segment;
    std::shared_ptr<const void> published;  // published in handle_server_; null without one
  };

  PeerRingTransport(PeerTransportOptions options, CudaEventPool* events, const StreamFlags* flags);
  absl::Status Init();
  absl::StatusOr<std::unique_ptr<Communicator>> Join(Attempt& attempt,
                                                     const std::vector<std::string>& blobs,
                                                     absl::Time deadline) const;
  // `members`: decoded blobs by rank, those of `peers` at least.
  absl::StatusOr<std::unique_ptr<TransferEngine>> MakeEngine(Attempt& attempt,
                                                             const std::vector<PeerBlob>& members,
                                                             const std::vector<int>& peers,
                                                             absl::Time deadline) const;
  std::string TransportName() const { return handle_server_ != nullptr ? "peer" : "peer_ipc"; }
  // Maps the regions that the peer has now.
  absl::StatusOr<PeerMapping> MapPeer(const Attempt& attempt, int peer, const PeerBlob& blob,
                                      absl::Time deadline) const;
  absl::StatusOr<PeerMapper> MapperOf(int peer, const PeerBlob& blob) const;
  // `address`: the peer's.
  absl::StatusOr<PeerMapper> VmmMapperOf(const Attempt& attempt, int peer, const PeerBlob& blob,
                                         PeerAddress address) const;

  const PeerTransportOptions options_;
  CudaEventPool* const events_;
  const StreamFlags* const flags_;
  PeerBlob about_us_;                            // without segment and token
  const CudaDriver* driver_ = nullptr;           // set together with handle_server_
  std::unique_ptr<HandleServer> handle_server_;  // null: regions have no descriptors

  RingAttempts attempts_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_PEER_PEER_RING_TRANSPORT_H_
