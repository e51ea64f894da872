// TcpCommunicator: ordered groups of transfers over a TcpMesh, on a separate thread, so that they
// overlap with compute.
#ifndef RINGATTN_WORKER_COMM_TCP_TCP_COMMUNICATOR_H_
#define RINGATTN_WORKER_COMM_TCP_TCP_COMMUNICATOR_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "gloo/transport/unbound_buffer.h"
#include "worker/comm/communicator.h"
#include "worker/comm/tcp/tcp_mesh.h"
#include "worker/device/host_queue.h"

namespace ringattn::worker {

// Thread safe, as Communicator requires. All transfers of a group are in flight at once, in both
// directions and with any number of peers. Each lane has a thread. Long transfers are divided into
// segments, two of which are in flight; each counts as progress.
//
// A lost peer ends the transfers with that peer only. A group that takes too long ends everything,
// because Gloo then closes all connections.
//
// REQUIRES for every group: host memory, and no transfer of a rank with itself.
class TcpCommunicator : public Communicator {
 public:
  // `mesh` is connected and has no other user. `step_timeout`: time limit for a group once its
  // predecessors are done, including the time that peers take.
  TcpCommunicator(std::shared_ptr<TcpMesh> mesh, absl::Duration step_timeout);
  ~TcpCommunicator() override;

  int rank() const override { return mesh_->rank(); }
  int world_size() const override { return mesh_->world_size(); }
  std::string transport(int) const override { return "tcp"; }
  bool takes_compute_units(int) const override { return true; }
  bool has_lanes() const override { return true; }
  EventRef StartInLane(Lane lane, std::vector<PeerTransfer> group, std::vector<EventRef> after,
                       RunControl* control) override;
  void LosePeer(int peer, const std::string& reason) override;
  void Abort(const std::string& reason) override;

 private:
  // One segment of a transfer in flight.
  struct Segment {
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
    const PeerTransfer* transfer = nullptr;
  };
  using Wave = std::vector<Segment>;

  absl::Status Run(Lane lane, const std::vector<PeerTransfer>& group, RunControl* control);
  absl::Status RunWaves(Lane lane, const std::vector<PeerTransfer>& group, RunControl* control);
  // Skips transfers with lost peers and stores the first reason in *failure.
  void Post(const std::vector<PeerTransfer>& group, int64_t wave_index, Wave* wave,
            absl::Status* failure);
  // Waits for every segment, except those of lost peers. Stores the first failure in *failure.
  // Returns it if it ends all transfers.
  absl::Status Wait(const Wave& wave, absl::Time deadline, RunControl* control,
                    absl::Status* failure);
  absl::Status WaitFor(const Segment& segment, absl::Time deadline);
  void SetInFlight(Lane lane, std::vector<const Wave*> waves);
  void AbortWaits(std::optional<int> peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AbortedStatus() const;
  // Returns why nothing can be exchanged with the peer.
  absl::Status StatusOf(int peer) const;
  void ClosePeers();

  const std::shared_ptr<TcpMesh> mesh_;
  const absl::Duration step_timeout_;
  // Segments posted so far, per peer. Used by the thread of the lane that exchanges with the peer.
  std::vector<uint64_t> sent_, received_;

  mutable absl::Mutex mutex_;
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  std::string reason_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> lost_ ABSL_GUARDED_BY(mutex_);  // by rank: why; empty: not lost
  std::vector<const Wave*> in_flight_[kLanes] ABSL_GUARDED_BY(mutex_);

  // Last: their threads use the other members.
  HostQueue queues_[kLanes] = {HostQueue("tcp_ring"), HostQueue("tcp_ring_lane1")};
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_TCP_TCP_COMMUNICATOR_H_
