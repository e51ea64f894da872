// A worker's process as the coordinator and its peers see it: the worker's side of
// WorkerControlService, with computing replaced by waiting.
//
// Ring step s + 1 of a rank needs its own step s done and the block that its left
// neighbour sends after its step s, as in the real ring. A run that preempts computes
// between two tiles of the other runs.
#ifndef RINGATTN_TESTS_SIMULATION_SIM_WORKER_H_
#define RINGATTN_TESTS_SIMULATION_SIM_WORKER_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "common/base/kept_parts.h"
#include "tests/simulation/control_plane.h"
#include "tests/simulation/sim_kv_ranks.h"

namespace ringattn::server::simulation {

struct WorkerTraits {
  std::string host;
  absl::Duration tile_time = absl::Milliseconds(5);
  int64_t memory_bytes = 1 << 20;
  int64_t workspace_bytes = 0;  // of any operation's kernels, in addition to the plan
  double flops_per_second = 0;  // that it says it has; 0: it has not measured
  bool reports_memory = true;
  // A transfer that waits longer than this has failed.
  absl::Duration transfer_timeout = absl::InfiniteDuration();
  // A lost peer ends the transfers with that peer only, as over sockets. Else it ends all of them.
  bool isolates_peers = true;
  absl::Duration kv_orphan_time = absl::Seconds(10);
};

// An ended operation that a worker keeps (worker/operation/kept_operations.h).
struct Kept {
  std::string principal;
  uint64_t generation = 0;
  absl::Time since;
  int64_t bytes = 0;
};

// Not thread safe.
class SimWorker {
 public:
  // Finds the process that made a blob; null if it is gone.
  using FindPeer = std::function<SimWorker*(const std::string& blob)>;

  SimWorker(World* world, ControlPlane* control, FindPeer find_peer, std::string name,
            WorkerTraits traits);

  // The launcher's hand.
  void Launch();
  void Kill(bool silently);
  void Stop();    // SIGSTOP
  void Resume();  // SIGCONT

  // The next operation stands still at some step, for ever, heartbeats going on.
  void StickNext() { stick_next_ = true; }
  // The next operation fails with an error of this worker.
  void FailNext() { fail_next_ = true; }
  // The next operation's inputs are not taken, or its outputs not sent, ever.
  void StopReadingNext() { stop_reading_next_ = true; }
  void StopSendingNext() { stop_sending_next_ = true; }
  void ForgetPlannedFaults() {
    stick_next_ = fail_next_ = stop_reading_next_ = stop_sending_next_ = false;
  }

  // The control plane's.
  void OnMessage(ConnectionId connection, uint64_t process, const v1::JoinResponse& message);
  void OnStreamClosed(ConnectionId connection, uint64_t process);

  // The data path's: true if this process still holds the operation.
  bool Holds(const std::string& operation_id, uint64_t process) const;
  void FinishUpload(const std::string& operation_id, uint64_t process);
  // Reports this member's progress in an operation whose client streams to its members.
  void SayTransfer(const std::string& operation_id, uint64_t process,
                   const v1::TransferProgress& progress);
  void SayDelivered(const std::string& operation_id, uint64_t process);
  // True while an operation of this request may write into its client's memory.
  bool WritesFor(const std::string& request_id) const;
  // True unless it holds the operation and lets its bytes lie.
  bool Reads(const std::string& operation_id) const;
  bool Sends(const std::string& operation_id) const;

  const std::string& name() const { return name_; }
  uint64_t process() const { return process_; }
  ConnectionId connection() const { return connection_; }
  bool alive() const { return alive_; }
  bool stopped() const { return stopped_; }
  bool stuck() const { return stuck_; }
  bool computes() const { return !running_.empty() || !preempting_.empty(); }
  int64_t reserved_bytes() const;
  // The memory of ended operations that are kept for equal requests, in addition to
  // reserved_bytes().
  int64_t kept_bytes() const { return kept_.bytes(); }
  const KeptParts<Kept>::Counts& kept_counts() const { return kept_.counts(); }
  SimKvRanks& kv() { return *kv_; }
  int64_t kv_bytes() const { return kv_->bytes(); }
  void set_on_kv_change(std::function<void(const std::string& cache)> on_change) {
    on_kv_change_ = std::move(on_change);
  }
  // A fault was done to this or a former process.
  bool WasFaulty(uint64_t process) const { return faulty_processes_.count(process) > 0; }
  std::string blob() const;

 private:
  struct Operation {
    v1::Reserve reserve;
    int ring_rank = 0;
    int64_t bytes = 0;
    bool uploaded = false;
    bool run = false;
    absl::Duration preempt_after;  // 0: does not preempt
    bool cancelled = false;
    bool finished = false;
    bool ended_well = false;
    bool exchange_failed = false;
    int step = 0;
    int tile = 0;
    uint64_t progress = 0;
    bool waits = false;
    bool reads = true;
    bool sends = true;
    std::set<int> received;                       // steps whose block has arrived
    std::optional<v1::Reserved> inline_reserved;  // set: Reserve and Finished are all its messages

    int world_size() const { return reserve.members_size(); }
    // Its run needs no message. Also true of an inline operation that needs more messages.
    bool runs_when_uploaded() const {
      return reserve.has_run_when_uploaded() ||
             (reserve.has_inline_run() && !reserve.places().empty());
    }
  };

  void Later(absl::Duration delay, std::function<void()> callback);
  void Say(const v1::JoinRequest& message) { control_->Say(connection_, message); }
  void Dial();
  void Heartbeats();
  void FreeEverything();
  void ForgetRuns();

  void ForgetKept();
  void PrepareOnly(const v1::Reserve& reserve, int64_t bytes, v1::JoinRequest message);
  // Takes what an equal operation has left, and makes room for `bytes`.
  void TakeKept(const v1::Reserve& reserve, int64_t bytes);
  void Keep(const Operation& operation);
  // Evicts as far as the reserved memory and `bytes` need it.
  void GiveWay(int64_t bytes);
  void CheckKept();

  void OnPrepare(const v1::Prepare& prepare);
  void OnCommit(const v1::Commit& commit);
  void OnProbe(const v1::Probe& probe);
  void OnTeardown(const v1::Teardown& teardown);
  void OnLosePeer(const v1::LosePeer& lose);
  void OnReserve(const v1::Reserve& reserve);
  void OnExpectRegion(const v1::ExpectRegion& expect);
  void RunInline(const std::string& id, const v1::Reserved& reserved);
  void RunUploaded(const std::string& id);
  void OnRun(const v1::Run& run);
  void OnCancel(const v1::Cancel& cancel);
  void OnRelease(const v1::Release& release);
  void OnDropResiduals(const v1::DropResiduals& drop);

  bool IsRunning(const std::string& id) const { return running_ == id || preempting_ == id; }
  void StartNext();
  void StartPreempting();
  void EndPreemption();
  void EndPause();
  bool Pauses() const;
  // The run begins to compute; it may be the one that sticks.
  void Begin(const std::string& id);
  void ComputeTile(const std::string& id);
  void EndStep(const std::string& id);
  void BeginStep(const std::string& id);
  void OnBlock(const std::string& id, int step);
  void Finish(const std::string& id, bool ok);
  // Ends a run whose operation is released.
  void StopRun(const std::string& id);
  void BreakRing(const std::string& reason, const std::vector<uint32_t>& unreached = {});
  void OnPeerBroke(uint64_t generation, const std::string& peer);
  // Closes the link to one peer, which notices it.
  void BreakLink(const std::string& peer);
  void Notify(const std::string& peer);
  bool IsBroken(const Operation& operation, int ring_rank) const;
  std::string BlobOf(const Operation& operation, int ring_rank) const;
  // Reports that the run has ended because of a transfer.
  void FailExchange(const std::string& id, const std::string& reason);
  void LeaveRing();
  SimWorker* Peer(const Operation& operation, int ring_rank) const;

  World* const world_;
  ControlPlane* const control_;
  const FindPeer find_peer_;
  const std::string name_;
  const WorkerTraits traits_;

  bool alive_ = false;
  bool stopped_ = false;
  bool stuck_ = false;
  bool stick_next_ = false;
  bool fail_next_ = false;
  bool stop_reading_next_ = false;
  bool stop_sending_next_ = false;
  uint64_t process_ = 0;
  std::set<uint64_t> faulty_processes_;
  std::deque<std::function<void()>> backlog_;  // due while stopped
  ConnectionId connection_ = 0;
  uint64_t heartbeat_sequence_ = 0;

  uint64_t generation_ = 0;  // 0: none
  bool committed_ = false;
  bool broken_ = false;  // without isolates_peers: no transfer works any more
  std::vector<std::string> blobs_;
  std::set<std::string> broken_peers_;
  std::map<std::string, Operation> operations_;
  KeptParts<Kept> kept_;
  // When the hold on a recipe ends, and operations that were only prepared, in this generation.
  std::map<std::string, absl::Time> held_until_;
  std::set<std::string> prepared_;
  std::map<std::string, int64_t> residuals_;  // bytes, by the operation that left them
  std::function<void(const std::string& cache)> on_kv_change_;
  std::unique_ptr<SimKvRanks> kv_;
  std::deque<std::string> runs_;
  std::string running_;
  std::deque<std::string> preempting_runs_;
  std::string preempting_;
  absl::Time preemption_since_;
  absl::Time next_preemption_ = absl::InfinitePast();
  bool paused_ = false;  // the running operation has a tile to compute
};

}  // namespace ringattn::server::simulation

#endif  // RINGATTN_TESTS_SIMULATION_SIM_WORKER_H_
