// The kernel interface: one compute call after its buffers have addresses. The back ends (CPU,
// CUDA) implement it.
//
// Memory space: every data pointer is memory of the device that runs the call. Host-side
// descriptions (spans, bands) are host memory and must be valid until the call has been started; a
// back end that runs later copies them.
//
// Visibility follows common/attention/band.h: a row of q sees a key if the spans of both name the
// same document d and the difference of their positions lies in bands[d]. The rows of a buffer are
// divided into spans, which repeat along the batch axis. Offsets are 64-bit element offsets.
#ifndef RINGATTN_WORKER_KERNELS_ATTENTION_KERNEL_H_
#define RINGATTN_WORKER_KERNELS_ATTENTION_KERNEL_H_

#include <cstdint>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/attention/attention_spec.h"
#include "common/attention/band.h"
#include "common/attention/dtype.h"
#include "common/attention/tuning.h"
#include "worker/kernels/score_terms.h"

namespace ringattn::worker {

struct AttentionProblem {
  DType dtype = DType::kFloat32;  // of q, k, v and dout
  int64_t batch = 1;
  int64_t num_heads = 1;
  int64_t num_kv_heads = 1;
  int64_t head_dim = 1;    // 1..kMaxHeadDim
  int64_t head_dim_v = 1;  // 1..kMaxHeadDim
  float softmax_scale = 1.0f;
  float softcap = 0.0f;     // 0: off
  std::vector<Band> bands;  // per document
  ScoreTerms terms;
  bool fp32_results = false;  // out is fp32 for every `dtype`
  // Equal calls on equal devices must return equal bits. Kernels whose sums depend on the order in
  // which blocks finish must reject such calls.
  bool deterministic = false;
  // Applies to ForwardCalls of 16-bit tensors without score terms whose head dims are multiples of
  // 8 up to 128: their products are in e4m3 as defined by worker/kernels/e4m3.h. Ignored by other
  // calls.
  ComputeDType compute = ComputeDType::kAsInputs;
  // Values that the device accepts (Device::tuning_offer). Ignored by kernels without tiles.
  Tuning tuning;

  DType out_dtype() const { return fp32_results ? DType::kFloat32 : dtype; }
};

// The number of a store hint among an operation's calls. A BackwardCall with a hint may store its
// blocks' rounded gradients in dk_out and dv_out and leave dk and dv untouched, because no other
// call adds to them. The device then skips the ZeroCalls and ConvertCalls with the same number.
// Callers that start kernels without a number still set dk_out and dv_out, and query whether the
// kernel stores them.
inline constexpr int kNoStoreHint = -1;

// The largest KvBlock::late. Such a call computes eight steps of a ring. The coordinator expects
// progress in ten.
inline constexpr int32_t kMostArrivals = 7;

// A block of keys.
struct KvBlock {
  int64_t rows = 0;
  std::vector<Piece> pieces;
  const void* k = nullptr;               // [batch, rows, num_kv_heads, head_dim] dtype
  const void* v = nullptr;               // [batch, rows, num_kv_heads, head_dim_v] dtype
  float* dk = nullptr;                   // backward: like k, fp32, accumulated into
  float* dv = nullptr;                   // backward: like v, fp32, accumulated into
  const int32_t* segment_ids = nullptr;  // [batch, rows]; only if the problem has them
  // backward with a store hint: like k and v, dtype
  void* dk_out = nullptr;
  void* dv_out = nullptr;
  // ForwardCalls on devices that support late keys (Device::TakesLateKeys): if not 0, k and v may
  // arrive after the call has begun, with this arrival (StartAfter::bring_keys), counted from 1.
  // Blocks are in the order of this number.
  int32_t late = 0;
};

// Attention of all q rows over the keys of all blocks, merged (common/attention/merge.h) with the
// previous partial result.
//   q        [batch, q_rows, num_heads, head_dim] dtype
//   out_acc  [batch, q_rows, num_heads, head_dim_v] fp32, normalised partial result;
//            read unless `initial`, written unless `final`. May be null if
//            initial && final.
//   lse      [batch, num_heads, q_rows] fp32, natural log; read unless
//            `initial`, always written. -inf = no key seen yet.
//   out      [batch, q_rows, num_heads, head_dim_v] out_dtype(), written if `final`.
//            May be the same memory as out_acc if that is fp32.
//   sinks    [num_heads] fp32, or null; only if `final`: exp(sinks[h]) joins the
//            softmax of every row, after all keys, with a value of 0. -inf is no sink.
//
// A row without visible keys keeps its previous partial result, or becomes (0, -inf) if `initial`,
// before its sink joins. There may be no blocks, or blocks without work.
struct ForwardCall {
  const AttentionProblem* problem = nullptr;
  int64_t q_rows = 0;
  std::vector<Piece> q_pieces;
  const void* q = nullptr;
  std::vector<KvBlock> blocks;
  float* out_acc = nullptr;
  float* lse = nullptr;
  void* out = nullptr;
  const float* sinks = nullptr;
  TermOperands terms;
  bool initial = false;
  bool final = false;
  // Expected times from the call's begin to each arrival of late keys. A kernel should have other
  // work for that long.
  std::vector<absl::Duration> late_after;

  bool has_late_keys() const { return !blocks.empty() && blocks.back().late > 0; }
};

// delta[b, h, i] = sum over d of dout[b, i, h, d] * out[b, i, h, d], minus dlse[b, h, i] if dlse is
// given. With dlse, delta is 0 where lse[b, h, i] is -inf, because such a row has no gradients.
struct DeltaCall {
  const AttentionProblem* problem = nullptr;
  int64_t q_rows = 0;
  const void* out = nullptr;    // [batch, q_rows, num_heads, head_dim_v] out_dtype()
  const void* dout = nullptr;   // like out, dtype
  float* delta = nullptr;       // [batch, num_heads, q_rows] fp32
  const float* dlse = nullptr;  // like delta, or null
  const float* lse = nullptr;   // like delta; read only with dlse
  float* dq_acc = nullptr;      // as in BackwardCall: set to 0, or null
};

// Returns the number of elements of a call's dq_acc.
inline int64_t DqElements(const AttentionProblem& problem, int64_t q_rows) {
  return problem.batch * q_rows * problem.num_heads * problem.head_dim;
}

// dsinks[h] = -sum over b and i of exp(sinks[h] - lse[b, h, i]) * delta[b, h, i]; a sink of -inf
// has none. The summation order depends on the sizes only.
struct SinkGradientCall {
  const AttentionProblem* problem = nullptr;
  int64_t q_rows = 0;
  const float* sinks = nullptr;  // [num_heads]
  const float* lse = nullptr;    // [batch, num_heads, q_rows]
  const float* delta = nullptr;  // like lse
  float* dsinks = nullptr;       // [num_heads], overwritten
};

// Gradients of all q rows with respect to the keys of all blocks, using the global lse and delta,
// so results are additive over blocks:
//   p  = exp(s - lse), 0 where lse = -inf
//   dv += p^T dout;  ds = p * (dout v^T - delta), through the softcap's derivative
//   dq_acc += scale ds k;  dk += scale ds^T q
//   dq_acc [batch, q_rows, num_heads, head_dim] fp32
struct BackwardCall {
  const AttentionProblem* problem = nullptr;
  int64_t q_rows = 0;
  std::vector<Piece> q_pieces;
  const void* q = nullptr;     // [batch, q_rows, num_heads, head_dim] dtype
  const void* dout = nullptr;  // [batch, q_rows, num_heads, head_dim_v] dtype
  const float* lse = nullptr;  // [batch, num_heads, q_rows]
  const float* delta = nullptr;
  float* dq_acc = nullptr;
  std::vector<KvBlock> blocks;  // with dk, dv
  TermOperands terms;
  int store_hint = kNoStoreHint;
};

// The gradient of the bias at all pairs of the call's queries and keys. It is stored, not added:
// ds, before the softcap's derivative, or after it if the bias is applied before the softcap.
// Summed over the batch rows and heads that share an element, in a fixed order. Pairs outside the
// call or the band may keep their values.
//   dbias  like TermOperands::bias, in the bias's element type
struct BiasGradientCall {
  const AttentionProblem* problem = nullptr;
  int64_t q_rows = 0;
  std::vector<Piece> q_pieces;
  const void* q = nullptr;
  const void* dout = nullptr;
  const float* lse = nullptr;
  const float* delta = nullptr;
  std::vector<KvBlock> blocks;
  TermOperands terms;
  void* dbias = nullptr;
};

// Merges partial results of the same rows over disjoint key sets: the k-fold form of
// common/attention/merge.h, with terms in the order of the parts. A part with lse = -inf adds
// nothing.
//   out_acc  [batch, q_rows, num_heads, head_dim_v] fp32; written unless `final`
//   out      like out_acc, out_dtype(); written if `final`
//   lse      [batch, num_heads, q_rows] fp32, written
//   sinks    as in ForwardCall
//
// lse, and out_acc or an fp32 out, may be the same memory as those of one part.
struct MergePart {
  const float* out = nullptr;  // like out_acc
  const float* lse = nullptr;
};
inline constexpr int kMaxMergeParts = 64;  // Limits::max_world_size
struct MergeCall {
  const AttentionProblem* problem = nullptr;
  int64_t q_rows = 0;
  std::vector<MergePart> parts;  // 1..kMaxMergeParts
  float* out_acc = nullptr;
  void* out = nullptr;
  float* lse = nullptr;
  const float* sinks = nullptr;
  bool final = false;
};

// Softmax weights of some rows, before dropout. There is one call for each group of blocks of the
// forward, with the same flags:
//   target  [rows.size(), num_heads, columns] fp32: row, head, the key's position in its document
//
// The initial call starts without keys. Each call stores the scores of the keys that a row sees.
// The final call replaces all scores by exp(score - lse), and by 0 for keys that are not seen,
// which include keys of no block. A row with lse = -inf gets zeros.
struct ProbabilitiesCall {
  const AttentionProblem* problem = nullptr;
  int64_t q_rows = 0;
  std::vector<Piece> q_pieces;
  const void* q = nullptr;
  std::vector<KvBlock> blocks;  // k and segment_ids
  TermOperands terms;
  std::vector<ChosenRow> rows;
  int64_t columns = 0;
  float* target = nullptr;
  const float* lse = nullptr;  // [batch, num_heads, q_rows]; read when `final`
  bool initial = false;
  bool final = false;
};

struct ZeroCall {
  void* target = nullptr;
  int64_t bytes = 0;
  int store_hint = kNoStoreHint;
};

// target[i] += source[i], fp32, in order of i on every back end.
struct AddCall {
  float* target = nullptr;
  const float* source = nullptr;
  int64_t count = 0;
};

// target[i] = source[i], rounded to nearest even. A plain copy for fp32; target and source may then
// be the same memory.
struct ConvertCall {
  DType dtype = DType::kFloat32;
  void* target = nullptr;
  const float* source = nullptr;
  int64_t count = 0;
  int store_hint = kNoStoreHint;
};

// For each run r of `runs`, copies run_bytes bytes from source + r * source_pitch to target + r *
// target_pitch. Source and target must not overlap.
struct CopyCall {
  void* target = nullptr;
  const void* source = nullptr;
  int64_t runs = 0;
  int64_t run_bytes = 0;
  int64_t source_pitch = 0;
  int64_t target_pitch = 0;
};

// Copies some rows and heads of a whole tensor into a part's tensor: part = whole.
//   whole [outer, rows, heads, inner_bytes], part [outer, part_rows, part_heads, inner_bytes]
//
// With heads_first, both are [outer, heads, rows, inner_bytes]. Two of the part's heads may be the
// same head of the whole.
struct GatherCall {
  bool heads_first = false;
  int64_t outer = 1;
  int64_t inner_bytes = 0;
  int64_t rows = 0;
  int64_t part_rows = 0;
  int64_t heads = 1;
  int64_t part_heads = 1;
  // Host memory, valid until the call has been started. row_runs: runs in ascending order of
  // `first`, from 0 without gaps, and of the rows that they name. head_of: the head of the whole
  // for each head of the part.
  absl::Span<const RowRun> row_runs;
  absl::Span<const int32_t> head_of;
  const void* whole = nullptr;
  void* part = nullptr;
};

// A part's values for some rows and heads of a whole tensor, in fp32; row_runs and head_of as in
// GatherCall.
struct ScatterPart {
  int64_t rows = 0;
  absl::Span<const RowRun> row_runs;
  absl::Span<const int32_t> head_of;
  const float* values = nullptr;  // [outer, rows, heads, width], or as heads_first says
  const float* lse = nullptr;     // [outer, heads, rows]; if the call merges
};

// The reverse of GatherCall, for several parts at once, for each row and head of the whole:
//   sums    values = before + parts, in the order of parts, and of the heads within one
//   merges  (values, lse) = (before, its lse) merged with the parts', as in MergeCall. No two
//           heads of parts are the same head of the whole at one row. Not heads_first.
//
// An `initial` call has nothing before: 0 with lse = -inf. A `final` call rounds the values into
// `result`, and sinks join as in ForwardCall. Otherwise `values` gets them; elements that no part
// has may stay unwritten. With heads_first, a call is neither initial nor final.
struct ScatterCall {
  bool merges = false;
  bool heads_first = false;
  bool initial = false;
  bool final = false;
  DType dtype = DType::kFloat32;  // of `result`
  int64_t outer = 1;
  int64_t rows = 0;
  int64_t heads = 1;
  int64_t width = 0;  // at most 256, unless heads_first
  std::vector<ScatterPart> parts;
  // [outer, rows, heads, width]; read unless initial, null if initial and final
  float* values = nullptr;
  void* result = nullptr;        // like values; may be the same memory if that is fp32
  float* lse = nullptr;          // merges: [outer, heads, rows]; read unless initial, written
  const float* sinks = nullptr;  // merges, final: [heads], or null
};

using KernelCall = std::variant<ForwardCall, DeltaCall, SinkGradientCall, BackwardCall,
                                BiasGradientCall, ProbabilitiesCall, ZeroCall, AddCall, ConvertCall,
                                MergeCall, CopyCall, GatherCall, ScatterCall>;

// Returns the problem of a call that multiplies q by k, or null for other calls.
inline const AttentionProblem* ProductProblem(const KernelCall& call) {
  if (const auto* forward = std::get_if<ForwardCall>(&call)) return forward->problem;
  if (const auto* backward = std::get_if<BackwardCall>(&call)) return backward->problem;
  if (const auto* gradient = std::get_if<BiasGradientCall>(&call)) return gradient->problem;
  if (const auto* rows = std::get_if<ProbabilitiesCall>(&call)) return rows->problem;
  return nullptr;
}

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_ATTENTION_KERNEL_H_
