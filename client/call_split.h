// How a call is cut into requests that know nothing of one another: each an ordinary
// request whose results are rows of the call's. Pure arithmetic, without tensors.
#ifndef RINGATTN_CLIENT_CALL_SPLIT_H_
#define RINGATTN_CLIENT_CALL_SPLIT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "ringattn/v1/attention.pb.h"

namespace ringattn::client {

// begin <= end.
struct RowSpan {
  uint64_t begin = 0;
  uint64_t end = 0;

  uint64_t size() const { return end - begin; }
  bool operator==(const RowSpan&) const = default;
};

// The batch rows, queries, keys and heads of a call that one request takes: whole batch
// rows, whole packed documents, some queries of the only batch row and all keys that they
// may see, or some K/V heads of it and the query heads that belong to them. Of every
// tensor but lse this is one piece of memory, unless heads are left out.
struct CallPart {
  RowSpan batch, q, kv, heads, kv_heads;
  v1::AttentionShape shape;      // of the request
  v1::AttentionOptions options;  // the call's, the window moved to where its corner is now
};

// At most `streams` parts, in order of rows or heads; together they have each query once
// for every head. Fewer where there are fewer batch rows (documents if packed; if there is
// one batch row, queries or, backward, K/V heads); one for what the server will refuse
// anyway, as it has no rows, or documents or numbers of heads that make no sense.
//
// Several batch rows are dealt out evenly, documents by their bytes. One batch row is cut
// into blocks of queries whose requests, with the keys they need, have about equal bytes:
// with a causal mask the first blocks have more queries and fewer keys, so they bring the
// most results for the least computation and keep the way down busy while the others
// compute. Backward it is cut between K/V heads, evenly: dk and dv are sums over all
// queries, but heads have nothing in common, and nothing is sent twice.
//
// Errors: INVALID_ARGUMENT naming "streams" where it is not in 1..kMaxStreams (call.h),
// or more than 1 and the call cannot be cut: backward of one batch row, not packed, with
// one K/V head; options that this library does not know to be independent of where a row
// lies or which head it is.
absl::StatusOr<std::vector<CallPart>> SplitForward(const v1::AttentionShape& shape,
                                                   const v1::AttentionOptions& options,
                                                   int streams);
absl::StatusOr<std::vector<CallPart>> SplitBackward(const v1::AttentionShape& shape,
                                                    const v1::AttentionOptions& options,
                                                    int streams);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_CALL_SPLIT_H_
