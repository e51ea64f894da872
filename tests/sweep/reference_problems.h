// The problems of the interpreter's calls: the whole problem, and the parts of a dilated one.
#ifndef RINGATTN_TESTS_SWEEP_REFERENCE_PROBLEMS_H_
#define RINGATTN_TESTS_SWEEP_REFERENCE_PROBLEMS_H_

#include <cstdint>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/attention/band.h"
#include "common/layout/shard_plan.h"
#include "common/schedule/schedule.h"
#include "tests/sweep/reference_parts.h"
#include "worker/kernels/attention_kernel.h"

namespace ringattn::tests {

enum class Cut {
  kPieces,  // as CutIntoPieces does: what a worker passes to its kernels
  kRows,    // one piece per row, from the plan's spans alone
};

// Immutable.
class ReferenceProblems {
 public:
  // `spec` and `plan` outlive it. The tuning is the schedule's.
  ReferenceProblems(const AttentionSpec& spec, const ShardPlan& plan, const Schedule& schedule,
                    Cut cut);

  const AttentionSpec& spec() const { return spec_; }
  const ShardPlan& plan() const { return plan_; }
  const worker::AttentionProblem& problem() const { return problem_; }  // of all heads
  const std::vector<ReferencePart>& parts() const { return parts_; }

  // Returns the pieces of rows [begin, end) of a shard of the whole problem.
  std::vector<Piece> Pieces(const Shard& shard, const std::vector<int64_t>& cu_seqlens,
                            int64_t begin, int64_t end) const;

 private:
  void CutPartsIntoPieces();

  const AttentionSpec& spec_;
  const ShardPlan& plan_;
  const Cut cut_;
  worker::AttentionProblem problem_;
  std::vector<ReferencePart> parts_;
};

}  // namespace ringattn::tests

#endif  // RINGATTN_TESTS_SWEEP_REFERENCE_PROBLEMS_H_
