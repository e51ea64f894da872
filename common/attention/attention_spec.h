// AttentionSpec: one validated attention problem. Code after the edge relies on its constraints
// without checking them again: validation (validation.h) establishes the REQUIRES lines below.
#ifndef RINGATTN_COMMON_ATTENTION_ATTENTION_SPEC_H_
#define RINGATTN_COMMON_ATTENTION_ATTENTION_SPEC_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "common/attention/dtype.h"
#include "common/base/limits.h"

namespace ringattn {

// Which keys of its document a row sees. Definition: docs/semantics.md.
struct MaskRule {
  bool causal = false;
  int64_t window_left = -1;   // -1 = unlimited
  int64_t window_right = -1;  // -1 = unlimited

  bool operator==(const MaskRule&) const = default;
};

// Form of q, k, v and their gradients between client and service. Workers always hold them as
// separate tensors.
enum class Packing : uint8_t {
  kNone = 0,
  kQkv = 1,  // [.., seq_len_q, 3, num_heads, head_dim]
  kKv = 2,   // [.., seq_len_kv, 2, num_kv_heads, head_dim]
};

// Positions of the tokens of one document of a dilated part (common/layout/dilation.h): token t is
// position first + step * t of `document` of the whole problem.
struct DocumentPosition {
  int64_t document = 0;
  int64_t first = 0;
  int64_t step = 1;

  bool operator==(const DocumentPosition&) const = default;
};

// Shapes of the problem.
//   dense:  q [batch, seq_len_q, num_heads, head_dim]
//           k [batch, seq_len_kv, num_kv_heads, head_dim]
//           v [batch, seq_len_kv, num_kv_heads, head_dim_v]
//           out, dout [batch, seq_len_q, num_heads, head_dim_v]
//           dq, dk, dv like q, k, v
//           lse, dlse [batch, num_heads, seq_len_q] fp32
//           sinks, dsinks [num_heads] fp32
//           bias, dbias, mask [batch or 1, num_heads or 1, seq_len_q, PairColumns]
//           segment ids [batch, seq_len_q] and [batch, seq_len_kv] int32
//   packed: the same without the batch axis (batch == 1), the tokens of all documents
//           concatenated; lse [num_heads, seq_len_q].
struct AttentionShape {
  bool packed = false;
  int64_t batch = 1;       // >= 0; 1 when packed
  int64_t seq_len_q = 0;   // >= 0; the total over documents when packed
  int64_t seq_len_kv = 0;  // >= 0; the total over documents when packed
  int64_t num_heads = 1;
  int64_t num_kv_heads = 1;  // divides num_heads
  int64_t head_dim = 1;      // 1..kMaxHeadDim
  int64_t head_dim_v = 1;    // 1..kMaxHeadDim

  // First token of each document and, as the last entry, the total. A dense problem has one
  // document: {0, seq_len_q} and {0, seq_len_kv}, the same for every batch row.
  std::vector<int64_t> cu_seqlens_q;
  std::vector<int64_t> cu_seqlens_k;
  // One rule per document, which replaces the options' rule; or empty.
  std::vector<MaskRule> document_rules;
  Packing packing = Packing::kNone;

  // Only for a dilated part, never for a request: the position of each document's tokens in the
  // whole problem, and the number of columns of its bias and mask.
  std::vector<DocumentPosition> places;
  int64_t pair_columns = 0;

  int64_t group_size() const { return num_heads / num_kv_heads; }
  int64_t num_documents() const { return static_cast<int64_t>(cu_seqlens_q.size()) - 1; }
  bool operator==(const AttentionShape&) const = default;
};

// An additive bias (TensorId::kBias).
struct BiasForm {
  bool per_batch = false;  // else shared by all batch rows
  bool per_head = false;
  bool float32 = false;  // else the request's dtype
  bool before_softcap = false;
  bool gradient = false;  // backward returns TensorId::kDbias

  bool operator==(const BiasForm&) const = default;
};

// A boolean mask (TensorId::kMask).
struct MaskForm {
  bool per_batch = false;
  bool per_head = false;
  bool bits = false;  // eight keys per byte, lowest bit first; else one byte per key

  bool operator==(const MaskForm&) const = default;
};

// Pairs whose random value is below the threshold are dropped. The weights of the others are
// multiplied by 65536 / (65536 - threshold).
struct DropoutForm {
  uint32_t threshold = 0;  // 0: no dropout; < 65536
  uint64_t seed = 0;
  // Added to a pair's coordinates. Each offset plus the size of its axis is at most 2^32.
  uint32_t first_batch = 0;  // index of the document if packed
  uint32_t first_head = 0;
  uint32_t first_query = 0;
  uint32_t first_key = 0;
  // Head h counts as first_head + head_step * h. Only dilated parts have a step other than 1.
  uint32_t head_step = 1;

  bool operator==(const DropoutForm&) const = default;
};

// A level of dilated attention. Within segments of `segment_length` tokens of a document, a head
// sees every `dilation_rate`-th token, starting at `offset`, or by default at the head's number
// modulo the rate. A key that several levels let a row see counts once per level.
struct DilationLevel {
  int64_t segment_length = 1;
  int64_t dilation_rate = 1;
  std::optional<int64_t> offset;
  int64_t head_begin = 0;
  int64_t head_end = 0;  // one past the last; resolved to num_heads if not set

  bool operator==(const DilationLevel&) const = default;
};

// Type in which a forward computes its matrix products (v1::ComputeDtype).
enum class ComputeDType : uint8_t {
  kAsInputs = 0,
  kFloat8E4M3 = 1,
};

// Options that change the result. Definitions: docs/semantics.md.
struct AttentionOptions {
  double softmax_scale = 1.0;  // resolved to 1/sqrt(head_dim) if not set
  double softcap = 0.0;        // 0 = off; else finite and > 0
  bool causal = false;
  int64_t window_left = -1;   // -1 = unlimited
  int64_t window_right = -1;  // -1 = unlimited
  bool sinks = false;         // one logit per head, without a value (TensorId::kSinks)
  // Score terms: modifiers of single pairs.
  std::vector<float> alibi_slopes;  // empty, one per head, or per batch row (document) and head
  std::optional<BiasForm> bias;
  std::optional<MaskForm> mask;
  bool segment_ids = false;  // TensorId::kQSegmentIds, kKvSegmentIds
  DropoutForm dropout;
  std::vector<DilationLevel> dilation_levels;  // empty: every row sees every key
  // Equal requests on the same number of members with the same kind of device give equal bits.
  bool deterministic = false;
  ComputeDType compute_dtype = ComputeDType::kAsInputs;  // forward only

  bool operator==(const AttentionOptions&) const = default;
};

// Same numbers as v1::TensorId. Tensors are streamed in ascending order in both directions.
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

// Returns whether the options have any score term.
inline bool HasScoreTerms(const AttentionOptions& options) {
  return !options.alibi_slopes.empty() || options.bias.has_value() || options.mask.has_value() ||
         options.segment_ids || options.dropout.threshold != 0;
}

// Returns the columns of a bias or a mask: the keys of the longest document.
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

// A query row whose softmax weights the request returns.
struct ProbabilityRow {
  int64_t batch = 0;     // index of the document if packed
  int64_t position = 0;  // within its document

  bool operator==(const ProbabilityRow&) const = default;
};

enum class Direction : uint8_t { kForward = 0, kBackward = 1 };

struct AttentionSpec {
  DType dtype = DType::kFloat32;  // of q, k, v and dout
  AttentionShape shape;
  AttentionOptions options;
  bool has_dlse = false;  // backward: the gradient of lse is an input (TensorId::kDlse)
  // Out, dq, dk and dv are returned in fp32, as accumulated, instead of rounded to `dtype`.
  bool fp32_results = false;
  // Packed only: clients send and receive lse and dlse as [documents, heads, longest document's
  // queries].
  bool lse_per_document = false;
  std::vector<ProbabilityRow> probability_rows;  // forward: the rows of TensorId::kProbabilities

  // The dtype of out, dq, dk and dv.
  DType result_dtype() const { return fp32_results ? DType::kFloat32 : dtype; }
  bool operator==(const AttentionSpec&) const = default;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_ATTENTION_ATTENTION_SPEC_H_
