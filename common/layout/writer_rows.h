// WriterRows: the rows of a request's tensors that each of several clients ("writers") holds
// (Writer in attention.proto). Workers' shards are independent of them.
#ifndef RINGATTN_COMMON_LAYOUT_WRITER_ROWS_H_
#define RINGATTN_COMMON_LAYOUT_WRITER_ROWS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "common/attention/attention_spec.h"
#include "common/attention/tensors.h"
#include "common/layout/shard_plan.h"

namespace ringattn {

// The tokens of one writer, in the order of its rows.
struct WriterRows {
  Shard q;
  Shard kv;

  bool operator==(const WriterRows&) const = default;
};

// One of the writers.
struct WriterChoice {
  int index = 0;
  int count = 1;
  WriterRows rows;
};

// Returns the reason that `shards` do not meet ShardMap's requirements for an axis of `rows`
// tokens; empty if they do. `owner` is the noun for a shard in the reason: "writer 1 has token 5".
std::string CheckCover(const std::vector<Shard>& shards, int64_t rows,
                       absl::string_view owner = "shard");

// Returns for each axis whose tokens the writers do not hold exactly once, "q" or "kv", the reason.
std::vector<std::pair<const char*, std::string>> CheckWriters(
    const std::vector<WriterRows>& writers, int64_t seq_len_q, int64_t seq_len_kv);

// Returns whether writers hold different rows of the tensor. Every writer holds all of a tensor
// without a token axis.
bool IsSplitByWriters(TensorId id);
// Returns the bytes and the shape of a writer's tensor (BytesOf, DimensionsOf). REQUIRES: the
// tensor is not packed, not per document and not PROBABILITIES.
int64_t BytesOf(const AttentionSpec& spec, const WriterRows& rows, TensorId id);
std::vector<int64_t> DimensionsOf(const AttentionSpec& spec, const WriterRows& rows, TensorId id);

// Returns the tokens of an axis of `rows` tokens that are not in `shard`. Together they pass
// CheckCover if `shard` is part of a partition that does.
Shard RestOf(const Shard& shard, int64_t rows);

// Maps bytes of the whole tensor to writers' tensors, with a writer in place of a rank. REQUIRES:
// IsSplitByWriters(id); the rows pass CheckCover.
ShardMap MapToWriters(const AttentionSpec& spec, const std::vector<WriterRows>& writers,
                      TensorId id);

// Returns the ranges of a rank's local tensor whose rows `writer` holds, ascending. Ranges at most
// `gap_bytes` apart are joined, so that the result may include other writers' rows.
struct WriterRange {
  int64_t begin = 0;
  int64_t end = 0;

  bool operator==(const WriterRange&) const = default;
};
std::vector<WriterRange> RangesOfWriter(const ShardMap& shards, int rank, const ShardMap& writers,
                                        int writer, int64_t gap_bytes);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_LAYOUT_WRITER_ROWS_H_
