// The rules that the coordinator must keep at every step, checked against its inputs and its
// actions.
#ifndef RINGATTN_TESTS_SIMULATION_CHECKER_H_
#define RINGATTN_TESTS_SIMULATION_CHECKER_H_

#include <map>
#include <set>
#include <string>
#include <vector>

#include "server/core/coordinator.h"
#include "tests/simulation/world.h"

namespace ringattn::server::simulation {

// Not thread safe.
class Checker {
 public:
  Checker(World* world, const CoordinatorConfig& config) : world_(world), config_(config) {}

  void OnCoordinatorStarted(const Coordinator* core);
  // Call this before the coordinator processes the message.
  void OnWorkerSaid(const WorkerMessage& said);
  void OnWorkerGone(const WorkerDisconnected& gone) { gone_.insert(gone.connection); }
  void OnAction(const Action& action);
  void OnSettled();

  // All workers of the host fail within one heartbeat.
  void OnHostDies(const std::string& host, const std::vector<std::string>& workers, bool silently);
  // A lost worker ends only the transfers with that worker.
  void set_isolates_peers(bool isolates) { isolates_peers_ = isolates; }
  // How many requests succeeded after their ring had lost another member.
  int64_t outlived() const { return outlived_; }
  // How many rings have begun to form, over all lives.
  int64_t formings() const { return formings_; }

 private:
  struct Operation {
    std::vector<ConnectionId> members;  // Reserve was sent to them
    std::set<ConnectionId> reserved, uploaded, run, finished;
    std::set<ConnectionId> failed;    // runs
    std::vector<std::string> tokens;  // of clients' streams
    uint64_t run_sequence = 0;
    bool accepted = false;
    bool only_prepared = false;
    bool in_memory = false;       // its members may write into the client's memory
    bool runs_by_itself = false;  // its run needs no message and may begin unnoticed
  };

  void On(ConnectionId connection, const v1::JoinResponse& message);
  void OnRun(ConnectionId connection, const std::string& id, bool preempts);
  void On(const AcceptRequest& accept);
  void On(const BeginDownload& begin);
  void EndStream(StreamId stream);
  void CheckLoss(const FailRequest& fail);
  void On(const LossEvent& event);

  World* const world_;
  const CoordinatorConfig config_;
  const Coordinator* core_ = nullptr;
  uint64_t generation_ = 0;            // the newest prepared, over all lives
  bool torn_down_ = true;              // or no worker is left to notify
  std::vector<ConnectionId> members_;  // by rank
  std::set<ConnectionId> prepared_;
  std::set<ConnectionId> dropped_;
  std::set<ConnectionId> gone_;                  // closed by the worker
  std::map<std::string, Operation> operations_;  // of this generation
  std::map<StreamId, std::string> accepted_;     // operation ids
  std::set<std::string> tokens_;                 // over all lives
  std::map<ConnectionId, uint64_t> last_run_;
  std::map<ConnectionId, uint64_t> last_preempting_run_;
  uint64_t runs_ = 0;
  std::set<StreamId> ended_;
  int64_t formings_ = 0;
  bool isolates_peers_ = false;
  std::set<ConnectionId> lost_;  // members of this generation
  absl::Time first_loss_;        // of them
  int64_t outlived_ = 0;
  std::map<std::string, int> unlogged_losses_;  // by worker
  // kHostDies: the workers whose losses are not in an event yet.
  std::string dead_host_;
  std::set<std::string> dead_workers_;
  int single_events_allowed_ = 0;
};

}  // namespace ringattn::server::simulation

#endif  // RINGATTN_TESTS_SIMULATION_CHECKER_H_
