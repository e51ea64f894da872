// Interval arithmetic that decides, in global coordinates, which keys a row
// sees. Causality, sliding windows and packed documents all reduce to one band
// per document, whatever shard, layout or back end holds the row:
//
//   query position i of a document sees key position j of the same document
//   iff  lower <= j - i <= upper.
//
// Positions count inside the document, in the whole sequence, never inside a
// shard. Kernels and planners skip whole tiles with the ranges below instead of
// testing elements.
#ifndef RINGATTN_COMMON_ATTENTION_BAND_H_
#define RINGATTN_COMMON_ATTENTION_BAND_H_

#include <cstdint>
#include <vector>

#include "common/attention/attention_spec.h"

namespace ringattn {

// Stands for "no bound"; far beyond any position, yet safe to add positions to.
inline constexpr int64_t kUnboundedBand = int64_t{1} << 60;

struct Band {
  int64_t lower = -kUnboundedBand;
  int64_t upper = kUnboundedBand;
};

inline MaskRule RuleOf(const AttentionOptions& options) {
  return {options.causal, options.window_left, options.window_right};
}

// The band of one document with sq queries and sk keys. Both masks are aligned
// to the bottom right: with d = sk - sq,
//   causal:        j <= i + d
//   window (l, r): i + d - l <= j <= i + d + r, -1 = unlimited.
Band DocumentBand(const MaskRule& rule, int64_t sq, int64_t sk);
inline Band DocumentBand(const AttentionOptions& options, int64_t sq, int64_t sk) {
  return DocumentBand(RuleOf(options), sq, sk);
}

// The rule of a document of `spec`: its own, or the options'.
MaskRule RuleOf(const AttentionSpec& spec, int64_t document);

// One band per document of `spec`.
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

// Rows begin, begin + step, ..., `count` of them, of a buffer, which are rows from `first` on of a
// smaller one that has just some of its rows.
struct RowRun {
  int64_t begin = 0;
  int64_t step = 1;
  int64_t count = 0;
  int64_t first = 0;

  bool operator==(const RowRun&) const = default;
};

// One row of a local buffer that is cut into pieces and has batch rows.
struct ChosenRow {
  int64_t batch = 0;
  int64_t row = 0;
};

// A half-open range of rows relative to a piece's local_begin; empty when
// begin >= end (then both are 0).
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;

  bool empty() const { return begin >= end; }
  int64_t size() const { return empty() ? 0 : end - begin; }
};

// Keys of `kv` that the single row `q_row` of `q` sees. Empty if the documents differ.
RowRange KeysOfRow(const Piece& q, int64_t q_row, const Piece& kv, const Band& band);

// The hull of the keys that at least one row of q in [q_begin, q_end) sees.
RowRange ReachableKeys(const Piece& q, int64_t q_begin, int64_t q_end, const Piece& kv,
                       const Band& band);

// The keys that every row of q in [q_begin, q_end) sees: no mask needed there.
RowRange FullyVisibleKeys(const Piece& q, int64_t q_begin, int64_t q_end, const Piece& kv,
                          const Band& band);

// The hull of the queries that see at least one key of kv in [kv_begin, kv_end).
RowRange ReachingQueries(const Piece& q, const Piece& kv, int64_t kv_begin, int64_t kv_end,
                         const Band& band);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_ATTENTION_BAND_H_
