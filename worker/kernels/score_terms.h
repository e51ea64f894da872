// What single pairs (i, j) have beside their product: biases, masks, dropout. The numbers of a
// problem stand here, the tensors in the calls (TermOperands). Meaning: docs/semantics.md.
//
// Positions count inside a document, in the whole sequence, as a piece has them; the batch row of
// a packed problem is the document.
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
  // num_heads of them, or that for each batch row (document).
  std::vector<float> alibi_slopes;
  std::optional<BiasForm> bias;
  std::optional<MaskForm> mask;
  // Of a bias and a mask: which of the two axes is cut as the calls' tensors are.
  //   by queries  a row for each of the call's queries, a column for each key position; `rows` is
  //               not used
  //   by keys     `rows` rows, one for each query position, and a column for each row of the one
  //               block that a call has. Of problems that are not packed, with masks of bytes
  bool by_keys = false;
  int64_t rows = 0;
  int64_t columns = 0;
  bool segment_ids = false;
  DropoutForm dropout;
  // Of each document of a part of a dilated problem: the whole one's that it is of.
  std::vector<int64_t> owners;

  bool any() const {
    return !alibi_slopes.empty() || bias.has_value() || mask.has_value() || segment_ids ||
           dropout.threshold != 0;
  }
  // Some pair of a document may be hidden from a row that the band lets see it.
  bool masks() const { return bias.has_value() || mask.has_value() || segment_ids; }
  // Of a batch row and a document, what slopes and dropout tell apart.
  int64_t BatchRow(int64_t batch, int64_t document) const {
    if (!packed) return batch;
    return owners.empty() ? document : owners[document];
  }
  // By what dropout multiplies the weight of a pair that is kept.
  float keep_scale() const { return 65536.0f / static_cast<float>(65536 - dropout.threshold); }
  // Rows of a plane of a call of `q_rows` queries.
  int64_t PlaneRows(int64_t q_rows) const { return by_keys ? rows : q_rows; }
  // Where in a plane the pair of a query and a key is, by their rows in the call's buffers and
  // their positions.
  int64_t PairRow(int64_t local_row, int64_t position) const {
    return by_keys ? position : local_row;
  }
  int64_t PairColumn(int64_t local_row, int64_t position) const {
    return by_keys ? local_row : position;
  }
  // Bytes of a row of a mask.
  int64_t mask_row_bytes() const { return mask->bits ? (columns + 7) / 8 : columns; }
};

// A call's tensors of its queries, null where the problem has none:
//   bias, mask      [batch or 1, num_heads or 1, PlaneRows, columns], at PairRow and PairColumn
//   q_segment_ids   [batch, q_rows]
struct TermOperands {
  const void* bias = nullptr;
  const uint8_t* mask = nullptr;
  const int32_t* q_segment_ids = nullptr;
};

// Plane of a bias or a mask that a batch row's head has.
template <typename Form>
int64_t PlaneOf(const Form& form, int64_t num_heads, int64_t batch, int64_t head) {
  return (form.per_batch ? batch : 0) * (form.per_head ? num_heads : 1) +
         (form.per_head ? head : 0);
}

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_SCORE_TERMS_H_
