// WireCommunicator: ordered groups of transfers over a WireEngine, on a separate thread for each
// lane, so that they overlap with compute.
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_COMMUNICATOR_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_COMMUNICATOR_H_

#include <memory>
#include <string>
#include <vector>

#include "worker/comm/communicator.h"
#include "worker/comm/wire/wire_engine.h"
#include "worker/device/host_queue.h"

namespace ringattn::worker {

// Thread safe, as Communicator requires.
//
// REQUIRES for every group: host memory, and no transfer of a rank with itself.
class WireCommunicator : public Communicator {
 public:
  // `streams` as WireForming returns them. `step_timeout`: time limit for a group once its
  // predecessors are done, including the time that peers take.
  WireCommunicator(int rank, int world_size, WireStreams streams, absl::Duration step_timeout,
                   std::shared_ptr<WireCounters> counters);
  ~WireCommunicator() override;

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  std::string transport(int) const override { return "wire"; }
  bool takes_compute_units(int) const override { return true; }
  bool has_lanes() const override { return true; }
  EventRef StartInLane(Lane lane, std::vector<PeerTransfer> group, std::vector<EventRef> after,
                       RunControl* control) override;
  void LosePeer(int peer, const std::string& reason) override { engine_.LosePeer(peer, reason); }
  void Abort(const std::string& reason) override { engine_.Abort(reason); }

 private:
  const int rank_;
  const int world_size_;
  const absl::Duration step_timeout_;
  WireEngine engine_;
  // Last: their threads use the other members.
  HostQueue queues_[kLanes] = {HostQueue("wire_ring"), HostQueue("wire_ring_lane1")};
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_COMMUNICATOR_H_
