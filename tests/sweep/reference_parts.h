// The parts of a dilated problem straight from the definition of a level (docs/semantics.md), token
// by token: the second reading of common/layout/dilation.h, for the interpreter.
#ifndef RINGATTN_TESTS_SWEEP_REFERENCE_PARTS_H_
#define RINGATTN_TESTS_SWEEP_REFERENCE_PARTS_H_

#include <cstdint>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/layout/shard_plan.h"
#include "worker/kernels/attention_kernel.h"

namespace ringattn::tests {

// The tokens of a shard in the order of its rows.
std::vector<int64_t> TokensOf(const Shard& shard);
// A piece for each of these tokens, as rows of a buffer.
std::vector<Piece> RowPieces(const std::vector<int64_t>& tokens,
                             const std::vector<int64_t>& cu_seqlens);

// Rows of a rank's shard that a part has, in their order.
struct PartShard {
  std::vector<int64_t> rows;
  std::vector<Piece> pieces;  // one for each of them
};

struct ReferencePart {
  AttentionSpec spec;  // the whole one's but for heads and what parts do not have
  std::vector<int64_t> q_heads;
  std::vector<int64_t> kv_heads;
  std::vector<PartShard> q;   // by rank
  std::vector<PartShard> kv;  // by rank
  // Bands, shifts, owners, slopes and dropout of the part, over those of the whole problem.
  worker::AttentionProblem problem;
};

// The problem of all heads: a second reading of worker/executor/bind_call, too.
worker::AttentionProblem ReferenceProblemOf(const AttentionSpec& spec);

// `whole`: the problem of all heads.
std::vector<ReferencePart> ReferencePartsOf(const AttentionSpec& spec, const ShardPlan& plan,
                                            const worker::AttentionProblem& whole);

}  // namespace ringattn::tests

#endif  // RINGATTN_TESTS_SWEEP_REFERENCE_PARTS_H_
