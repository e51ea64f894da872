// Splits dilated attention (docs/semantics.md) into plain problems. A level lets the heads of one
// offset see every dilation_rate-th token of a segment and nothing else. So level and offset
// together are a *part*: plain attention over fewer tokens and heads whose documents are the
// segments. The results of the parts are merged (common/attention/merge.h); a row that is in no
// part keeps (0, -inf). Only selected pairs are computed: the sum of n * w / r^2 pairs per head.
//
// Tokens of a part count at their positions in the documents of the whole problem
// (AttentionShape::places). So causality, windows, ALiBi, dropout and the columns of a bias keep
// their meaning.
//
// Pure functions of their arguments; thread safe.
#ifndef RINGATTN_COMMON_LAYOUT_DILATION_H_
#define RINGATTN_COMMON_LAYOUT_DILATION_H_

#include <cstdint>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/attention/band.h"
#include "common/layout/shard_plan.h"

namespace ringattn {

struct DilatedPart {
  int level = 0;  // index of the level; parts of one level share no head
  // The part's tokens and heads, with results in fp32. Sinks, packed forms and dlse stay with the
  // whole problem.
  AttentionSpec spec;
  // Every rank owns the part's tokens that it owns of the whole problem.
  ShardPlan plan;
  // [world_size], ascending: rows of the whole's shard, and of the part's.
  std::vector<std::vector<RowRun>> q_rows;
  std::vector<std::vector<RowRun>> kv_rows;
  // The whole's heads, indexed by the part's. If the query heads of one offset are unevenly
  // distributed over the key heads, each query head has a separate key head, and one of the
  // whole's key heads appears several times.
  std::vector<int32_t> q_heads;
  std::vector<int32_t> kv_heads;
};

// Returns the parts by level, then by ascending offset. Parts without heads or tokens are left out.
// REQUIRES: spec.options.dilation_levels has passed validation.
std::vector<DilatedPart> DilatedPartsOf(const AttentionSpec& spec, const ShardPlan& plan);

// Returns an upper bound of the number of parts, from the levels' rates and heads.
int64_t DilatedPartCount(const AttentionOptions& options);
// Returns the segments of all documents of a level.
int64_t SegmentCount(const AttentionShape& shape, const DilationLevel& level);
// Returns the documents of a plan. For a dilated problem these are its segments, once per offset.
int64_t PlannedDocuments(const AttentionSpec& spec);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_LAYOUT_DILATION_H_
