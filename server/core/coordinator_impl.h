// The implementation of Coordinator: its components and the event handlers that connect them.
//
//   Roster      connected workers
//   Ring        prepare, commit, tear down; when to re-form
//   Suspicion   which member broke the ring
//   Requests    the client's side of requests
//   RequestQueue, FairOrder   waiting requests, and their order
//   Operations  the workers' side of requests
//   PreparedPlaces  which members keep what clients have prepared
//   Residuals   state that Forwards keep for Backwards
//   Losses      recently lost workers
//   HostLosses  which of them died with their host
//   Regions     memory that clients share with workers
//   KvCaches    keys and values that stay with the workers
//
// Each component has private state and unit tests. Coordinator passes each event to the components
// that it concerns and forwards the consequences. Then Settle() makes every decision that depends
// on the combined state, so that no decision depends on which event made it possible.
#ifndef RINGATTN_SERVER_CORE_COORDINATOR_IMPL_H_
#define RINGATTN_SERVER_CORE_COORDINATOR_IMPL_H_

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/core/coordinator.h"
#include "server/core/events/action_batch.h"
#include "server/core/kv/kv_caches.h"
#include "server/core/kv/kv_members.h"
#include "server/core/loss/host_losses.h"
#include "server/core/loss/losses.h"
#include "server/core/loss/suspicion.h"
#include "server/core/requests/fair_order.h"
#include "server/core/requests/operations.h"
#include "server/core/requests/placement.h"
#include "server/core/requests/prepared_places.h"
#include "server/core/requests/regions.h"
#include "server/core/requests/request_queue.h"
#include "server/core/requests/requests.h"
#include "server/core/requests/residuals.h"
#include "server/core/ring/ring.h"
#include "server/core/ring/roster.h"

namespace ringattn::server {

class Coordinator::Impl {
 public:
  explicit Impl(CoordinatorConfig config);

  std::vector<Action> Handle(Event event, absl::Time now);
  v1::Topology topology() const;
  CoordinatorStats stats() const;
  CoordinatorSnapshot Snapshot(int64_t max_requests) const;
  std::optional<OperationView> FindOperation(const std::string& request_id,
                                             const std::string& principal) const;
  ResidualView FindResidual(const std::string& handle, const std::string& principal,
                            const std::string& request_id) const;
  KvCacheView FindKvCache(const std::string& id, const std::string& principal) const;
  std::vector<v1::KvCacheInfo> ListKvCaches(const std::string& principal, const std::string& client,
                                            const std::string& after, int count) const;
  KvWriterView FindKvWriter(const std::string& id, const std::string& principal, uint64_t epoch,
                            const std::string& token) const;

 private:
  // Progress of a drain that an operator requested.
  enum class DrainPhase {
    kServing,
    kDraining,  // admits nothing; requests are in flight
    kDrained,   // admits nothing; DrainCompleted was emitted
  };
  bool draining() const { return drain_ != DrainPhase::kServing; }

  // coordinator.cc
  void On(const DrainRequested& event);
  void On(const Tick& event);
  void Settle();
  void ReportChanges();
  // Returns members by rank, then the other workers in the order in which they joined.
  std::vector<ConnectionId> WorkersInOrder() const;
  // Extends every timeout by `pause`, during which this process did not run.
  void ForgivePause(absl::Duration pause);

  // coordinator_workers.cc: control streams
  void On(const WorkerJoined& event);
  void On(WorkerMessage& event);
  void On(const WorkerDisconnected& event);
  void On(const ReformRequested& event);
  void OnHeartbeat(ConnectionId connection, const v1::Heartbeat& heartbeat);
  void OnGenerationFailed(ConnectionId connection, const v1::GenerationFailed& failed);
  void OnReserved(ConnectionId connection, const v1::Reserved& reserved);
  void OnUploaded(ConnectionId connection, const v1::Uploaded& uploaded);
  void OnFinished(ConnectionId connection, v1::Finished finished);
  void OnTransferProgress(ConnectionId connection, const v1::TransferProgress& progress);
  void OnDelivered(ConnectionId connection, const v1::Delivered& delivered);
  void AdvanceRing();
  void DismissLeavers();
  void CheckSilence();
  void CheckSuspicion();
  void CheckRuns();
  void CheckOperations();

  // coordinator_losses.cc: lost workers, and the end of a generation
  void LoseWorker(ConnectionId connection, LossReason reason, const std::string& detail, bool drop);
  LostWorker NoteLoss(ConnectionId connection, LossReason reason, const std::string& detail,
                      bool others_run_on);
  void LoseMember(ConnectionId connection, const Failure& failure);
  bool OthersRunOn(ConnectionId lost) const;
  void BeginEnding(const Failure& failure);
  void EndOperationsOn(ConnectionId lost, const Failure& failure);
  void OnExchangeFailed(Operation& operation);
  static bool MayBeExplainedByLoss(const Operation& operation);
  void ConcludeEnding();
  void EndGeneration(const Failure& failure);
  Failure LostFailure(ConnectionId connection, const std::string& reason) const;

  // coordinator_requests.cc: clients
  void On(RequestArrived& event);
  void On(const RequestEnded& event);
  void On(const UploadProgressed& event);
  void On(const DownloadProgressed& event);
  void On(const MembersStalled& event);
  void On(const DownloadFinished& event);
  void On(const ShardStreamFailed& event);
  void On(const CancelRequested& event);
  void On(const AttachRequested& event) { regions_.OnAttach(event); }
  void CheckRequests();
  void EndRequest(StreamId stream, const Failure& failure);
  // Ends the request but not its operation. The caller emits the returned action.
  FailRequest EndQuietly(Request& request, const Failure& failure);
  void SendDeferredFailures();
  void FinishDownload(Operation& operation);
  Operation* OperationOf(StreamId stream);
  std::optional<Failure> CheckQueue(const RequestArrived& event) const;
  void StartDueRuns();
  void ConcludeRun(Operation& operation);

  // coordinator_planning.cc
  void On(const Planned& event);
  void AskForPlans();
  void AskForPlan(Request& request);
  void StopPlanning(Request& request);
  void PlanForMoreWorkers(Request& request);
  std::optional<Failure> CheckServed(Request& request, int world_size) const;
  // Returns the rank in the ring; nullopt for a worker outside it.
  std::optional<int> RankOf(const std::string& worker) const;
  Failure PlanningFailure(const Request& request, const absl::Status& status) const;

  // coordinator_placement.cc: the members for a request
  SlotLimits SlotsPerMember() const;
  std::vector<Site> Sites() const;
  Placement PlaceRequest(const Request& request, std::vector<Site>* sites, bool only_express) const;
  // Returns the members that keep what the request needs, if they may serve it now.
  std::optional<Placement> PlaceWherePrepared(const Request& request,
                                              const PlacementRequest& wanted,
                                              const std::vector<Site>& all,
                                              bool only_express) const;
  std::optional<Failure> ChooseTransport(Request& request, const Placement& placement) const;
  // REQUIRES: the request has a plan and is in the fair order.
  QueueNeeds NeedsOf(const Request& request) const;

  // coordinator_admission.cc: from the queue to AcceptRequest
  // The admission of one event.
  struct Admission {
    // About the first request, in order of service, that does not wait for a slot.
    struct Decision {
      StreamId stream = 0;
      bool waits_for_others = false;  // their release of memory, or their reservations
      bool lost_residual = false;     // a member that keeps its residual has left the ring
      Placement placement = {};       // if neither
    };
    int64_t documents = 0;      // listed by the Reserve messages so far
    bool only_express = false;  // a request waits for a common slot
    std::vector<Site> sites;    // empty: to be computed again
  };
  void AdmitQueued();
  // Returns true if the request has a plan for this ring.
  bool HasPlan(const Request& request) const;
  std::optional<Admission::Decision> NextDecision(Admission* admission);
  bool CarryOut(const Admission::Decision& decision, Admission* admission);
  void GiveUpPlacing(Request& request, const Placement& placement);
  void StartOperation(Request& request, const Placement& placement);
  static std::string TokenOf(const Request& request, int ring_rank);
  void Refuse(Operation& operation, const Operation::Member& by, const v1::Reserved& reserved);
  void Requeue(Operation& operation);
  void Accept(Operation& operation);
  bool MayBeInline(const Request& request, const Operations::Order& order) const;
  bool MayBeInlineInMemory(const Request& request, const Operations::Order& order) const;
  // Whether the request may be inline, apart from the sizes of its tensors.
  bool OneMessageMaySuffice(const Request& request, const Operations::Order& order) const;
  // Every member keeps the operation: the request has succeeded.
  void ConcludePreparation(Operation& operation);
  // Emits AcceptRequest.
  void InformClient(Request& request, const Operation& operation);

  // coordinator_residuals.cc
  struct KeptResidual {
    std::string handle;
    std::string reason;  // why a requested residual was not kept
  };
  void On(const ResidualDeleted& event);
  void On(const ResidualsRenewed& event);
  KeptResidual KeepResidual(const Request& request, const Operation& operation);
  void StopRetaining(Request& request, std::string why);
  Placement PlaceReader(const Residual& residual, const PlacementRequest& wanted,
                        std::vector<Site> sites, bool only_express) const;
  bool IsInRing(const Residual& residual) const;
  void EndReaders(const std::vector<StreamId>& readers, ResidualEnd why);
  void LoseResidual(const std::string& handle);
  bool MakeRoomFor(const Request& request);
  bool EvictOneOn(ConnectionId connection, const std::string& except);
  // Returns the bytes reserved by operations, residuals and K/V caches.
  std::map<ConnectionId, int64_t> ReservedByWorker() const;

  // coordinator_kv.cc
  void On(const KvCacheRequested& event);
  void On(const KvWriterRequested& event);
  void On(const KvCachesRenewed& event);
  void On(const KvCacheDeleted& event);
  void On(const KvCacheFailed& event);
  std::vector<KvSite> KvSites(const KvCacheSpec& spec) const;
  void EvictForCache(ConnectionId connection, int64_t bytes);
  std::variant<KvTransport, Failure> ChooseKvTransport(const KvWriterRequested& event,
                                                       const KvCacheRecord& record) const;

  const CoordinatorConfig config_;
  ActionBatch batch_;
  Roster roster_;
  Ring ring_;
  Suspicion suspicion_;
  Requests requests_;
  RequestQueue queue_;
  FairOrder order_;  // requests from their plan until their run has ended
  Operations operations_;
  PreparedPlaces prepared_places_;
  Residuals residuals_;
  Losses losses_;
  HostLosses host_losses_;
  Regions regions_;
  KvCaches kv_caches_;
  // The newest accepted plan, as planned and with the members' workspace; null at first.
  struct {
    std::shared_ptr<const Plan> planned;
    std::shared_ptr<const Plan> accepted;
  } accepted_plan_;
  // Failures of an ended generation that clients receive once its workers have stopped copying.
  std::vector<FailRequest> held_failures_;

  // Since a member of the ring was lost and others run on: the failure of requests that do not
  // complete, the time of the last loss, and how many have completed.
  Failure loss_failure_;
  absl::Time ending_since_;
  absl::Time lost_at_;
  int64_t completed_ending_ = 0;
  int64_t outlived_losses_ = 0;

  bool settles_ = true;       // the event may have changed something that Settle() reads
  uint64_t plans_asked_ = 0;  // the generation for which the queue's plans were requested
  DrainPhase drain_ = DrainPhase::kServing;
  bool serving_reported_ = false;
  bool topology_changed_ = false;                      // in addition to Ring's changes
  std::map<ConnectionId, int64_t> reserved_reported_;  // as of the last TopologyChanged
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_COORDINATOR_IMPL_H_
