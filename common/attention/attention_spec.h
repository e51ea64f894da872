// AttentionSpec: one validated attention problem. Everything after the edge
// works on this value and may trust it: REQUIRES lines below hold by
// construction (see validation.h), so nothing downstream checks them again.
#ifndef RINGATTN_COMMON_ATTENTION_ATTENTION_SPEC_H_
#define RINGATTN_COMMON_ATTENTION_ATTENTION_SPEC_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "common/attention/dtype.h"

namespace ringattn {

// Which keys a row sees, beside those of other documents. Meaning: docs/semantics.md.
struct MaskRule {
  bool causal = false;
  int64_t window_left = -1;   // -1 = unlimited
  int64_t window_right = -1;  // -1 = unlimited

  bool operator==(const MaskRule&) const = default;
};

// In what form q, k and v, and their gradients, travel; workers have them apart.
enum class Packing : uint8_t {
  kNone = 0,
  kQkv = 1,  // [.., seq_len_q, 3, num_heads, head_dim]
  kKv = 2,   // [.., seq_len_kv, 2, num_kv_heads, head_dim]
};

// Where the tokens of a document of a part of a dilated problem are (common/layout/dilation.h):
// token t is position first + step * t of `document` of the whole problem.
struct DocumentPosition {
  int64_t document = 0;
  int64_t first = 0;
  int64_t step = 1;

  bool operator==(const DocumentPosition&) const = default;
};

// Shapes of the problem.
//   dense : q [batch, seq_len_q, num_heads, head_dim]
//           k [batch, seq_len_kv, num_kv_heads, head_dim]
//           v [batch, seq_len_kv, num_kv_heads, head_dim_v]
//           out, dout [batch, seq_len_q, num_heads, head_dim_v]
//           dq, dk, dv like q, k, v
//           lse, dlse [batch, num_heads, seq_len_q] fp32
//           sinks, dsinks [num_heads] fp32
//           bias, dbias, mask [batch or 1, num_heads or 1, seq_len_q, PairColumns]
//           segment ids [batch, seq_len_q] and [batch, seq_len_kv] int32
//   packed: the same without the batch axis (batch == 1), tokens of all
//           documents after one another; lse [num_heads, seq_len_q].
struct AttentionShape {
  bool packed = false;
  int64_t batch = 1;       // >= 1; 1 when packed
  int64_t seq_len_q = 0;   // >= 0; the total over documents when packed
  int64_t seq_len_kv = 0;  // >= 0; the total over documents when packed
  int64_t num_heads = 1;
  int64_t num_kv_heads = 1;  // divides num_heads
  int64_t head_dim = 1;      // 1..256
  int64_t head_dim_v = 1;    // 1..256

  // First token of each document and, last, the total. A dense problem has one
  // document: {0, seq_len_q} and {0, seq_len_kv}, the same for every batch row.
  std::vector<int64_t> cu_seqlens_q;
  std::vector<int64_t> cu_seqlens_k;
  // Empty, or the rule of each document, instead of the options'.
  std::vector<MaskRule> document_rules;
  Packing packing = Packing::kNone;

  // Of a part of a dilated problem alone, never of a request: of each document, whose tokens'
  // positions then count as the whole problem's; and the columns of its bias and mask.
  std::vector<DocumentPosition> places;
  int64_t pair_columns = 0;

  int64_t group_size() const { return num_heads / num_kv_heads; }
  int64_t num_documents() const { return static_cast<int64_t>(cu_seqlens_q.size()) - 1; }
  bool operator==(const AttentionShape&) const = default;
};

// An additive bias (TensorId::kBias).
struct BiasForm {
  bool per_batch = false;  // else one for all batch rows
  bool per_head = false;
  bool float32 = false;  // else of the request's type
  bool before_softcap = false;
  bool gradient = false;  // backward returns TensorId::kDbias

  bool operator==(const BiasForm&) const = default;
};

// A boolean mask (TensorId::kMask).
struct MaskForm {
  bool per_batch = false;
  bool per_head = false;
  bool bits = false;  // eight keys a byte, lowest bit first; else a byte a key

  bool operator==(const MaskForm&) const = default;
};

// Pairs whose random lane is below the threshold are dropped, the others' weight is multiplied
// by 65536 / (65536 - threshold).
struct DropoutForm {
  uint32_t threshold = 0;  // 0: no dropout; < 65536
  uint64_t seed = 0;
  // Added to a pair's coordinates. Each with its axis' size is at most 2^32.
  uint32_t first_batch = 0;  // the document's index, where packed
  uint32_t first_head = 0;
  uint32_t first_query = 0;
  uint32_t first_key = 0;
  // Head h counts as first_head + head_step * h: a part of a dilated problem has another than 1.
  uint32_t head_step = 1;

  bool operator==(const DropoutForm&) const = default;
};

// A level of dilated attention: within segments of `segment_length` tokens of a document, heads
// see every `dilation_rate`-th token, from `offset` on, or from the head's number modulo the rate.
// What several levels let a row see counts once in each.
struct DilationLevel {
  int64_t segment_length = 1;
  int64_t dilation_rate = 1;
  std::optional<int64_t> offset;
  int64_t head_begin = 0;
  int64_t head_end = 0;  // one past the last; resolved: num_heads unless given

  bool operator==(const DilationLevel&) const = default;
};

// What the products of a forward are computed in (v1::ComputeDtype).
enum class ComputeDType : uint8_t {
  kAsInputs = 0,
  kFloat8E4M3 = 1,
};

// Options that change the result. Meaning: docs/semantics.md.
struct AttentionOptions {
  double softmax_scale = 1.0;  // resolved: 1/sqrt(head_dim) unless given
  double softcap = 0.0;        // 0 = off; else finite and > 0
  bool causal = false;
  int64_t window_left = -1;   // -1 = unlimited
  int64_t window_right = -1;  // -1 = unlimited
  bool sinks = false;         // a logit per head without a value (TensorId::kSinks)
  // What single pairs have: the score terms.
  std::vector<float> alibi_slopes;  // none, one per head, or per batch row (document) and head
  std::optional<BiasForm> bias;
  std::optional<MaskForm> mask;
  bool segment_ids = false;  // TensorId::kQSegmentIds, kKvSegmentIds
  DropoutForm dropout;
  std::vector<DilationLevel> dilation_levels;  // none: every row sees every key
  // Equal requests on as many members of the same kind of device give equal bits.
  bool deterministic = false;
  ComputeDType compute_dtype = ComputeDType::kAsInputs;  // of a forward

  bool operator==(const AttentionOptions&) const = default;
};

// One numbering with v1::TensorId. Tensors are streamed in ascending order, in both
// directions.
enum class TensorId : uint8_t {
  kQ = 1,
  kK = 2,
  kV = 3,
  kOut = 4,
  kLse = 5,
  kDout = 6,
  kDq = 7,
  kDk = 8,
  kDv = 9,
  kDlse = 10,
  kSinks = 11,
  kDsinks = 12,
  kBias = 13,
  kDbias = 14,
  kMask = 15,
  kQSegmentIds = 16,
  kKvSegmentIds = 17,
  kQkv = 18,
  kKv = 19,
  kDqkv = 20,
  kDkv = 21,
  kProbabilities = 22,
};

// Whether any of the score terms is there.
inline bool HasScoreTerms(const AttentionOptions& options) {
  return !options.alibi_slopes.empty() || options.bias.has_value() || options.mask.has_value() ||
         options.segment_ids || options.dropout.threshold != 0;
}

// Columns of a bias or a mask: the keys of the longest document.
inline int64_t PairColumns(const AttentionShape& shape) {
  if (shape.pair_columns != 0) return shape.pair_columns;
  if (!shape.packed) return shape.seq_len_kv;
  int64_t longest = 0;
  for (size_t d = 1; d < shape.cu_seqlens_k.size(); ++d) {
    const int64_t keys = shape.cu_seqlens_k[d] - shape.cu_seqlens_k[d - 1];
    if (keys > longest) longest = keys;
  }
  return longest;
}

// A query row whose softmax weights are asked for.
struct ProbabilityRow {
  int64_t batch = 0;     // document, where packed
  int64_t position = 0;  // in its document

  bool operator==(const ProbabilityRow&) const = default;
};

enum class Direction : uint8_t { kForward = 0, kBackward = 1 };

struct AttentionSpec {
  DType dtype = DType::kFloat32;  // of q, k, v and dout
  AttentionShape shape;
  AttentionOptions options;
  bool has_dlse = false;  // backward: the gradient of lse is an input (TensorId::kDlse)
  // Out, dq, dk and dv as they are summed up, in fp32, instead of rounded to `dtype`.
  bool fp32_results = false;
  // Packed only: lse and dlse travel as [documents, heads, longest document's queries].
  bool lse_per_document = false;
  std::vector<ProbabilityRow> probability_rows;  // forward: those of TensorId::kProbabilities
  // Workers have of a bias, its gradient and a mask the columns of their keys, of all queries,
  // instead of the rows of their queries (CutsPairsByKeys and NotCutByKeys,
  // common/schedule/schedule.h).
  bool pairs_by_keys = false;

  // Of out, dq, dk and dv.
  DType result_dtype() const { return fp32_results ? DType::kFloat32 : dtype; }
  bool operator==(const AttentionSpec&) const = default;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_ATTENTION_ATTENTION_SPEC_H_
