// Coordinator: plans for queued requests.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/core/coordinator_impl.h"
#include "server/core/requests/client_failures.h"
#include "server/core/requests/planning_cost.h"
#include "server/core/requests/worker_capabilities.h"
#include "server/core/ring/measured_inputs.h"

namespace ringattn::server {

// Plans depend on the ring, so a new ring requires new plans.
void Coordinator::Impl::AskForPlans() {
  if (!ring_.ready() || plans_asked_ == ring_.generation()) return;
  plans_asked_ = ring_.generation();
  for (const auto& [stream, entry] : queue_.entries()) {
    Request& request = *requests_.Find(stream);
    request.min_world_size = 0;
    AskForPlan(request);
  }
}

void Coordinator::Impl::AskForPlan(Request& request) {
  if (request.asked_generation == ring_.generation()) return;
  request.asked_generation = ring_.generation();
  PlanThis ask;
  ask.stream = request.stream();
  ask.generation = ring_.generation();
  ask.client = request.arrived.client;
  ask.fingerprint = request.arrived.recipe_fingerprint;
  ask.spec = request.spec;
  ask.direction = request.arrived.direction;
  ask.choice = request.arrived.choice;
  ask.choice.recompute_forward = request.arrived.recompute_forward;
  ask.choice.keeps_inputs = request.retains();
  ask.choice.min_world_size = request.min_world_size;
  if (const Residual* residual = residuals_.Find(request.arrived.residual)) {
    ask.fingerprint = residual->fingerprint + 1;  // distinct from all requests' fingerprints
  }
  ask.inputs =
      MeasuredInputs(ring_, roster_, config_.limits, *ask.spec, ask.direction, ask.choice.members);
  ask.cost_seconds = PlanningCostSeconds(*ask.spec, ask.choice, ask.inputs);
  batch_.Emit(std::move(ask));
}

void Coordinator::Impl::StopPlanning(Request& request) {
  if (std::exchange(request.asked_generation, 0) != 0) batch_.Emit(CancelPlan{request.stream()});
}

void Coordinator::Impl::On(const Planned& event) {
  Request* request = requests_.Find(event.stream);
  if (request == nullptr || request->asked_generation != event.generation || !ring_.ready() ||
      event.generation != ring_.generation()) {
    return;
  }
  request->asked_generation = 0;
  request->planning_seconds += event.seconds;
  const Residual* residual = residuals_.Find(request->arrived.residual);
  if (residual != nullptr && !IsInRing(*residual)) return LoseResidual(residual->handle);
  for (const std::string& name : request->arrived.choice.members) {
    if (RankOf(name).has_value()) continue;
    std::vector<std::string> ready;
    for (ConnectionId member : ring_.members()) ready.push_back(roster_.NameOf(member));
    return EndRequest(event.stream, MemberNotReady(name, ready));
  }
  if (!event.plan.ok()) {
    return EndRequest(event.stream, PlanningFailure(*request, event.plan.status()));
  }
  const Plan& plan = **event.plan;
  if (std::optional<Failure> why = CheckServed(*request, plan.shards.world_size)) {
    return EndRequest(event.stream, *why);
  }
  const absl::Duration predicted = absl::Seconds(request->RunSeconds(plan));
  const absl::Duration left = request->arrived.deadline - batch_.now();
  if (predicted / config_.run_time_factor > left) {
    return EndRequest(event.stream, DeadlineTooShort(predicted, left));
  }
  request->plan = *event.plan;
  request->plan_generation = ring_.generation();
  request->blocked_until_release = 0;
  request->reserves_alone = false;
  request->workspace_bytes.clear();
  // The client is charged for the predicted run and for planning.
  if (!order_.Has(event.stream)) {
    const double cost = request->RunSeconds(plan) * plan.shards.world_size;
    order_.Enter(event.stream, request->arrived.client, cost + request->planning_seconds,
                 request->arrived.terms.weight);
  }
  queue_.SetNeeds(event.stream, NeedsOf(*request));
}

// Returns the failure if fewer than `world_size` members have kernels for the request.
// Sets serving_ranks.
std::optional<Failure> Coordinator::Impl::CheckServed(Request& request, int world_size) const {
  const PlanChoice& choice = request.arrived.choice;
  int serving = 0;
  std::optional<Failure> first_why;
  request.serving_ranks.assign(ring_.members().size(), false);
  for (size_t rank = 0; rank < ring_.members().size(); ++rank) {
    const v1::Register& registration = roster_.at(ring_.members()[rank]).registration;
    if (!MayServe(choice, registration.name())) continue;
    std::optional<Failure> why = CheckServedBy(registration, *request.spec, choice);
    request.serving_ranks[rank] = !why.has_value();
    serving += why.has_value() ? 0 : 1;
    if (!first_why.has_value()) first_why = std::move(why);
  }
  if (serving >= world_size) return std::nullopt;
  return first_why;
}

std::optional<int> Coordinator::Impl::RankOf(const std::string& worker) const {
  for (size_t rank = 0; rank < ring_.members().size(); ++rank) {
    if (roster_.NameOf(ring_.members()[rank]) == worker) return static_cast<int>(rank);
  }
  return std::nullopt;
}

Failure Coordinator::Impl::PlanningFailure(const Request& request,
                                           const absl::Status& status) const {
  if (absl::IsDeadlineExceeded(status)) return PlanningTooLong(status);
  if (absl::IsResourceExhausted(status)) return PlannerBusy(status, config_.retry_after);
  const bool due = ring_.ReplacementIsDue(request.arrived.choice.world_size.value_or(0));
  return due ? WorkersMissing(status, config_.retry_after) : NotPlannable(status);
}

}  // namespace ringattn::server
