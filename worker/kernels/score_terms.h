// Per-pair modifiers of scores and weights: biases, masks, dropout and others. ScoreTerms holds a
// problem's parameters, TermOperands a call's tensors. docs/semantics.md defines their meaning.
//
// Positions count within a document over the whole sequence, as in spans. The batch row of a packed
// problem is the document.
#ifndef RINGATTN_WORKER_KERNELS_SCORE_TERMS_H_
#define RINGATTN_WORKER_KERNELS_SCORE_TERMS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "common/attention/attention_spec.h"

namespace ringattn::worker {

struct ScoreTerms {
  bool packed = false;
  // Sk - Sq of each document: query i is aligned with key i + shift.
  std::vector<int64_t> shifts;
  // num_heads slopes, or num_heads for each batch row (document).
  std::vector<float> alibi_slopes;
  std::optional<BiasForm> bias;
  std::optional<MaskForm> mask;
  // Which axis of bias and mask is sharded like the call's tensors.
  //   by queries  one row for each of the call's queries, one column for each key position; `rows`
  //               is not used
  //   by keys     `rows` rows, one for each query position, and one column for each row of the
  //               call's only block. For problems that are not packed, with byte masks
  bool by_keys = false;
  int64_t rows = 0;
  int64_t columns = 0;
  bool segment_ids = false;
  DropoutForm dropout;
  // For one part of a dilated problem: the document of the whole problem for each document.
  std::vector<int64_t> owners;

  bool any() const {
    return !alibi_slopes.empty() || bias.has_value() || mask.has_value() || segment_ids ||
           dropout.threshold != 0;
  }
  // Some pairs inside the band may be hidden.
  bool masks() const { return bias.has_value() || mask.has_value() || segment_ids; }
  // Returns the batch row that slopes and dropout use for a batch row and a document.
  int64_t BatchRow(int64_t batch, int64_t document) const {
    if (!packed) return batch;
    return owners.empty() ? document : owners[document];
  }
  // Returns the factor of the weight of pairs that dropout keeps.
  float keep_scale() const { return 65536.0f / static_cast<float>(65536 - dropout.threshold); }
  // Returns the number of rows of a plane for a call of `q_rows` queries.
  int64_t PlaneRows(int64_t q_rows) const { return by_keys ? rows : q_rows; }
  // Return the row and column of a pair in a plane, from the row of its query (or key) in the
  // call's buffers and the position of the other.
  int64_t PairRow(int64_t local_row, int64_t position) const {
    return by_keys ? position : local_row;
  }
  int64_t PairColumn(int64_t local_row, int64_t position) const {
    return by_keys ? local_row : position;
  }
  // Returns the bytes per row of a mask.
  int64_t mask_row_bytes() const { return mask->bits ? (columns + 7) / 8 : columns; }
};

// A call's term tensors for its queries; null if the problem has none:
//   bias, mask      [batch or 1, num_heads or 1, PlaneRows, columns], at PairRow and PairColumn
//   q_segment_ids   [batch, q_rows]
struct TermOperands {
  const void* bias = nullptr;
  const uint8_t* mask = nullptr;
  const int32_t* q_segment_ids = nullptr;
};

// Returns the index of the bias or mask plane of a batch row and head.
template <typename Form>
int64_t PlaneOf(const Form& form, int64_t num_heads, int64_t batch, int64_t head) {
  return (form.per_batch ? batch : 0) * (form.per_head ? num_heads : 1) +
         (form.per_head ? head : 0);
}

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_SCORE_TERMS_H_
