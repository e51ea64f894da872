// KvStepLog: one rank's replica of the step log of a cache: epochs, step numbers, repeated
// messages. Pure.
//
//   fenced(e) -> settled(e, S) -> begun(n) -> complete(n) -> begun(n + 1) -> ...
//
// An append is atomic over ranks without a vote:
//   - The client sends StepBegin(n + 1) only when every rank has answered every call of step n.
//     Committed steps of two ranks therefore differ by at most one, and both ranks have completed
//     the larger one.
//   - Everything of the current step may be sent again. Places in memory follow from the row's
//     lengths, so nothing is appended twice.
//   - A new writer settles the log. OpenCache fences older epochs on every rank and collects the
//     committed and complete steps. The log ends with S, the largest committed step, or the
//     client's answered_step if that is larger. If a rank has not completed S, the coordinator
//     rejects the client's claim; without a claim, the cache is lost. Then every rank commits or
//     undoes to exactly S.
//
// Rules of one rank:
//   - Messages of another epoch than the settled one are rejected.
//   - Begin(n + 1) needs n complete on this rank. It commits n, even if its own rows are refused.
//     Step n can be undone until then.
//   - An equal Begin(n) is accepted again. Another one is STEP_CONFLICT once a Begin(n) was
//     accepted; a refused Begin leaves the number free.
//   - A repeated call of the begun step is computed again.
//
// Errors carry KvErrorReason (kv_error.h).
#ifndef RINGATTN_COMMON_KV_STEP_LOG_H_
#define RINGATTN_COMMON_KV_STEP_LOG_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/kv/block_map.h"
#include "common/kv/step.h"

namespace ringattn {

// Not thread safe.
class KvStepLog {
 public:
  KvStepLog(const KvCacheSpec& spec, const KvPlacement& placement);

  // Fences: after it only `epoch` can be settled. Idempotent. FAILED_PRECONDITION, KV_FENCED for an
  // epoch older than the newest. REQUIRES: no call is in flight, here and in Settle.
  absl::Status Open(uint64_t epoch);
  // Commits or undoes so that `step` is the last committed step. Repeating it changes nothing.
  // FAILED_PRECONDITION: KV_FENCED for another epoch than the newest; KV_INCONSISTENT if the log
  // cannot end with `step`.
  absl::Status Settle(uint64_t epoch, uint64_t step);

  struct Begun {
    bool repeated = false;          // an equal Begin was accepted before
    std::vector<Refusal> refusals;  // not empty: the step was refused
  };
  // Errors: ABORTED (KV_FENCED), FAILED_PRECONDITION (STEP_ORDER, STEP_CONFLICT).
  absl::StatusOr<Begun> Begin(uint64_t epoch, const KvStep& step);
  // Before a layer call is computed. `appends`: the call writes this rank's entries of the step. A
  // rank that holds none of the step's new entries passes true for every call, because it cannot
  // distinguish the two. Errors: ABORTED (KV_FENCED), FAILED_PRECONDITION (STEP_ORDER: not the
  // begun step), INVALID_ARGUMENT (BAD_CALL: unknown layer, or a read before that layer's append
  // although rows append).
  absl::Status StartCall(uint64_t epoch, uint64_t step, uint32_t layer, bool appends);
  // The call was computed. REQUIRES: started and not finished.
  void FinishCall(uint32_t layer, bool appends);
  // Commits the begun step. Repeating it changes nothing. Errors: as Begin of the next step.
  absl::Status Commit(uint64_t epoch, uint64_t step);

  uint64_t epoch() const { return epoch_; }
  bool settled() const { return settled_; }
  uint64_t committed() const { return committed_; }
  // The begun step if no call is in flight and, if its rows append, every layer of the cache was
  // appended; else committed(). Entries that were never written are thus never committed.
  uint64_t complete() const;
  const std::optional<KvStep>& begun_step() const { return begun_; }

  KvBlockMap& blocks() { return blocks_; }
  const KvBlockMap& blocks() const { return blocks_; }

 private:
  // ABORTED, KV_FENCED unless `epoch` is the settled one.
  absl::Status CheckEpoch(uint64_t epoch) const;
  // Commits the begun step. FAILED_PRECONDITION, STEP_ORDER unless it is complete.
  absl::Status CommitBegun();
  void ForgetStep();

  KvBlockMap blocks_;
  absl::flat_hash_map<uint32_t, bool> appended_;  // layers of the cache: append of begun_ finished
  size_t num_appended_ = 0;
  uint64_t epoch_ = 0;
  bool settled_ = false;
  uint64_t settled_step_ = 0;
  uint64_t committed_ = 0;
  std::optional<KvStep> begun_;
  int64_t in_flight_ = 0;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_KV_STEP_LOG_H_
