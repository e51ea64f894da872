// What others may see of the core.
#include <algorithm>

#include "server/core/impl.h"

namespace ringattn::server {

v1::Topology Coordinator::Impl::topology() const {
  v1::Topology topology;
  topology.set_generation(ring_.generation);
  if (draining_) {
    topology.set_state(v1::RING_STATE_DRAINING);
  } else if (ring_.phase == RingPhase::kReady) {
    topology.set_state(v1::RING_STATE_READY);
  } else if (ring_.phase == RingPhase::kEmpty) {
    topology.set_state(v1::RING_STATE_EMPTY);
  } else {
    topology.set_state(v1::RING_STATE_FORMING);
  }

  // Members by rank, then the others in the order in which they came.
  std::vector<ConnectionId> order;
  for (ConnectionId member : ring_.members) {
    if (Connected(member)) order.push_back(member);
  }
  for (const auto& [connection, worker] : workers_) {
    if (!RankOf(connection)) order.push_back(connection);
  }
  for (ConnectionId connection : order) {
    const WorkerRecord& worker = workers_.at(connection);
    const v1::Register& registration = worker.registration;
    v1::WorkerInfo* info = topology.add_workers();
    info->set_name(registration.name());
    info->set_incarnation(registration.incarnation());
    info->set_device(registration.device());
    info->set_memory_bytes(registration.memory_bytes());
    info->set_reserved_bytes(ReservedOn(connection));
    info->set_threads(registration.threads());
    info->set_data_address(registration.data_address());
    info->set_metrics_address(registration.metrics_address());
    const std::optional<int> rank = RankOf(connection);
    const bool ready = rank && ring_.phase == RingPhase::kReady;
    if (ready) info->set_rank(*rank);
    info->set_state(!ready      ? v1::WORKER_STATE_JOINING
                    : draining_ ? v1::WORKER_STATE_DRAINING
                                : v1::WORKER_STATE_READY);
  }
  return topology;
}

CoordinatorStats Coordinator::Impl::stats() const {
  CoordinatorStats stats;
  stats.queued_requests = queue_.size();
  stats.queued_bytes = queued_bytes_;
  stats.active_requests = requests_.size() - queue_.size();
  for (const auto& [connection, bytes] : ReservedByWorker()) stats.reserved_bytes += bytes;
  stats.generation = ring_.generation;
  stats.ring_reforms = std::max<int64_t>(0, formed_count_ - 1);
  stats.stalled_uploads = stalled_uploads_;
  stats.stalled_downloads = stalled_downloads_;
  if (ring_.phase == RingPhase::kReady) stats.ready_workers = ring_.members.size();
  return stats;
}

std::optional<OperationView> Coordinator::Impl::FindOperation(const std::string& request_id) const {
  const auto found = stream_by_request_id_.find(request_id);
  if (found != stream_by_request_id_.end()) return ViewOf(requests_.at(found->second));
  const auto ended =
      std::find_if(finished_.rbegin(), finished_.rend(),
                   [&](const OperationView& view) { return view.request_id == request_id; });
  if (ended == finished_.rend()) return std::nullopt;
  return *ended;
}

OperationView Coordinator::Impl::ViewOf(const RequestRecord& request) const {
  OperationView view;
  view.request_id = request.arrived.request_id;
  view.state = request.state;
  view.generation = request.generation;
  view.plan = request.plan;
  view.members = request.member_names;
  const auto operation = operations_.find(request.operation_id);
  if (request.state == v1::OPERATION_STATE_COMPUTING && operation != operations_.end()) {
    const std::vector<Member>& members = operation->second.members;
    double fraction = 1;
    for (const Member& member : members) {
      const double steps = std::max<double>(1, static_cast<double>(request.plan->step_count));
      if (!member.finished) fraction = std::min(fraction, member.step / steps);
    }
    view.computed_fraction = fraction;
  }
  return view;
}

}  // namespace ringattn::server
