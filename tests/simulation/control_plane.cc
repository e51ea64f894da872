#include "tests/simulation/control_plane.h"

#include <algorithm>

#include "server/core/requests/plan_summary.h"
#include "tests/simulation/sim_worker.h"

namespace ringattn::server::simulation {
namespace {

// A worker whose coordinator does not answer notices by its own keepalive.
constexpr absl::Duration kWorkerKeepalive = absl::Seconds(12);

}  // namespace

ControlPlane::ControlPlane(World* world, CoordinatorConfig config, Checker* checker)
    : world_(world), config_(std::move(config)), checker_(checker) {}

void ControlPlane::Start() {
  core_ = std::make_unique<Coordinator>(config_);
  checker_->OnCoordinatorStarted(core_.get());
  TickForEver();
}

void ControlPlane::TickForEver() {
  world_->scheduler.After(config_.tick_interval, [this] {
    if (!paused()) Feed(Tick{});
    TickForEver();
  });
}

absl::Duration ControlPlane::Delay() {
  if (world_->weather == Weather::kStorm && !world_->faults_over && world_->random.OneIn(50)) {
    // Both ways together stay below the shortest timeout, Teardown's 3.5 s.
    return world_->random.Between(absl::Milliseconds(100), absl::Milliseconds(1400));
  }
  return world_->random.Between(absl::Microseconds(100), absl::Milliseconds(20));
}

ConnectionId ControlPlane::Dial(SimWorker* worker, const v1::Register& registration) {
  const ConnectionId connection = ++last_connection_;
  Link& link = links_[connection];
  link.worker = worker;
  link.process = worker->process();
  link.last_up = link.last_down = world_->now();
  link.up_stalled_until = link.down_stalled_until = absl::InfinitePast();
  Arrive(connection, WorkerJoined{connection, registration});
  return connection;
}

void ControlPlane::Say(ConnectionId connection, v1::JoinRequest message) {
  const auto link = links_.find(connection);
  if (link == links_.end() || !link->second.open_there) return;
  const WorkerMessage said{connection, std::move(message), world_->now()};
  Arrive(connection, said);
  const bool repeat = world_->weather == Weather::kStorm && !world_->faults_over;
  if (repeat && world_->random.OneIn(30)) Arrive(connection, said);
}

// Delivers an event up the stream, after all earlier ones.
void ControlPlane::Arrive(ConnectionId connection, const Event& event) {
  Link& link = links_.at(connection);
  link.last_up = std::max({link.last_up, link.up_stalled_until, world_->now() + Delay()});
  world_->scheduler.At(link.last_up, [this, event, life = life_] {
    if (life == life_) Feed(event);
  });
}

void ControlPlane::HangUp(ConnectionId connection, bool silently) {
  const auto found = links_.find(connection);
  if (found == links_.end() || !found->second.open_there) return;
  Link& link = found->second;
  link.open_there = false;
  link.faulty = true;
  if (!silently && link.open_here) Arrive(connection, WorkerDisconnected{connection});
}

void ControlPlane::Break(ConnectionId connection) {
  world_->Trace("fault: stream ", connection, " breaks");
  HangUp(connection, /*silently=*/false);
  Link& link = links_.at(connection);
  link.open_there = true;  // the process is alive and sees the end
  CloseAtWorker(connection, Delay());
}

void ControlPlane::Stall(ConnectionId connection, bool up, absl::Duration duration) {
  world_->Trace("fault: stream ", connection, up ? " up" : " down", " stalls for ",
                absl::FormatDuration(duration));
  Link& link = links_.at(connection);
  link.faulty = true;
  (up ? link.up_stalled_until : link.down_stalled_until) = world_->now() + duration;
}

void ControlPlane::CloseAtWorker(ConnectionId connection, absl::Duration delay) {
  Link& link = links_.at(connection);
  link.open_here = false;
  absl::Time told = std::max(link.last_down, world_->now() + delay);
  if (link.down_stalled_until > told) {
    told = std::min(link.down_stalled_until, world_->now() + kWorkerKeepalive);
  }
  world_->scheduler.At(told, [this, connection] {
    Link& closed = links_.at(connection);
    if (!closed.open_there) return;
    closed.open_there = false;
    closed.worker->OnStreamClosed(connection, closed.process);
  });
}

void ControlPlane::Pause(absl::Duration duration) {
  world_->Trace("fault: the coordinator stops for ", absl::FormatDuration(duration));
  paused_until_ = world_->now() + duration;
  world_->scheduler.At(paused_until_, [this, life = life_] {
    if (life != life_ || paused()) return;
    Feed(Tick{});
    for (const Event& event : std::exchange(inbox_, {})) Feed(event);
  });
}

void ControlPlane::Restart() {
  world_->Trace("fault: the coordinator restarts");
  config_.initial_generation = core_->topology().generation() + 1000;
  ++life_;
  inbox_.clear();
  plans_.clear();
  paused_until_ = absl::InfinitePast();
  core_ = std::make_unique<Coordinator>(config_);
  checker_->OnCoordinatorStarted(core_.get());
  for (auto& [connection, link] : links_) {
    if (!link.open_here) continue;
    link.faulty = true;
    CloseAtWorker(connection, Delay());
  }
  hooks_.restarted();
}

void ControlPlane::Feed(const Event& event) {
  if (paused()) {
    inbox_.push_back(event);
    return;
  }
  if (const auto* said = std::get_if<WorkerMessage>(&event)) checker_->OnWorkerSaid(*said);
  if (const auto* gone = std::get_if<WorkerDisconnected>(&event)) checker_->OnWorkerGone(*gone);
  const std::vector<Action> actions = core_->Handle(event, world_->now());
  for (const Action& action : actions) {
    checker_->OnAction(action);
    CarryOut(action);
  }
  checker_->OnSettled();
}

void ControlPlane::CarryOut(const Action& action) {
  if (const auto* send = std::get_if<SendToWorker>(&action)) {
    Link& link = links_.at(send->connection);
    if (!link.open_here) return;
    link.last_down = std::max({link.last_down, link.down_stalled_until, world_->now() + Delay()});
    world_->scheduler.At(link.last_down,
                         [this, connection = send->connection, message = send->message] {
                           DeliverDown(connection, message);
                         });
  } else if (const auto* drop = std::get_if<DropWorker>(&action)) {
    const Link& link = links_.at(drop->connection);
    world_->Trace("drop ", link.worker->name(), ": ", drop->reason);
    if (!link.faulty && !link.worker->WasFaulty(link.process) &&
        drop->reason != "its name joined again") {
      world_->Violate("healthy worker ", link.worker->name(), " dropped: ", drop->reason);
    }
    CloseAtWorker(drop->connection, Delay());
    hooks_.dropped(link.worker, link.process);
  } else if (const auto* ask = std::get_if<PlanThis>(&action)) {
    MakePlan(*ask);
  } else if (const auto* cancel = std::get_if<CancelPlan>(&action)) {
    // One that is on its way already comes all the same.
    if (world_->random.OneIn(4)) return;
    plans_.erase(cancel->stream);
  } else {
    hooks_.client_action(action);
  }
}

// Beside the core, in any order, sooner or later.
void ControlPlane::MakePlan(const PlanThis& ask) {
  Random& random = world_->random;
  const bool trouble = world_->weather == Weather::kStorm && !world_->faults_over;
  const absl::Duration slowest = random.OneIn(10) ? absl::Seconds(2) : absl::Milliseconds(5);
  Planned answer{ask.stream, ask.generation, nullptr, ask.cost_seconds};
  if (trouble && random.OneIn(50)) {
    answer.plan = absl::ResourceExhaustedError("too many wait");
  } else {
    absl::StatusOr<Plan> plan = PlanRequest(*ask.spec, ask.direction, ask.choice, ask.inputs);
    if (plan.ok()) {
      answer.plan = std::make_shared<const Plan>(WithoutSpans(*std::move(plan)));
    } else {
      answer.plan = plan.status();
    }
  }
  const uint64_t number = plans_[ask.stream] = ++last_plan_;
  world_->scheduler.After(random.Between(absl::ZeroDuration(), slowest),
                          [this, answer, number, life = life_] {
                            const auto plan = plans_.find(answer.stream);
                            if (life != life_ || plan == plans_.end()) return;
                            if (plan->second != number) return;
                            plans_.erase(plan);
                            Feed(answer);
                          });
}

void ControlPlane::DeliverDown(ConnectionId connection, const v1::JoinResponse& message) {
  const Link& link = links_.at(connection);
  if (link.open_there) link.worker->OnMessage(connection, link.process, message);
}

}  // namespace ringattn::server::simulation
