// The coordinator's process, its control streams and its planning: delays messages, holds
// them back, repeats them, breaks streams, stops and restarts the process.
#ifndef RINGATTN_TESTS_SIMULATION_CONTROL_PLANE_H_
#define RINGATTN_TESTS_SIMULATION_CONTROL_PLANE_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/core/coordinator.h"
#include "tests/simulation/checker.h"
#include "tests/simulation/world.h"

namespace ringattn::server::simulation {

class SimWorker;

// A Join stream. Messages of one direction keep their order, as on any stream;
// those of different streams overtake each other.
struct Link {
  SimWorker* worker = nullptr;
  uint64_t process = 0;    // of the worker
  bool open_here = true;   // at the coordinator
  bool open_there = true;  // at the worker
  bool faulty = false;     // a fault was done to it: it may be dropped
  absl::Time last_up;
  absl::Time last_down;
  absl::Time up_stalled_until;
  absl::Time down_stalled_until;
};

// Not thread safe.
class ControlPlane {
 public:
  struct Hooks {
    std::function<void(const Action&)> client_action;
    std::function<void()> restarted;
    std::function<void(SimWorker*, uint64_t process)> dropped;
  };

  ControlPlane(World* world, CoordinatorConfig config, Checker* checker);
  void set_hooks(Hooks hooks) { hooks_ = std::move(hooks); }
  void Start();

  // For workers. Every dial is a new connection.
  ConnectionId Dial(SimWorker* worker, const v1::Register& registration);
  void Say(ConnectionId connection, v1::JoinRequest message);
  // Closes the worker's end. Silently: the coordinator receives no event.
  void HangUp(ConnectionId connection, bool silently);

  // For clients.
  void Feed(const Event& event);

  // Faults.
  void Break(ConnectionId connection);
  void Stall(ConnectionId connection, bool up, absl::Duration duration);
  void Pause(absl::Duration duration);
  void Restart();

  const Coordinator& core() const { return *core_; }
  bool paused() const { return paused_until_ > world_->now(); }

 private:
  absl::Duration Delay();
  void Arrive(ConnectionId connection, const Event& event);
  void DeliverDown(ConnectionId connection, const v1::JoinResponse& message);
  void CloseAtWorker(ConnectionId connection, absl::Duration delay);
  void CarryOut(const Action& action);
  void MakePlan(const PlanThis& ask);
  void TickForEver();

  World* const world_;
  CoordinatorConfig config_;
  Checker* const checker_;
  Hooks hooks_;
  std::unique_ptr<Coordinator> core_;
  uint64_t life_ = 0;  // of the coordinator's process
  std::map<ConnectionId, Link> links_;
  ConnectionId last_connection_ = 0;
  absl::Time paused_until_ = absl::InfinitePast();
  std::vector<Event> inbox_;            // came while paused
  std::map<StreamId, uint64_t> plans_;  // being made, and which attempt it is
  uint64_t last_plan_ = 0;
};

}  // namespace ringattn::server::simulation

#endif  // RINGATTN_TESTS_SIMULATION_CONTROL_PLANE_H_
