// The queue. Strictly first come first served: a request that waits for memory
// holds up those behind it, so that small ones cannot starve a big one.
#include <algorithm>
#include <limits>
#include <tuple>

#include "common/wire/durations.h"
#include "server/core/failures.h"
#include "server/core/impl.h"

namespace ringattn::server {

void Coordinator::Impl::AdmitQueued() {
  while (ring_.phase == RingPhase::kReady && !ring_.suspicion && !HoldsForNewcomers() &&
         !queue_.empty() && !IsReserving()) {
    RequestRecord& head = requests_.at(queue_.front());
    if (!EnsurePlanned(head)) continue;  // it failed and left the queue
    if (!AdmitHead(head)) return;
  }
}

bool Coordinator::Impl::IsReserving() const {
  for (const auto& [id, operation] : operations_) {
    if (operation.phase == OperationRecord::Phase::kReserving) return true;
  }
  return false;
}

// False if the request had to be failed.
bool Coordinator::Impl::EnsurePlanned(RequestRecord& request) {
  if (request.plan && request.plan_generation == ring_.generation) return true;
  PlanChoice choice = request.arrived.choice;
  choice.recompute_forward = request.arrived.recompute_forward;
  absl::StatusOr<Plan> plan =
      PlanRequest(request.arrived.spec, request.arrived.direction, choice, CurrentPlannerInputs());
  if (!plan.ok()) {
    const bool due = ReplacementIsDue(request.arrived.choice.world_size.value_or(0));
    EndRequest(request.arrived.stream, due ? WorkersMissing(plan.status(), config_.retry_after)
                                           : NotPlannable(plan.status()));
    return false;
  }
  request.plan = *std::move(plan);
  request.plan_generation = ring_.generation;
  request.blocked_until_release = 0;
  request.workspace_bytes.clear();
  return true;
}

PlannerInputs Coordinator::Impl::CurrentPlannerInputs() const {
  PlannerInputs inputs;
  inputs.ready_workers = ring_.members.size();
  inputs.single_device_threshold_tokens = config_.limits.single_device_threshold_tokens;
  double flops = 0, link = 0;  // of the slowest member that measured; 0: none has
  double call_overhead = 0;
  for (ConnectionId member : ring_.members) {
    const WorkerRecord& worker = workers_.at(member);
    const v1::Register& registration = worker.registration;
    const bool measured_ring = worker.committed.generation() == ring_.generation &&
                               worker.committed.link_bytes_per_second() > 0;
    const double its_flops = registration.flops_per_second();
    const double its_link = measured_ring ? worker.committed.link_bytes_per_second()
                                          : registration.link_bytes_per_second();
    if (its_flops > 0 && (flops == 0 || its_flops < flops)) flops = its_flops;
    if (its_link > 0 && (link == 0 || its_link < link)) link = its_link;
    call_overhead = std::max(call_overhead, ToSeconds(registration.call_overhead()));
    if (!measured_ring) continue;
    inputs.exchange_overhead_s =
        std::max(inputs.exchange_overhead_s, ToSeconds(worker.committed.exchange_overhead()));
  }
  if (flops > 0) inputs.device_flops_per_s = flops;
  if (link > 0) inputs.link_bytes_per_s = link;
  if (call_overhead > 0) inputs.step_overhead_s = call_overhead;
  return inputs;
}

// True if the ring had this size until lately but has not now, or may be about to
// have it: a replay of what a loss aborted is not to be told that it asks for too much.
bool Coordinator::Impl::ReplacementIsDue(int world_size) const {
  if (world_size <= static_cast<int>(ring_.members.size())) return false;
  const bool was_larger =
      world_size <= ring_size_before_loss_ && now_ - ring_lost_at_ < config_.replacement_time_max;
  return was_larger || now_ - started_at_ < config_.assembly_time_max;
}

// False if it has to wait. REQUIRES: planned.
bool Coordinator::Impl::AdmitHead(RequestRecord& request) {
  if (request.blocked_until_release > releases_) return false;
  std::vector<int64_t> bytes = request.plan->buffer_bytes;
  const int64_t buffers = *std::max_element(bytes.begin(), bytes.end());

  std::vector<ConnectionId> roomy;  // could hold it if they held nothing else
  int64_t most_room = std::numeric_limits<int64_t>::min();
  ConnectionId most_room_on = 0;
  for (ConnectionId member : ring_.members) {
    const int64_t memory = workers_.at(member).registration.memory_bytes();
    const int64_t room = memory - request.WorkspaceOn(member);
    if (memory == 0 || room >= buffers) roomy.push_back(member);
    if (room > most_room) {
      most_room = room;
      most_room_on = member;
    }
  }
  if (roomy.size() < bytes.size()) {
    EndRequest(request.arrived.stream,
               NeverFits(*RankOf(most_room_on), NameOf(most_room_on), buffers,
                         request.WorkspaceOn(most_room_on),
                         workers_.at(most_room_on).registration.memory_bytes()));
    return true;
  }

  std::vector<std::tuple<int, int64_t, int>> idlest;  // operations, bytes, rank
  for (ConnectionId member : roomy) {
    const int64_t memory = workers_.at(member).registration.memory_bytes();
    const int operations = OperationsOn(member);
    const int64_t reserved = ReservedOn(member);
    if (operations >= config_.max_operations_per_worker) continue;
    if (memory > 0 && reserved > memory - request.WorkspaceOn(member) - buffers) continue;
    idlest.emplace_back(operations, reserved, *RankOf(member));
  }
  if (idlest.size() < bytes.size()) return false;
  std::partial_sort(idlest.begin(), idlest.begin() + bytes.size(), idlest.end());
  idlest.resize(bytes.size());
  std::sort(idlest.begin(), idlest.end(),
            [](const auto& a, const auto& b) { return std::get<2>(a) < std::get<2>(b); });
  std::vector<ConnectionId> members;
  for (const auto& [operations, reserved, rank] : idlest) {
    bytes[members.size()] += request.WorkspaceOn(ring_.members[rank]);
    members.push_back(ring_.members[rank]);
  }
  StartOperation(request, members, bytes);
  return true;
}

int Coordinator::Impl::OperationsOn(ConnectionId connection) const {
  int count = 0;
  for (const auto& [id, operation] : operations_) {
    for (const Member& member : operation.members) count += member.connection == connection;
  }
  return count;
}

int64_t Coordinator::Impl::ReservedOn(ConnectionId connection) const {
  const std::map<ConnectionId, int64_t> reserved = ReservedByWorker();
  const auto found = reserved.find(connection);
  return found == reserved.end() ? 0 : found->second;
}

// From Reserve until Released: what a worker may hold, whether it has said so or not.
std::map<ConnectionId, int64_t> Coordinator::Impl::ReservedByWorker() const {
  std::map<ConnectionId, int64_t> reserved;
  for (const auto& [id, operation] : operations_) {
    for (const Member& member : operation.members) {
      if (!member.released) reserved[member.connection] += member.bytes;
    }
  }
  return reserved;
}

absl::Duration Coordinator::Impl::ProgressTimeout(const Plan& plan) const {
  return std::max(config_.progress_timeout,
                  config_.progress_factor * absl::Seconds(plan.predicted_step_seconds));
}

}  // namespace ringattn::server
