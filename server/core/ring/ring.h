// Ring: one generation of workers after another: gather, prepare, commit, serve, tear down.
// It knows nothing of requests; whoever owns it ends them when a generation ends.
#ifndef RINGATTN_SERVER_CORE_RING_RING_H_
#define RINGATTN_SERVER_CORE_RING_RING_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/core/events/batch.h"
#include "server/core/events/config.h"
#include "server/core/ring/roster.h"

namespace ringattn::server {

enum class RingPhase {
  kEmpty,      // no worker is connected
  kGathering,  // waits for more workers
  kPreparing,
  kCommitting,
  kReady,
  kTearingDown,
};

// Not thread safe.
class Ring {
 public:
  // All outlive it.
  Ring(const CoordinatorConfig* config, const Roster* roster, ActionBatch* batch);

  // --- Answers of workers. What belongs to another phase or generation is ignored.
  void OnPrepared(ConnectionId connection, const v1::Prepared& prepared);
  // True if it was waited for.
  bool OnCommitted(ConnectionId connection, const v1::Committed& committed);
  void OnTornDown(ConnectionId connection, const v1::TornDown& torn_down);
  // A member has left the roster or cannot go on. While it forms, the ring starts anew; a
  // ready one waits for Lose().
  void OnMemberFailed(ConnectionId connection);

  // --- Time.
  // Those that should have answered by now; `what` says which message. To be removed from
  // the roster and reported by OnMemberFailed.
  std::vector<ConnectionId> Overdue(const char** what) const;
  // Draws the conclusions. `idle`: no operation is left; `steady`: nothing is being blamed.
  void Advance(bool idle, bool steady);
  // The process itself did not run for so long.
  void Forgive(absl::Duration pause);

  // --- The end of a ready generation: after a loss, and by an operator's word.
  void Lose();
  // Answered by RingReformed, at once if there is no worker.
  void AskReform();

  RingPhase phase() const { return phase_; }
  bool ready() const { return phase_ == RingPhase::kReady; }
  uint64_t generation() const { return generation_; }
  // By rank; the lost ones too.
  const std::vector<ConnectionId>& members() const { return members_; }
  std::optional<int> RankOf(ConnectionId connection) const;
  int64_t formed_count() const { return formed_count_; }
  // The end of the last ready generation.
  absl::Time ringless_since() const { return ringless_since_; }
  // While a member that leaves, or newcomers, wait for the ring to become idle, nothing new is
  // to be admitted.
  bool HoldsAdmission() const;
  // True if the ring had this size until lately but has not now, or may be about to
  // have it: a replay of what a loss aborted is not to be told that it asks for too much.
  bool ReplacementIsDue(int world_size) const;
  // Whether something that the topology shows has changed since the last call.
  bool TakeChanged() { return std::exchange(changed_, false); }

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
  void RememberSize();
  void ConsiderNewcomers(bool idle, bool steady);
  void AnswerReform(const absl::Status& status);

  const CoordinatorConfig& config_;
  const Roster& roster_;
  ActionBatch& batch_;

  RingPhase phase_ = RingPhase::kEmpty;
  uint64_t generation_;
  std::vector<ConnectionId> members_;             // by rank
  std::vector<std::string> blobs_;                // by rank
  std::set<ConnectionId> awaited_;                // that have not answered in this phase
  absl::Time deadline_ = absl::InfiniteFuture();  // of this phase
  int failed_formings_ = 0;                       // since the last ready ring
  int64_t formed_count_ = 0;
  absl::Time ringless_since_ = absl::InfinitePast();
  // The last loss, and how many workers the ring had before it.
  absl::Time lost_at_ = absl::InfinitePast();
  int size_before_loss_ = 0;
  // Since when (possibly in the future) admission is held back for newcomers.
  std::optional<absl::Time> newcomer_hold_since_;
  bool reform_asked_ = false;
  bool changed_ = false;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_RING_RING_H_
