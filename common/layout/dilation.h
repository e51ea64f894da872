// Dilated attention (docs/semantics.md) as problems of their own. A level lets the heads of one
// offset see every dilation_rate-th token of a segment and nothing else: level and offset together
// are a *part*, plain attention over fewer tokens and heads whose documents are the segments. What
// the parts give becomes one by the arithmetic of common/attention/merge.h, and a row that no part
// has keeps (0, -inf). Nothing is computed that no level selects: sum of n * w / r^2 pairs per
// head.
//
// Tokens of a part count at their positions in the whole problem's documents
// (AttentionShape::places), so causality, windows, ALiBi, dropout and the columns of a bias mean
// what they mean there.
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
  int level = 0;  // by its number; parts of one have no head in common
  // Of the part's tokens and heads. Without sinks, packed forms and dlse, which the whole has;
  // results in fp32.
  AttentionSpec spec;
  // Every rank has of the part what it has of the whole.
  ShardPlan plan;
  // [world_size], ascending: rows of the whole's shard, and of the part's.
  std::vector<std::vector<RowRun>> q_rows;
  std::vector<std::vector<RowRun>> kv_rows;
  // The whole's heads, by the part's. Query heads of one offset may be of uneven numbers per key
  // head: then each has its own, and one of the whole's stands there several times.
  std::vector<int32_t> q_heads;
  std::vector<int32_t> kv_heads;
};

// Level by level, by ascending offset; parts without heads or tokens are left out.
// REQUIRES: spec.options.dilation_levels, as validation lets them through.
std::vector<DilatedPart> DilatedPartsOf(const AttentionSpec& spec, const ShardPlan& plan);

// How many parts they are at most: what the levels' rates and heads say.
int64_t DilatedPartCount(const AttentionOptions& options);
// Segments of all documents of a level.
int64_t SegmentCount(const AttentionShape& shape, const DilationLevel& level);
// Documents that a plan has: segments, once for each offset, of a dilated problem.
int64_t PlannedDocuments(const AttentionSpec& spec);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_LAYOUT_DILATION_H_
