// Operations: the workers' side of requests: memory, uploads and runs. An operation is one attempt
// to execute a request. It outlives the request until every member has released its memory.
//
//   reserving -> uploading -> uploaded -> running -> downloading -> releasing
//
// A small operation on an idle worker is inline: Reserve carries its inputs and starts its run, and
// Finished carries its outputs and reports that the memory is free. It begins in `running`. If its
// tensors are in the client's memory, the worker copies them between these two messages. It may
// answer with Reserved instead, and the operation then takes the ordinary way.
//
// An operation that is only prepared ends with `reserving`: Reserved reports that the members keep
// it, as memory that is free to every request.
//
// Consequences for the request are returned to the caller, the Coordinator.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_OPERATIONS_H_
#define RINGATTN_SERVER_CORE_REQUESTS_OPERATIONS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/core/events/action_batch.h"
#include "server/core/events/config.h"
#include "server/core/requests/fair_order.h"
#include "server/core/requests/placement.h"

namespace ringattn::server {

struct Operation {
  enum class Phase {
    kReserving,
    kUploading,
    kUploaded,  // waits to run
    kRunning,   // until every member has finished
    kDownloading,
    kReleasing,
  };
  // Reservations on all members together.
  enum class Reservation {
    kPending,
    kGranted,   // every member accepted Reserve
    kRejected,  // a member rejected Reserve
  };
  // The way of the tensors.
  enum class Path {
    kRelay,         // through the coordinator
    kDirect,        // clients stream to the members, which report progress
    kClientMemory,  // members copy from and to the client's memory, and report progress
    kInline,        // in Reserve and Finished
    // As kClientMemory, but inline: Reserve starts the copies and the run, and Finished ends them.
    kInlineMemory,
    kNone,  // the operation is only prepared
  };
  // One member's memory.
  enum class Memory {
    kRequested,
    kHeld,
    kReleased,  // released, or never reserved
  };
  struct Member {
    ConnectionId connection = 0;
    int64_t bytes = 0;            // predicted, then as reserved
    int64_t workspace_bytes = 0;  // part of `bytes`, once reserved
    int64_t residual_bytes = 0;   // part of `bytes`, once reserved: kept with a residual
    Memory memory = Memory::kRequested;
    // Messages that have arrived. Separate threads of a worker send them, so their order varies.
    bool uploaded = false;
    bool finished = false;
    bool delivered = false;
    bool exchange_failed = false;  // its run ended because a transfer failed
    double device_seconds = 0;     // of its run, once finished
    double paused_seconds = 0;     // of its run: while it was preempted
    // From the newest heartbeat that names this operation.
    uint32_t step = 0;
    double fraction_done = 0;
    uint64_t progress = 0;
    bool waits_for_peer = false;
    // Since when its transfer of this phase has not moved although it should.
    std::optional<absl::Time> stalled_since;
    // For tensors that bypass the coordinator. `stalled_since` is then the last time that a
    // transfer moved or waited for the client.
    uint64_t received_bytes = 0;
    uint64_t sent_bytes = 0;
    bool waits_for_client = false;
    v1::RankReport report;
    // Set when an inline operation has finished.
    google::protobuf::RepeatedPtrField<v1::TensorChunk> outputs;
  };

  std::string id;
  uint64_t generation = 0;
  StreamId order_id = 0;           // its id in FairOrder
  std::optional<StreamId> stream;  // nullopt: the request has ended
  Phase phase = Phase::kReserving;
  std::vector<Member> members;  // by ring rank
  std::string residual;         // handle of the residual that it reads; empty: none
  std::string client;           // that its share is charged to
  double cost_seconds = 0;      // device seconds, predicted
  double planning_seconds = 0;  // already spent
  double run_seconds = 0;       // predicted
  double step_seconds = 0;      // of the longest step, predicted
  double slowdown = 1;          // of the slowest member's kernels (v1::Reserved)
  bool is_express = false;      // holds express slots
  bool reserves_alone = false;  // no other may reserve memory meanwhile
  Reservation reservation = Reservation::kPending;
  Path path = Path::kRelay;
  // Sent to the client once no member copies any more.
  std::optional<FailRequest> held_failure;
  int found = 0;              // only prepared: members that had kept it already
  uint64_t run_sequence = 0;  // position in the order of runs; 0: not yet
  bool may_preempt = false;   // as of Order
  // Its run has one member and runs there at once, while other runs of that worker pause. Runs that
  // preempt and other runs wait among themselves only. Set with run_sequence.
  bool preempts = false;
  bool runs_when_uploaded = false;  // its run needs no message (Reserve.run_when_uploaded)
  absl::Duration reserve_limit;
  absl::Duration progress_timeout;
  absl::Duration run_limit;
  absl::Time phase_since;
  absl::Duration run_wait;  // from the last input to its run
  absl::Time run_sent;
  absl::Time run_since;  // kRunning: when all earlier runs had finished
  // Uploading: the client's last bytes. Running: the last progress of any member.
  absl::Time last_advance;
  // A member's failure that the loss of a worker may explain. It fails the request at
  // `pending_failure_due` unless the generation has ended by then.
  std::optional<Failure> pending_failure;
  absl::Time pending_failure_due = absl::InfiniteFuture();

  bool IsOn(ConnectionId connection) const;
  bool was_accepted() const { return reservation == Reservation::kGranted; }
  bool bypasses_coordinator() const { return path != Path::kRelay; }
  bool is_inline() const { return path == Path::kInline || path == Path::kInlineMemory; }
  // Whether a member may write into the client's memory before it has released the operation.
  bool may_write_to_client() const {
    return path == Path::kInlineMemory ||
           (path == Path::kClientMemory && (was_accepted() || runs_when_uploaded));
  }
  bool is_only_prepared() const { return path == Path::kNone; }
  // Whether the request ends with the ring. All others begin again on the next one.
  bool ends_with_ring() const { return was_accepted() || is_inline(); }
};

// Not thread safe. References stay valid until their operation is erased, which OnReserved,
// OnReleased, EraseIfReleased and Clear may do, and for an inline operation also Withdraw, Close
// and ReleaseAll.
class Operations {
 public:
  using Phase = Operation::Phase;
  using Member = Operation::Member;

  // All arguments must outlive this object. `order` is informed of each run's start and actual
  // cost.
  Operations(const CoordinatorConfig* config, ActionBatch* batch, FairOrder* order)
      : config_(*config), batch_(*batch), order_(*order) {}

  // --- Reserving.
  std::string NextId(uint64_t generation);
  struct Order {
    StreamId stream = 0;
    std::string residual;
    std::string client;
    double cost_seconds = 0;  // of devices
    double planning_seconds = 0;
    double run_seconds = 0;
    double step_seconds = 0;
    bool is_express = false;
    bool reserves_alone = false;
    bool may_preempt = false;  // every member serves Run.preempt_after
    v1::Reserve reserve;       // with `places` for host or CUDA memory
    // By ring rank.
    std::vector<ConnectionId> members;
    std::vector<int64_t> bytes;
    std::vector<std::string> tokens;  // for direct streams; empty: none
    // The operation is inline if its run may start now. Null: it may not be inline. REQUIRES unless
    // null: one member.
    std::shared_ptr<const InlineTensors> inline_inputs;
    // The operation is inline if its run may start now. REQUIRES: one member and `places`.
    bool may_be_inline_in_memory = false;
  };
  // Sends Reserve to every member. Returns true if the operation is inline, so that it runs now.
  bool Start(Order order);
  struct ReserveResult {
    enum class Kind { kNothing, kAllReserved, kAllPrepared, kRefused };
    Kind kind = Kind::kNothing;
    Operation* operation = nullptr;
    Member* member = nullptr;
  };
  // After kAllReserved call Accept(); after kAllPrepared Close() and EraseIfReleased(), because no
  // member holds memory for it any more; after kRefused Close() or Withdraw(). An inline operation
  // is only ever refused, or reserved if its tensors are in the client's memory. Its request then
  // waits in FairOrder again.
  ReserveResult OnReserved(ConnectionId connection, const v1::Reserved& reserved);
  // Ends this attempt; the request continues.
  void Withdraw(Operation& operation);
  void Accept(Operation& operation);
  // Returns true if an accepted operation holds memory there, which it will release.
  bool OthersHoldMemoryOn(ConnectionId connection) const;
  // Returns true if an operation other than `except` (may be null) has requested memory and not
  // received all of it, or is releasing a partial reservation.
  bool OthersReserve(const Operation* except) const;
  bool OneReservesAlone() const;

  // --- Uploads and downloads.
  // Returns the operation if its run has begun with this, else null.
  Operation* OnUploaded(ConnectionId connection, const v1::Uploaded& uploaded);
  // The client moved, or the transfer does not wait for the client.
  void OnTransferProgress(Operation& operation, Phase phase);
  // Takes the ring ranks whose transfer is stalled. All others moved or have nothing to do.
  void OnStalled(Operation& operation, const std::vector<int>& ranks);

  // The result of a progress report for tensors that bypass the coordinator.
  struct Transferred {
    Operation* operation = nullptr;  // null if nothing changed
    int ring_rank = 0;
  };
  Transferred OnTransferProgress(ConnectionId connection, const v1::TransferProgress& progress);
  // Returns the operation if every member has delivered, else null.
  Operation* OnDelivered(ConnectionId connection, const v1::Delivered& delivered);
  static bool AllDelivered(const Operation& operation);

  // --- Runs.
  // Sends Run to the members of every operation that may run now. Returns the streams.
  std::vector<StreamId> StartDueRuns();
  // Returns the operation if the report changed it, else null.
  Operation* OnFinished(ConnectionId connection, v1::Finished finished,
                        const std::string& worker_name, int generation_rank);
  static bool AllFinished(const Operation& operation);
  void BeginDownload(Operation& operation) { Enter(operation, Phase::kDownloading); }
  void FailLater(Operation& operation, Failure failure, absl::Duration delay);

  // --- Lost members.
  // Takes the report that a transfer failed, which ends the member's run. Returns the operation, or
  // null if the report changed nothing.
  Operation* OnExchangeFailed(ConnectionId connection, const v1::GenerationFailed& failed);
  // Returns true if a member has sent such a report.
  static bool HasFailedRun(const Operation& operation);
  // Counts the runs of members that have reported such a failure as finished.
  void FinishFailedRuns(Operation& operation);
  // Returns the operations of which the worker is a member.
  std::vector<std::string> OperationsOn(ConnectionId connection) const;
  // Returns whether the worker may write into the memory of a client.
  bool CopiesOn(ConnectionId connection) const;
  // The member computes nothing more and holds no memory. REQUIRES: it is a member.
  void LoseMember(Operation& operation, ConnectionId connection);
  // Returns whether the operation may succeed without the worker.
  static bool Outlives(const Operation& operation, ConnectionId lost);

  // --- The end.
  // The request has ended, and its workers are freed as soon as possible. Members that compute
  // complete their exchanges first, because their peers would hang otherwise. With `keep_residual`,
  // the state that a Backward needs stays with the workers and is no longer counted here. REQUIRES
  // for that: the operation is downloading and was reserved with `retain`.
  void Close(Operation& operation, bool keep_residual = false);
  // REQUIRES: no member computes.
  void ReleaseAll(Operation& operation, bool keep_residual = false);
  void OnReleased(ConnectionId connection, const v1::Released& released);
  // Erases the operation if every member has released it.
  void EraseIfReleased(Operation& operation);
  // The generation has ended; the workers free everything at Teardown. Returns the held failures.
  std::vector<FailRequest> Clear();

  // --- Progress.
  void OnHeartbeat(ConnectionId connection, const v1::Heartbeat& heartbeat);
  // Returns a running operation without progress on any rank for longer than its limit, else null.
  const Operation* FindStalledRun();
  // Returns the operations that hold up the named ones: they themselves, or the earlier runs that
  // they wait for. Operations on other workers are not evidence.
  std::vector<const Operation*> RootsOf(const std::set<std::string>& named) const;
  struct LateMember {
    ConnectionId connection = 0;
    LossReason reason = LossReason::kNoAnswer;
    std::string detail;
  };
  struct Overdue {
    std::vector<LateMember> members;
    std::vector<std::pair<StreamId, Failure>> requests;
  };
  // Applies all timeouts except those of runs.
  Overdue CheckTimers();
  void Forgive(absl::Duration pause);

  // --- Lookups.
  Operation* Find(const std::string& id);
  const Operation* Find(const std::string& id) const;
  const std::map<std::string, Operation>& all() const { return operations_; }
  std::map<std::string, Operation>& all() { return operations_; }
  bool empty() const { return operations_.empty(); }
  // Returns the occupancy of each member, by rank. Memory sizes and hosts are left 0.
  std::vector<Site> SitesOf(const std::vector<ConnectionId>& members) const;
  // Returns the handles of residuals that operations read.
  std::set<std::string> ResidualsInUse() const;
  // Returns the number of requests in progress that end with the ring.
  int64_t accepted_requests() const;
  // Returns the number of them that the worker serves.
  int64_t accepted_requests_on(ConnectionId connection) const;
  // From Reserve until Released: the most that each worker may hold.
  std::map<ConnectionId, int64_t> ReservedByWorker() const;
  // Returns the fraction of its work that the least advanced member has done.
  static double ComputedFraction(const Operation& operation);
  // Number of operations that have released all their memory.
  uint64_t releases() const { return releases_; }
  // Members given up because their transfer stalled.
  int64_t stalled_uploads() const { return stalled_uploads_; }
  int64_t stalled_downloads() const { return stalled_downloads_; }

 private:
  struct MemberRef {
    Operation* operation = nullptr;
    Member* member = nullptr;
    int ring_rank = 0;
  };

  MemberRef FindMember(ConnectionId connection, const std::string& operation_id,
                       uint64_t generation);
  bool MayBeInline(Operation& operation) const;
  bool MayRunWhenUploaded(Operation& operation) const;
  bool MayRunNow(Operation& operation) const;
  void SendInline(Operation& operation, const InlineTensors& inputs, v1::Reserve* reserve);
  void SendInlineInMemory(Operation& operation, v1::Reserve* reserve);
  bool GoOnWithMessages(Operation& operation);
  void TakeInline(Operation& operation, Member& member, v1::Finished& finished);
  void EndInline(Operation& operation);
  void EnterRun(Operation& operation);
  void Enter(Operation& operation, Phase phase);
  void CompleteUpload(Operation& operation);
  void WatchMembers(Operation& operation);
  bool MayPreempt(const Operation& operation) const;
  bool MayRun(const Operation& operation, const std::vector<const Operation*>& held_up) const;
  double SecondsAhead(const Operation& operation) const;
  void StartRun(Operation& operation);
  double DeviceSeconds(const Operation& operation, const Member& member) const;
  void CountPause(ConnectionId connection, double seconds);
  void Charge(const Operation& operation);
  void FinishMember(Operation& operation, Member& member);
  bool Precedes(const Operation& earlier, const Operation& later) const;
  bool IsBehindAnother(const Operation& operation) const;
  absl::Duration ReserveLimit(const Operation& operation) const;
  // Sets timeouts from the prediction and the members' slowdown.
  void SetLimits(Operation& operation) const;
  std::optional<std::string> DescribeStall(const Operation& operation, const Member& member) const;
  void CheckMembers(const Operation& operation, Overdue* overdue);
  std::optional<Failure> FailureDue(const Operation& operation) const;

  const CoordinatorConfig& config_;
  ActionBatch& batch_;
  FairOrder& order_;
  // End of each member's last run that did not preempt.
  std::map<ConnectionId, absl::Time> last_finished_;
  std::map<std::string, Operation> operations_;  // of this generation, by id
  uint64_t last_id_ = 0;
  uint64_t last_run_ = 0;
  uint64_t releases_ = 0;
  int64_t stalled_uploads_ = 0;
  int64_t stalled_downloads_ = 0;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_OPERATIONS_H_
