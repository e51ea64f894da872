// Interval arithmetic that decides, in global coordinates, which keys a row sees. Causality,
// sliding windows and packed documents all reduce to one band per document, for every shard, layout
// and back end:
//
//   query position i of a document sees key position j of the same document
//   iff  lower <= j - i <= upper.
//
// Positions count within the document over the whole sequence, never within a shard. Kernels and
// planners use the ranges below to skip whole tiles instead of testing elements.
#ifndef RINGATTN_COMMON_ATTENTION_BAND_H_
#define RINGATTN_COMMON_ATTENTION_BAND_H_

#include <cstdint>
#include <vector>

#include "common/attention/attention_spec.h"

namespace ringattn {

// Stands for "no bound". Larger than any position, yet adding positions to it cannot overflow.
inline constexpr int64_t kUnboundedBand = int64_t{1} << 60;

struct Band {
  int64_t lower = -kUnboundedBand;
  int64_t upper = kUnboundedBand;
};

inline MaskRule RuleOf(const AttentionOptions& options) {
  return {options.causal, options.window_left, options.window_right};
}

// Returns the band of one document with sq queries and sk keys. Both masks are aligned to the
// bottom right: with d = sk - sq,
//   causal:        j <= i + d
//   window (l, r): i + d - l <= j <= i + d + r, -1 = unlimited.
Band DocumentBand(const MaskRule& rule, int64_t sq, int64_t sk);
inline Band DocumentBand(const AttentionOptions& options, int64_t sq, int64_t sk) {
  return DocumentBand(RuleOf(options), sq, sk);
}

// Returns the rule of one document of `spec`: the document's rule if the shape has rules per
// document, else the options' rule.
MaskRule RuleOf(const AttentionSpec& spec, int64_t document);

// Returns one band per document of `spec`.
std::vector<Band> DocumentBands(const AttentionSpec& spec);

// Rows of a local buffer that lie in one document at evenly spaced positions:
// local row local_begin + r holds document position position + stride * r,
// for r in [0, length).
struct Piece {
  int64_t local_begin = 0;
  int64_t length = 0;
  int64_t document = 0;
  int64_t position = 0;
  int64_t stride = 1;

  int64_t PositionOf(int64_t row) const { return position + stride * row; }

  bool operator==(const Piece&) const = default;
};

// `count` rows begin, begin + step, ... of a buffer. They are rows first, first + 1, ... of a
// smaller buffer that holds only a subset of the rows.
struct RowRun {
  int64_t begin = 0;
  int64_t step = 1;
  int64_t count = 0;
  int64_t first = 0;

  bool operator==(const RowRun&) const = default;
};

// One row of a local buffer that has pieces and batch rows.
struct ChosenRow {
  int64_t batch = 0;
  int64_t row = 0;
};

// A half-open range of rows relative to a piece's local_begin. Empty if begin >= end; functions
// return {0, 0} then.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;

  bool empty() const { return begin >= end; }
  int64_t size() const { return empty() ? 0 : end - begin; }
};

// Returns the keys of `kv` that row `q_row` of `q` sees. Empty if the documents differ.
RowRange KeysOfRow(const Piece& q, int64_t q_row, const Piece& kv, const Band& band);

// Returns the hull of the keys that at least one row of q in [q_begin, q_end) sees.
RowRange ReachableKeys(const Piece& q, int64_t q_begin, int64_t q_end, const Piece& kv,
                       const Band& band);

// Returns the keys that every row of q in [q_begin, q_end) sees. They need no mask.
RowRange FullyVisibleKeys(const Piece& q, int64_t q_begin, int64_t q_end, const Piece& kv,
                          const Band& band);

// Returns the hull of the queries that see at least one key of kv in [kv_begin, kv_end).
RowRange ReachingQueries(const Piece& q, const Piece& kv, int64_t kv_begin, int64_t kv_end,
                         const Band& band);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_ATTENTION_BAND_H_
