// Ring: the life cycle of ring generations: gather, prepare, commit, serve, tear down. It has no
// knowledge of requests; its owner ends them when a generation ends.
#ifndef RINGATTN_SERVER_CORE_RING_RING_H_
#define RINGATTN_SERVER_CORE_RING_RING_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/core/events/action_batch.h"
#include "server/core/events/config.h"
#include "server/core/ring/reachability.h"
#include "server/core/ring/roster.h"

namespace ringattn::server {

enum class RingPhase {
  kEmpty,      // no worker is connected
  kGathering,  // waits for more workers
  kPreparing,
  kCommitting,
  kReady,
  kEnding,  // a member is lost; operations without it run on
  kTearingDown,
};

// Not thread safe.
class Ring {
 public:
  // All arguments must outlive the ring.
  Ring(const CoordinatorConfig* config, const Roster* roster, ActionBatch* batch);

  // --- Answers of workers. Answers for another phase or generation are ignored.
  void OnPrepared(ConnectionId connection, const v1::Prepared& prepared);
  // Returns true if the answer was expected.
  bool OnCommitted(ConnectionId connection, const v1::Committed& committed);
  void OnTornDown(ConnectionId connection, const v1::TornDown& torn_down);
  // A member left the roster. A ring that is forming starts over; a ready ring stays until Lose().
  void OnMemberFailed(ConnectionId connection);
  // A member could not form the ring, which starts over. Reports may follow the first one.
  void OnFormingFailed(ConnectionId connection, const v1::GenerationFailed& failed);

  // --- Time.
  // Returns the members that missed the deadline, and stores the missed answer's name in *what. The
  // caller removes them from the roster and reports them by OnMemberFailed.
  std::vector<ConnectionId> Overdue(const char** what) const;
  // Performs the due phase changes. `idle`: no operation exists; `steady`: no suspicion is open.
  void Advance(bool idle, bool steady);
  // Extends timeouts by a pause of this process.
  void Forgive(absl::Duration pause);

  // --- The end of a ready generation, after a loss or at an operator's request.
  // Serves nothing new until Lose(), which is due after loss_drain_timeout. REQUIRES: ready().
  void BeginEnding();
  void Lose();
  // Answered by RingReformed, immediately if no worker is connected.
  void AskReform();

  RingPhase phase() const { return phase_; }
  bool ready() const { return phase_ == RingPhase::kReady; }
  bool ending() const { return phase_ == RingPhase::kEnding; }
  // Returns true while members may hold operations.
  bool has_operations() const { return ready() || ending(); }
  // Returns true if Lose() is due. REQUIRES: ending().
  bool EndIsDue() const { return batch_.now() >= deadline_; }
  uint64_t generation() const { return generation_; }
  // By rank; includes lost members.
  const std::vector<ConnectionId>& members() const { return members_; }
  std::optional<int> RankOf(ConnectionId connection) const;
  int64_t formed_count() const { return formed_count_; }
  // Returns when the last ready generation ended, or began to end.
  absl::Time ringless_since() const { return ringless_since_; }
  // Returns true while a leaving member or newcomers wait for the ring to become idle. Nothing may
  // be admitted meanwhile.
  bool HoldsAdmission() const;
  // Returns true if the ring recently had this size, or may reach it shortly after the start. A
  // retry after a loss then fails with UNAVAILABLE instead of "too many workers".
  bool ReplacementIsDue(int world_size) const;
  // Returns whether the topology has changed since the last call.
  bool TakeChanged() { return reach_.TakeChanged() | std::exchange(changed_, false); }
  Reachability& reach() { return reach_; }
  const Reachability& reach() const { return reach_; }
  // Returns true if the worker is outside the ring because it cannot reach the members of the
  // largest ring.
  bool IsParted(ConnectionId connection) const;

 private:
  void Enter(RingPhase phase, absl::Time deadline);
  void Gather();
  bool MayPrepare() const;
  void StartPreparing();
  void StartCommitting();
  void BecomeReady();
  void TearDown();
  bool MemberLeaves() const;
  bool NewcomersWait() const;
  void ExplainFailure();
  void RememberSize();
  void ConsiderNewcomers(bool idle, bool steady);
  void AnswerReform(const absl::Status& status);

  const CoordinatorConfig& config_;
  const Roster& roster_;
  ActionBatch& batch_;

  Reachability reach_;
  RingPhase phase_ = RingPhase::kEmpty;
  uint64_t generation_;
  std::vector<ConnectionId> members_;             // by rank
  std::vector<std::string> blobs_;                // by rank
  std::set<ConnectionId> awaited_;                // members that have not answered in this phase
  absl::Time deadline_ = absl::InfiniteFuture();  // of this phase
  int failed_formings_ = 0;                       // since the last ready ring
  // The last forming: a member reported a failure, and a report named an unreached member.
  bool failure_reported_ = false;
  bool failure_explained_ = false;
  int64_t formed_count_ = 0;
  absl::Time ringless_since_ = absl::InfinitePast();
  // Time of the last loss, and the number of workers before it.
  absl::Time lost_at_ = absl::InfinitePast();
  int size_before_loss_ = 0;
  // Start time, possibly in the future, of holding back admission for newcomers.
  std::optional<absl::Time> newcomer_hold_since_;
  bool reform_asked_ = false;
  bool changed_ = false;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_RING_RING_H_
