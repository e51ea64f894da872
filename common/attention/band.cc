#include "common/attention/band.h"

#include <algorithm>
#include <numeric>

namespace ringattn {
namespace {

// Quotients rounded down and up; divisor > 0. C++ division truncates towards 0.
int64_t FloorDivide(int64_t dividend, int64_t divisor) {
  return dividend / divisor - (dividend % divisor < 0 ? 1 : 0);
}
int64_t CeilDivide(int64_t dividend, int64_t divisor) {
  return dividend / divisor + (dividend % divisor > 0 ? 1 : 0);
}

// Rows of `piece` within [begin, end) whose positions lie in [first, last].
RowRange RowsAtPositions(const Piece& piece, int64_t begin, int64_t end, int64_t first,
                         int64_t last) {
  const RowRange range{std::max(begin, CeilDivide(first - piece.position, piece.stride)),
                       std::min(end, FloorDivide(last - piece.position, piece.stride) + 1)};
  return range.empty() ? RowRange{} : range;
}

// Keys of `keys` within [key_begin, key_end) that the position sees.
RowRange KeysOfPosition(int64_t position, const Piece& keys, int64_t key_begin, int64_t key_end,
                        const Band& band) {
  return RowsAtPositions(keys, key_begin, key_end, position + band.lower, position + band.upper);
}

// Returns the hull of the rows in [row_begin, row_end) of `rows` that see at least one of the keys
// [key_begin, key_end).
RowRange SeeingRows(const Piece& rows, int64_t row_begin, int64_t row_end, const Piece& keys,
                    int64_t key_begin, int64_t key_end, const Band& band) {
  if (rows.document != keys.document || key_begin >= key_end || band.lower > band.upper) return {};
  RowRange range =
      RowsAtPositions(rows, row_begin, row_end, keys.PositionOf(key_begin) - band.upper,
                      keys.PositionOf(key_end - 1) - band.lower);
  if (range.empty() || band.upper - band.lower + 1 >= keys.stride) return range;
  // The band is narrower than the distance between two keys, so some rows fall between keys. The
  // pattern of these rows repeats with this period.
  const int64_t period = keys.stride / std::gcd(keys.stride, rows.stride);
  const auto sees = [&](int64_t row) {
    return !KeysOfPosition(rows.PositionOf(row), keys, key_begin, key_end, band).empty();
  };
  const int64_t scan_end = std::min(range.end, range.begin + period);
  while (range.begin < scan_end && !sees(range.begin)) ++range.begin;
  if (range.begin == scan_end) return {};
  while (!sees(range.end - 1)) --range.end;
  return range;
}

}  // namespace

Band DocumentBand(const MaskRule& rule, int64_t sq, int64_t sk) {
  const int64_t shift = sk - sq;
  Band band;
  // A window longer than any sequence is unlimited. The clamp also keeps sums small.
  if (rule.window_left >= 0 && rule.window_left < kUnboundedBand) {
    band.lower = std::max(band.lower, shift - rule.window_left);
  }
  if (rule.window_right >= 0 && rule.window_right < kUnboundedBand) {
    band.upper = std::min(band.upper, shift + rule.window_right);
  }
  if (rule.causal) band.upper = std::min(band.upper, shift);
  return band;
}

MaskRule RuleOf(const AttentionSpec& spec, int64_t document) {
  if (!spec.shape.document_rules.empty()) return spec.shape.document_rules[document];
  return RuleOf(spec.options);
}

std::vector<Band> DocumentBands(const AttentionSpec& spec) {
  const AttentionShape& shape = spec.shape;
  std::vector<Band> bands;
  bands.reserve(static_cast<size_t>(shape.num_documents()));
  for (int64_t d = 0; d < shape.num_documents(); ++d) {
    bands.push_back(DocumentBand(RuleOf(spec, d), shape.cu_seqlens_q[d + 1] - shape.cu_seqlens_q[d],
                                 shape.cu_seqlens_k[d + 1] - shape.cu_seqlens_k[d]));
  }
  return bands;
}

RowRange KeysOfRow(const Piece& q, int64_t q_row, const Piece& kv, const Band& band) {
  if (q.document != kv.document) return {};
  return KeysOfPosition(q.PositionOf(q_row), kv, 0, kv.length, band);
}

RowRange ReachableKeys(const Piece& q, int64_t q_begin, int64_t q_end, const Piece& kv,
                       const Band& band) {
  // "Row i sees key j" equals "key j is seen by row i": the same relation with exchanged roles and
  // a mirrored band.
  return SeeingRows(kv, 0, kv.length, q, q_begin, q_end, Band{-band.upper, -band.lower});
}

RowRange FullyVisibleKeys(const Piece& q, int64_t q_begin, int64_t q_end, const Piece& kv,
                          const Band& band) {
  if (q.document != kv.document || q_begin >= q_end) return {};
  return RowsAtPositions(kv, 0, kv.length, q.PositionOf(q_end - 1) + band.lower,
                         q.PositionOf(q_begin) + band.upper);
}

RowRange ReachingQueries(const Piece& q, const Piece& kv, int64_t kv_begin, int64_t kv_end,
                         const Band& band) {
  return SeeingRows(q, 0, q.length, kv, kv_begin, kv_end, band);
}

}  // namespace ringattn
