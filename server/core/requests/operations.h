// Operations: the workers' side of requests: memory, uploads, runs. An operation is one
// attempt to serve a request and outlives it until every member has given its memory back.
//
//   reserving -> uploading -> uploaded -> running -> downloading -> releasing
//
// What concerns the request is returned; Coordinator draws the conclusions.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_OPERATIONS_H_
#define RINGATTN_SERVER_CORE_REQUESTS_OPERATIONS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/core/events/batch.h"
#include "server/core/events/config.h"
#include "server/core/requests/fair_order.h"
#include "server/core/requests/placement.h"

namespace ringattn::server {

struct Operation {
  enum class Phase {
    kReserving,
    kUploading,
    kUploaded,  // waits for its turn to run
    kRunning,   // until every member has finished
    kDownloading,
    kReleasing,
  };
  struct Member {
    ConnectionId connection = 0;
    int64_t bytes = 0;            // predicted, then as reserved
    int64_t workspace_bytes = 0;  // of it, once reserved
    int64_t residual_bytes = 0;   // of it, likewise: what would stay with a residual
    bool reserved = false;
    bool uploaded = false;
    bool finished = false;
    bool released = false;
    double device_seconds = 0;  // that its run took there, once finished
    // Of the newest heartbeat that names this operation.
    uint32_t step = 0;
    double fraction_done = 0;
    uint64_t progress = 0;
    bool waits_for_peer = false;
    // Since when its transfer of this phase is stalled, although it is waited for.
    std::optional<absl::Time> stalled_since;
    // Where no tensor passes the coordinator. `stalled_since` is then since when nothing of them
    // has moved that was not the client's batch.
    uint64_t received_bytes = 0;
    uint64_t sent_bytes = 0;
    bool waits_for_client = false;
    bool delivered = false;
    v1::RankReport report;
  };

  std::string id;
  uint64_t generation = 0;
  StreamId place = 0;              // in the order of turns
  std::optional<StreamId> stream;  // none: the request has ended
  Phase phase = Phase::kReserving;
  std::vector<Member> members;  // by ring rank
  std::string residual;         // the handle of what it reads; empty: nothing
  std::string client;           // whose share it takes
  double cost_seconds = 0;      // of devices, as predicted
  double planning_seconds = 0;  // that were spent already
  double run_seconds = 0;       // as predicted
  double step_seconds = 0;      // likewise, of the longest step
  double slowdown = 1;          // of the slowest member's kernels (v1::Reserved)
  bool is_express = false;      // holds express places
  bool reserves_alone = false;  // no other may ask for memory while it does
  bool was_accepted = false;    // every member said yes to Reserve
  bool was_refused = false;     // one said no
  bool by_members = false;      // its tensors pass by members alone, who say how they do
  bool by_host_memory = false;  // likewise, and they copy from and to the client's memory
  // What the client is told once no member copies any more.
  std::optional<FailRequest> held_failure;
  uint64_t run_sequence = 0;  // place in the one order of runs; 0 = none yet
  absl::Duration progress_timeout;
  absl::Duration run_limit;
  absl::Time phase_since;
  absl::Duration turn_wait;  // from the last input to its run
  absl::Time run_sent;
  absl::Time run_since;  // kRunning: nothing has been before it
  // Upload: the client's last bytes. Run: the last sign of progress on any member.
  absl::Time last_advance;
  // A member's failure that a lost worker may explain; fails the request at `due`
  // unless the generation has ended by then.
  std::optional<Failure> pending_failure;
  absl::Time pending_failure_due = absl::InfiniteFuture();

  bool IsOn(ConnectionId connection) const;
};

// Not thread safe. References stay valid until their operation is erased, which OnReserved,
// OnReleased, EraseIfReleased and Clear may do.
class Operations {
 public:
  using Phase = Operation::Phase;
  using Member = Operation::Member;

  // All outlive it. `order` learns whose turn came, and what each run really took.
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
    v1::Reserve reserve;  // with places: by_host_memory
    // By ring rank.
    std::vector<ConnectionId> members;
    std::vector<int64_t> bytes;
    std::vector<std::string> tokens;  // of clients' streams; empty: they send none
  };
  // Asks every member for its memory.
  void Start(const Order& order);
  struct ReserveAnswer {
    enum class Kind { kNothing, kAllReserved, kRefused };
    Kind kind = Kind::kNothing;
    Operation* operation = nullptr;
    Member* member = nullptr;
  };
  // kAllReserved: Accept() it. kRefused: let it Close() or Withdraw().
  ReserveAnswer OnReserved(ConnectionId connection, const v1::Reserved& reserved);
  // The request goes on without this attempt.
  void Withdraw(Operation& operation);
  void Accept(Operation& operation);
  // True if somebody who was accepted holds memory there and will give it back.
  bool OthersHoldMemoryOn(ConnectionId connection) const;
  // True if an operation (but `besides`, which may be null) has asked for memory and not got
  // all of it, or is giving back what it got of it.
  bool OthersReserve(const Operation* besides) const;
  bool OneReservesAlone() const;

  // --- Uploads and downloads.
  void OnUploaded(ConnectionId connection, const v1::Uploaded& uploaded);
  // The client moved, or it is not the client that is waited for.
  void OnTransferProgress(Operation& operation, Phase phase);
  // Ring ranks whose transfer is stalled; all others move or are not waited for.
  void OnStalled(Operation& operation, const std::vector<int>& ranks);

  // Of one whose tensors pass by its members alone.
  struct Transferred {
    Operation* operation = nullptr;  // null: no news to anybody
    int ring_rank = 0;
  };
  Transferred OnTransferProgress(ConnectionId connection, const v1::TransferProgress& progress);
  // The operation, if every member has delivered.
  Operation* OnDelivered(ConnectionId connection, const v1::Delivered& delivered);
  static bool AllDelivered(const Operation& operation);

  // --- Runs.
  // Tells the members of those whose turn it is; their streams.
  std::vector<StreamId> StartDueRuns();
  // The operation, if the answer was news to it.
  Operation* OnFinished(ConnectionId connection, const v1::Finished& finished,
                        const std::string& worker_name, int generation_rank);
  static bool AllFinished(const Operation& operation);
  void BeginDownload(Operation& operation) { Enter(operation, Phase::kDownloading); }
  void FailLater(Operation& operation, Failure failure, absl::Duration delay);

  // --- The end. The request has ended: workers are freed as fast as they can be. Those that
  // compute finish their exchanges first, or their peers would hang.
  // `keep_residual`: what a Backward needs of it stays with the workers and is not counted here
  // any more. REQUIRES of that: it is downloading, and was reserved with `retain`.
  void Close(Operation& operation, bool keep_residual = false);
  // Once nobody computes.
  void ReleaseAll(Operation& operation, bool keep_residual = false);
  void OnReleased(ConnectionId connection, const v1::Released& released);
  // May erase it.
  void EraseIfReleased(Operation& operation);
  // The generation has ended: the workers free all of them on Teardown. What its clients were
  // to be told once nobody copies.
  std::vector<FailRequest> Clear();

  // --- Progress.
  void OnHeartbeat(ConnectionId connection, const v1::Heartbeat& heartbeat);
  // One that computes and shows no progress on any rank for longer than it may.
  const Operation* FindStalledRun();
  // Where the named operations are held up: they themselves, or those that they wait
  // behind. What is computed side by side with them proves nothing.
  std::vector<const Operation*> RootsOf(const std::set<std::string>& named) const;
  struct LateMember {
    ConnectionId connection = 0;
    LossReason reason = LossReason::kNoAnswer;
    std::string words;
  };
  struct Overdue {
    std::vector<LateMember> members;
    std::vector<std::pair<StreamId, Failure>> requests;
  };
  // Of everything but runs.
  Overdue CheckTimers();
  void Forgive(absl::Duration pause);

  // --- Lookups.
  Operation* Find(const std::string& id);
  const Operation* Find(const std::string& id) const;
  const std::map<std::string, Operation>& all() const { return operations_; }
  std::map<std::string, Operation>& all() { return operations_; }
  bool empty() const { return operations_.empty(); }
  // How one member is occupied; its memory is not known here.
  Site SiteOf(ConnectionId connection) const;
  // Handles of the residuals that operations read.
  std::set<std::string> ResidualsInUse() const;
  // Requests that were accepted and have not ended.
  int64_t accepted_requests() const;
  // From Reserve until Released: what a worker may hold, whether it has said so or not.
  std::map<ConnectionId, int64_t> ReservedByWorker() const;
  // How much of its work the least advanced member has behind it.
  static double ComputedFraction(const Operation& operation);
  // How often an operation gave all its memory back.
  uint64_t releases() const { return releases_; }
  // Members given up because their transfer was stalled.
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
  void Enter(Operation& operation, Phase phase);
  void CompleteUpload(Operation& operation);
  void WatchMembers(Operation& operation);
  bool MayRun(const Operation& operation, const std::vector<const Operation*>& held_up) const;
  double SecondsAhead(const Operation& operation) const;
  void StartRun(Operation& operation);
  double DeviceSeconds(const Operation& operation, const Member& member) const;
  void Charge(const Operation& operation);
  bool Precedes(const Operation& earlier, const Operation& later) const;
  bool IsBehindAnother(const Operation& operation) const;
  // From what was predicted and what members say of their kernels.
  void SetLimits(Operation& operation) const;
  std::optional<std::string> WhyStalled(const Operation& operation, const Member& member) const;
  void CheckMembers(const Operation& operation, Overdue* overdue);
  std::optional<Failure> WhyEnded(const Operation& operation) const;

  const CoordinatorConfig& config_;
  ActionBatch& batch_;
  FairOrder& order_;
  std::map<ConnectionId, absl::Time> last_finished_;  // when each member's last run had ended
  std::map<std::string, Operation> operations_;       // of this generation, by id
  uint64_t last_id_ = 0;
  uint64_t last_run_ = 0;
  uint64_t releases_ = 0;
  int64_t stalled_uploads_ = 0;
  int64_t stalled_downloads_ = 0;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_OPERATIONS_H_
