// The coordinator's state machine. Its parts, one file each:
//
//   coordinator.cc   dispatch, and what is settled after every event
//   membership.cc    who is connected
//   ring_forming.cc  prepare, commit, tear down; when to re-form
//   failure.cc       silence, suspicion, standing still: who is to blame
//   requests.cc      the client's side of a request, first to last
//   admission.cc     the queue: plan, choose members, reserve
//   operations.cc    the workers' side of a request: memory and uploads
//   runs.cc          the workers' side of a request: the one order of runs
//   views.cc         topology, stats, lookups
//
// Every event changes records and then Settle() draws the conclusions from them,
// so that no conclusion depends on which event made it true.
#ifndef RINGATTN_SERVER_CORE_IMPL_H_
#define RINGATTN_SERVER_CORE_IMPL_H_

#include <deque>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "server/core/coordinator.h"
#include "server/core/state.h"

namespace ringattn::server {

class Coordinator::Impl {
 public:
  explicit Impl(CoordinatorConfig config);

  std::vector<Action> Handle(const Event& event, absl::Time now);
  v1::Topology topology() const;
  CoordinatorStats stats() const;
  std::optional<OperationView> FindOperation(const std::string& request_id) const;

 private:
  using Member = OperationRecord::Member;
  struct MemberRef {
    OperationRecord* operation = nullptr;
    Member* member = nullptr;
    int ring_rank = 0;
  };

  // coordinator.cc
  void On(const WorkerJoined& event);
  void On(const WorkerSaid& event);
  void On(const WorkerGone& event);
  void On(const RequestArrived& event);
  void On(const RequestEnded& event);
  void On(const UploadProgressed& event);
  void On(const DownloadProgressed& event);
  void On(const MembersStandStill& event);
  void On(const DownloadFinished& event);
  void On(const ShardStreamFailed& event);
  void On(const CancelRequested& event);
  void On(const DrainRequested& event);
  void On(const ReformRequested& event);
  void On(const Tick& event);
  void Settle();
  void ReportChanges();
  // The process itself did not run for a while: nobody else is late because of it.
  void ForgivePause(absl::Duration pause);
  void Emit(Action action) { actions_.push_back(std::move(action)); }
  v1::JoinResponse* Send(ConnectionId connection);

  // membership.cc
  void LoseWorker(ConnectionId connection, const std::string& reason, bool drop);
  std::optional<int> RankOf(ConnectionId connection) const;
  const std::string& NameOf(ConnectionId connection) const;
  bool Connected(ConnectionId connection) const { return workers_.count(connection) > 0; }

  // ring_forming.cc
  void AdvanceRing();
  void Gather();
  void StartPreparing();
  void StartCommitting();
  void BecomeReady();
  void OnPrepared(ConnectionId connection, const v1::Prepared& prepared);
  void OnCommitted(ConnectionId connection, const v1::Committed& committed);
  void OnTornDown(ConnectionId connection, const v1::TornDown& torn_down);
  void TearDown();
  void EndGeneration(const Failure& failure);
  void DropAwaited(const char* what);
  bool NewcomersWait() const;
  bool HoldsForNewcomers() const;
  void ConsiderNewcomers();
  void AnswerReforms(const absl::Status& status);

  // failure.cc
  void OnHeartbeat(ConnectionId connection, const v1::Heartbeat& heartbeat);
  void OnGenerationFailed(ConnectionId connection, const v1::GenerationFailed& failed);
  void CheckSilence();
  void CheckSuspicion();
  void CheckProgress();
  bool Precedes(const OperationRecord& earlier, const OperationRecord& later) const;
  bool IsBehindAnother(const OperationRecord& operation) const;
  std::vector<const OperationRecord*> RootsOf(const std::set<std::string>& named) const;
  Failure LostFailure(ConnectionId connection, const std::string& reason) const;

  // requests.cc
  RequestRecord* FindRequest(StreamId stream);
  OperationRecord* OperationOf(StreamId stream);
  void SetState(RequestRecord& request, v1::OperationState state);
  void FailStream(StreamId stream, const Failure& failure);
  void EndRequest(StreamId stream, const Failure& failure);
  void Forget(StreamId stream, const std::optional<Failure>& failure);
  void LeaveQueue(StreamId stream);
  OperationView ViewOf(const RequestRecord& request) const;
  void CheckRequestTimers();

  // admission.cc
  void AdmitQueued();
  bool IsReserving() const;
  bool EnsurePlanned(RequestRecord& request);
  PlannerInputs CurrentPlannerInputs(const AttentionSpec& spec, Direction direction) const;
  bool ReplacementIsDue(int world_size) const;
  bool AdmitHead(RequestRecord& request);
  int OperationsOn(ConnectionId connection) const;
  int64_t ReservedOn(ConnectionId connection) const;
  std::map<ConnectionId, int64_t> ReservedByWorker() const;
  absl::Duration ProgressTimeout(const Plan& plan) const;

  // operations.cc
  void StartOperation(RequestRecord& request, const std::vector<ConnectionId>& members,
                      const std::vector<int64_t>& bytes);
  void OnReserved(ConnectionId connection, const v1::Reserved& reserved);
  void Refuse(OperationRecord& operation, const Member& by, const v1::Reserved& reserved);
  void Requeue(OperationRecord& operation);
  void Accept(OperationRecord& operation);
  void OnUploaded(ConnectionId connection, const v1::Uploaded& uploaded);
  void CompleteUpload(OperationRecord& operation);
  void CloseOperation(OperationRecord& operation);
  void ReleaseAll(OperationRecord& operation);
  void OnReleased(ConnectionId connection, const v1::Released& released);
  void EraseIfReleased(OperationRecord& operation);
  void CheckOperationTimers();
  std::optional<std::string> WhyStalled(const OperationRecord& operation,
                                        const Member& member) const;
  void Enter(OperationRecord& operation, OperationRecord::Phase phase);
  MemberRef FindMember(ConnectionId connection, const std::string& operation_id,
                       uint64_t generation);

  // runs.cc
  void StartDueRuns();
  bool MayRun(const OperationRecord& operation) const;
  void StartRun(OperationRecord& operation);
  void OnFinished(ConnectionId connection, const v1::Finished& finished);
  void FinishRunIfDone(OperationRecord& operation);
  void FailPending(OperationRecord& operation);

  const CoordinatorConfig config_;
  absl::Time now_ = absl::InfinitePast();
  absl::Time started_at_ = absl::InfinitePast();
  std::vector<Action> actions_;

  std::map<ConnectionId, WorkerRecord> workers_;
  absl::Time newest_join_ = absl::InfinitePast();
  RingRecord ring_;
  absl::Time ringless_since_ = absl::InfinitePast();  // the end of the last ready ring
  // The last loss, and how many workers the ring had before it.
  absl::Time ring_lost_at_ = absl::InfinitePast();
  int ring_size_before_loss_ = 0;
  // Since when (possibly in the future) admission is held back for newcomers.
  std::optional<absl::Time> newcomer_hold_since_;
  int64_t formed_count_ = 0;
  int64_t stalled_uploads_ = 0;  // members given up because of one
  int64_t stalled_downloads_ = 0;
  bool reform_asked_ = false;

  std::map<std::string, OperationRecord> operations_;  // of this generation, by id
  uint64_t last_operation_ = 0;
  uint64_t last_run_ = 0;
  uint64_t releases_ = 0;  // operations that gave all their memory back

  std::map<StreamId, RequestRecord> requests_;
  std::unordered_map<std::string, StreamId> stream_by_request_id_;
  std::deque<StreamId> queue_;  // not yet reserving, first come first served
  int64_t queued_bytes_ = 0;
  std::deque<OperationView> finished_;

  bool draining_ = false;
  bool drain_unanswered_ = false;
  bool serving_reported_ = false;
  bool topology_changed_ = false;
  std::map<ConnectionId, int64_t> reserved_reported_;  // as of the last TopologyChanged
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_IMPL_H_
