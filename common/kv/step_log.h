// KvStepLog: one rank's part in the step log of a cache: epochs, step numbers, repeated messages.
// Pure.
//
//   fenced(e) -> settled(e, S) -> begun(n) -> complete(n) -> begun(n + 1) -> ...
//
// Rules (docs/inference.md, "How an append is atomic"):
//   - Messages of another epoch than the settled one are rejected.
//   - Begin(n + 1) needs n complete on this rank; it commits n, even if its own rows are refused.
//   - An equal Begin(n) is accepted again; another one is STEP_CONFLICT once a call of n was
//   answered or
//     accepted; a refused Begin leaves the number free.
//   - A repeated call of the begun step is computed again.
#ifndef RINGATTN_COMMON_KV_STEP_LOG_H_
#define RINGATTN_COMMON_KV_STEP_LOG_H_

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

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
  // epoch older than the newest.
  absl::Status Open(uint64_t epoch);
  // Commits or undoes so that `step` is the last committed step. FAILED_PRECONDITION,
  // KV_INCONSISTENT if that is impossible here.
  absl::Status Settle(uint64_t epoch, uint64_t step);

  struct Begun {
    bool repeated = false;          // an equal Begin was accepted before
    std::vector<Refusal> refusals;  // not empty: the step was refused
  };
  // Errors: ABORTED (epoch), FAILED_PRECONDITION (STEP_ORDER, STEP_CONFLICT).
  absl::StatusOr<Begun> Begin(uint64_t epoch, const Step& step);
  // Before a layer call is computed. `appends`: it carries k and v. Errors: ABORTED,
  // FAILED_PRECONDITION (STEP_ORDER: not the begun step), INVALID_ARGUMENT (BAD_CALL: unknown
  // layer, or a read before that layer's append although rows append).
  absl::Status StartCall(uint64_t epoch, uint64_t step, uint32_t layer, bool appends);
  // The call was computed and its answer handed to the transport.
  void FinishCall(uint64_t step, uint32_t layer, bool appends);
  absl::Status Commit(uint64_t epoch, uint64_t step);

  uint64_t epoch() const { return epoch_; }
  bool settled() const { return settled_; }
  uint64_t committed() const { return committed_; }
  // The begun step if every started call of it was finished and, if its rows append, every layer
  // of the cache was appended or none; else committed().
  uint64_t complete() const;
  const std::optional<Step>& begun_step() const { return begun_; }

  KvBlockMap& blocks() { return blocks_; }
  const KvBlockMap& blocks() const { return blocks_; }

 private:
  const KvCacheSpec spec_;
  KvBlockMap blocks_;
  uint64_t epoch_ = 0;
  bool settled_ = false;
  uint64_t committed_ = 0;
  std::optional<Step> begun_;
  std::set<uint32_t> appended_;        // layers of the begun step whose append was finished
  std::multiset<uint32_t> in_flight_;  // layers of started calls
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_KV_STEP_LOG_H_
