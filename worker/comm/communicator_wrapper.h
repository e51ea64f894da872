// CommunicatorWrapper: forwards every call to another communicator. Decorators override what they
// change.
#ifndef RINGATTN_WORKER_COMM_COMMUNICATOR_WRAPPER_H_
#define RINGATTN_WORKER_COMM_COMMUNICATOR_WRAPPER_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "worker/comm/communicator.h"

namespace ringattn::worker {

// As thread safe as the wrapped communicator.
class CommunicatorWrapper : public Communicator {
 public:
  explicit CommunicatorWrapper(std::shared_ptr<Communicator> inner) : inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  std::string transport(int peer) const override { return inner_->transport(peer); }
  bool takes_compute_units(int peer) const override { return inner_->takes_compute_units(peer); }
  bool has_lanes() const override { return inner_->has_lanes(); }
  EventRef StartInLane(Lane lane, std::vector<PeerTransfer> group, std::vector<EventRef> after,
                       RunControl* control) override {
    return inner_->StartInLane(lane, std::move(group), std::move(after), control);
  }
  void WakeLinks() override { inner_->WakeLinks(); }
  void LosePeer(int peer, const std::string& reason) override { inner_->LosePeer(peer, reason); }
  void Abort(const std::string& reason) override { inner_->Abort(reason); }

 private:
  const std::shared_ptr<Communicator> inner_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_COMMUNICATOR_WRAPPER_H_
