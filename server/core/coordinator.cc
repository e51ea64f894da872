#include "server/core/coordinator.h"

#include <algorithm>
#include <utility>

#include "server/core/coordinator_impl.h"

namespace ringattn::server {

Coordinator::Coordinator(CoordinatorConfig config)
    : impl_(std::make_unique<Impl>(std::move(config))) {}
Coordinator::~Coordinator() = default;

std::vector<Action> Coordinator::Handle(Event event, absl::Time now) {
  return impl_->Handle(std::move(event), now);
}
v1::Topology Coordinator::topology() const { return impl_->topology(); }
CoordinatorStats Coordinator::stats() const { return impl_->stats(); }
CoordinatorSnapshot Coordinator::Snapshot(int64_t max_requests) const {
  return impl_->Snapshot(max_requests);
}
std::optional<OperationView> Coordinator::FindOperation(const std::string& request_id,
                                                        const std::string& principal) const {
  return impl_->FindOperation(request_id, principal);
}

ResidualView Coordinator::FindResidual(const std::string& handle, const std::string& principal,
                                       const std::string& request_id) const {
  return impl_->FindResidual(handle, principal, request_id);
}
KvCacheView Coordinator::FindKvCache(const std::string& id, const std::string& principal) const {
  return impl_->FindKvCache(id, principal);
}
std::vector<v1::KvCacheInfo> Coordinator::ListKvCaches(const std::string& principal,
                                                       const std::string& client,
                                                       const std::string& after, int count) const {
  return impl_->ListKvCaches(principal, client, after, count);
}
KvWriterView Coordinator::FindKvWriter(const std::string& id, const std::string& principal,
                                       uint64_t epoch, const std::string& token) const {
  return impl_->FindKvWriter(id, principal, epoch, token);
}

Coordinator::Impl::Impl(CoordinatorConfig config)
    : config_(std::move(config)),
      ring_(&config_, &roster_, &batch_),
      requests_(&config_, &batch_),
      operations_(&config_, &batch_, &order_),
      residuals_(&config_, &batch_),
      host_losses_(&config_, &roster_, &batch_),
      regions_(&config_, &batch_, &roster_),
      kv_caches_(&config_, &batch_) {}

namespace {

// Returns true for progress of transfers and steps, and for heartbeats. They are frequent and
// change nothing that Settle() reads.
bool IsOnlyProgress(const Event& event) {
  if (const auto* said = std::get_if<WorkerMessage>(&event)) {
    if (said->message.has_heartbeat()) return true;
    if (said->message.has_kv_touched()) return said->message.kv_touched().failure().empty();
    const v1::TransferProgress& progress = said->message.transfer_progress();
    return said->message.has_transfer_progress() && !progress.region_released() &&
           progress.failure().empty() && progress.bad_chunk().empty();
  }
  return std::holds_alternative<UploadProgressed>(event) ||
         std::holds_alternative<DownloadProgressed>(event) ||
         std::holds_alternative<MembersStalled>(event);
}

}  // namespace

std::vector<Action> Coordinator::Impl::Handle(Event event, absl::Time now) {
  // A gap of ten ticks means that this process was stopped or starved.
  const absl::Duration gap = batch_.started() ? now - batch_.now() : absl::ZeroDuration();
  if (gap > 10 * config_.tick_interval) ForgivePause(gap);
  batch_.Begin(now);
  settles_ = !IsOnlyProgress(event);
  std::visit([this](auto& value) { On(value); }, event);
  if (settles_) Settle();
  return batch_.Take();
}

void Coordinator::Impl::On(const Tick&) {
  CheckSilence();
  host_losses_.Advance();
  ring_.reach().Advance();
  CheckSuspicion();
  CheckRuns();
  CheckOperations();
  CheckRequests();
  residuals_.CheckTimers(operations_.ResidualsInUse());
  regions_.Sweep();
  kv_caches_.CheckTimers();
}

void Coordinator::Impl::On(const DrainRequested& event) {
  drain_ = event.undo ? DrainPhase::kServing : DrainPhase::kDraining;
  topology_changed_ = true;
}

void Coordinator::Impl::Settle() {
  AdvanceRing();
  SendDeferredFailures();
  AskForPlans();
  StartDueRuns();
  AdmitQueued();
  ReportChanges();
}

void Coordinator::Impl::ReportChanges() {
  const bool serving = ring_.ready() && !draining();
  if (serving != serving_reported_) {
    serving_reported_ = serving;
    batch_.Emit(ServingChanged{serving});
  }
  const bool members_changed = ring_.TakeChanged() | std::exchange(topology_changed_, false);
  std::map<ConnectionId, int64_t> reserved = ReservedByWorker();
  if (members_changed || reserved != reserved_reported_) {
    batch_.Emit(TopologyChanged{!members_changed});
  }
  reserved_reported_ = std::move(reserved);
  if (drain_ == DrainPhase::kDraining && requests_.empty() && operations_.empty() &&
      held_failures_.empty()) {
    drain_ = DrainPhase::kDrained;
    batch_.Emit(DrainCompleted{});
  }
}

void Coordinator::Impl::ForgivePause(absl::Duration pause) {
  roster_.Forgive(pause);
  ring_.Forgive(pause);
  suspicion_.Forgive(pause);
  host_losses_.Forgive(pause);
  operations_.Forgive(pause);
  residuals_.Forgive(pause);
  regions_.Forgive(pause);
  kv_caches_.Forgive(pause);
}

// ------------------------------------------------------------- views

std::vector<ConnectionId> Coordinator::Impl::WorkersInOrder() const {
  std::vector<ConnectionId> order;
  for (ConnectionId member : ring_.members()) {
    if (roster_.Has(member)) order.push_back(member);
  }
  for (const auto& [connection, worker] : roster_.workers()) {
    if (!ring_.RankOf(connection)) order.push_back(connection);
  }
  return order;
}

v1::Topology Coordinator::Impl::topology() const {
  v1::Topology topology;
  topology.set_generation(ring_.generation());
  if (draining()) {
    topology.set_state(v1::RING_STATE_DRAINING);
  } else if (ring_.ready()) {
    topology.set_state(v1::RING_STATE_READY);
  } else if (ring_.phase() == RingPhase::kEmpty) {
    topology.set_state(v1::RING_STATE_EMPTY);
  } else {
    topology.set_state(v1::RING_STATE_FORMING);
  }

  std::map<ConnectionId, int64_t> reserved = ReservedByWorker();
  for (ConnectionId connection : WorkersInOrder()) {
    const Worker& worker = roster_.at(connection);
    const v1::Register& registration = worker.registration;
    v1::WorkerInfo* info = topology.add_workers();
    info->set_name(registration.name());
    info->set_incarnation(registration.incarnation());
    info->set_device(registration.device());
    info->set_memory_bytes(registration.memory_bytes());
    info->set_reserved_bytes(reserved[connection]);
    info->set_kv_cache_bytes(static_cast<uint64_t>(kv_caches_.BytesOn(connection)));
    info->set_kv_caches(static_cast<uint32_t>(kv_caches_.CachesOn(connection)));
    info->set_max_kv_cache_bytes(registration.max_kv_cache_bytes());
    info->set_threads(registration.threads());
    info->set_data_address(registration.data_address());
    info->set_metrics_address(registration.metrics_address());
    *info->mutable_kernel_rates() = registration.kernel_rates();
    *info->mutable_options() = registration.options();
    *info->mutable_location() = registration.location();
    *info->mutable_call_overhead() = registration.call_overhead();
    if (worker.committed.generation() == ring_.generation()) {
      info->set_link_bytes_per_second(worker.committed.link_bytes_per_second());
      *info->mutable_exchange_overhead() = worker.committed.exchange_overhead();
      info->set_host_link_bytes_per_second(worker.committed.host_link_bytes_per_second());
      info->set_host_total_bytes_per_second(worker.committed.host_total_bytes_per_second());
      *info->mutable_host_exchange_overhead() = worker.committed.host_exchange_overhead();
      info->set_next_transport(worker.committed.next_transport());
    }
    const std::optional<int> rank = ring_.RankOf(connection);
    const bool ready = rank && ring_.ready();
    if (ready) info->set_rank(*rank);
    const bool parted = ring_.IsParted(connection);
    for (const std::string& place : ring_.reach().PartedFrom(connection)) {
      info->add_parted_from(place);
    }
    info->set_state(parted           ? v1::WORKER_STATE_PARTED
                    : !ready         ? v1::WORKER_STATE_JOINING
                    : worker.leaving ? v1::WORKER_STATE_LEAVING
                    : draining()     ? v1::WORKER_STATE_DRAINING
                                     : v1::WORKER_STATE_READY);
  }
  return topology;
}

CoordinatorStats Coordinator::Impl::stats() const {
  CoordinatorStats stats;
  stats.queued_requests = queue_.all().requests;
  stats.queued_bytes = queue_.all().bytes;
  stats.active_requests = requests_.size() - queue_.all().requests;
  stats.finished_bytes = requests_.finished_bytes();
  stats.residuals = residuals_.counts();
  stats.kv_caches = kv_caches_.counts();
  for (const auto& [connection, bytes] : ReservedByWorker()) {
    stats.reserved_bytes += bytes;
  }
  stats.generation = ring_.generation();
  stats.connected_workers = static_cast<int>(roster_.size());
  stats.ring_reforms = std::max<int64_t>(0, ring_.formed_count() - 1);
  stats.stalled_uploads = operations_.stalled_uploads();
  stats.stalled_downloads = operations_.stalled_downloads();
  stats.outlived_losses = outlived_losses_;
  stats.regions = static_cast<int64_t>(regions_.size());
  stats.order_steps = order_.steps();
  if (ring_.ready()) stats.ready_workers = ring_.members().size();
  for (const auto& [connection, worker] : roster_.workers()) {
    stats.parted_workers += ring_.IsParted(connection);
  }
  return stats;
}

std::optional<OperationView> Coordinator::Impl::FindOperation(const std::string& request_id,
                                                              const std::string& principal) const {
  std::optional<OperationView> view = requests_.FindView(request_id, principal);
  if (!view || view->state != v1::REQUEST_STATE_COMPUTING) return view;
  const Request& request = *requests_.FindById(request_id, principal);
  const Operation* operation = operations_.Find(request.operation_id);
  if (operation != nullptr) {
    view->computed_fraction = Operations::ComputedFraction(*operation);
  }
  return view;
}

}  // namespace ringattn::server
