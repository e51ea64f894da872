// The kernel interface: what one compute call is once buffers have addresses.
// Back ends (CPU, CUDA) implement it; nothing here says how.
//
// Memory space: every data pointer is memory of the device that runs the call.
// Host-side descriptions (pieces, bands) are host memory, valid until the call
// has been started; a back end that works later copies them.
//
// A row of q is visible to keys by common/attention/band.h: the row's piece and the key's
// piece must name the same document d, and the difference of their positions
// must lie in bands[d]. Rows of one buffer are cut into pieces; the batch axis
// repeats them. Offsets are 64-bit element offsets throughout.
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
  int64_t head_dim = 1;    // 1..256
  int64_t head_dim_v = 1;  // 1..256
  float softmax_scale = 1.0f;
  float softcap = 0.0f;     // 0 = off
  std::vector<Band> bands;  // per document
  ScoreTerms terms;
  bool fp32_results = false;  // out is fp32 whatever `dtype` is
  // Equal calls on equal devices must give equal bits: kernels whose sums depend on which block
  // comes first refuse them.
  bool deterministic = false;
  // Of a ForwardCall of 16-bit tensors without score terms, head dims of multiples of 8 up to
  // 128: its products in
  // e4m3, as worker/kernels/e4m3.h has it. Other calls have no use for it.
  ComputeDType compute = ComputeDType::kAsInputs;
  // Values that the device takes (Device::tuning_offer); kernels without tiles have no use for it.
  Tuning tuning;

  DType out_dtype() const { return fp32_results ? DType::kFloat32 : dtype; }
};

// The number of an offer among an operation's calls. A BackwardCall that has one may store its
// blocks' rounded gradients in dk_out and dv_out and leave dk and dv alone: no other call adds to
// them. The ZeroCalls and ConvertCalls of that number are then none of the device's business.
// Whoever starts kernels without a number gives dk_out and dv_out all the same, and asks.
inline constexpr int kNoOffer = -1;

// A block of keys.
struct KvBlock {
  int64_t rows = 0;
  std::vector<Piece> pieces;
  const void* k = nullptr;               // [batch, rows, num_kv_heads, head_dim] dtype
  const void* v = nullptr;               // [batch, rows, num_kv_heads, head_dim_v] dtype
  float* dk = nullptr;                   // backward: like k, fp32, accumulated into
  float* dv = nullptr;                   // backward: like v, fp32, accumulated into
  const int32_t* segment_ids = nullptr;  // [batch, rows], where the problem has them
  // backward, of a call with an offer: like k and v, dtype
  void* dk_out = nullptr;
  void* dv_out = nullptr;
  // Of a ForwardCall whose device takes late keys (Device::TakesLateKeys): k and v may come when
  // the call has begun (StartAfter::bring_keys). Late blocks stand behind all others.
  bool late = false;
};

// Attention of all q rows over the keys of all blocks, merged (common/attention/merge.h)
// with the previous partial.
//   q        [batch, q_rows, num_heads, head_dim] dtype
//   out_acc  [batch, q_rows, num_heads, head_dim_v] fp32, normalised partial;
//            read unless `initial`, written unless `final`. May be null when
//            initial && final.
//   lse      [batch, num_heads, q_rows] fp32, natural log; read unless
//            `initial`, always written. -inf = no key seen yet.
//   out      [batch, q_rows, num_heads, head_dim_v] out_dtype(), written when `final`.
//            May be the same memory as out_acc when that is fp32.
//   sinks    [num_heads] fp32, or null; only when `final`: exp(sinks[h]) joins the
//            softmax of every row, after all keys, with a value of 0. -inf is no sink.
// A row without any visible key keeps its previous partial, or becomes
// (0, -inf) when `initial`, before its sink joins it. No blocks, or blocks without work, are legal.
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
  // About how long after the call's begin the late keys are there: so long a kernel should have
  // other work.
  absl::Duration late_after;

  bool has_late_keys() const { return !blocks.empty() && blocks.back().late; }
};

// delta[b, h, i] = sum over d of dout[b, i, h, d] * out[b, i, h, d], less dlse[b, h, i] where
// dlse is given; then 0 where lse[b, h, i] is -inf, as such a row has no gradients.
struct DeltaCall {
  const AttentionProblem* problem = nullptr;
  int64_t q_rows = 0;
  const void* out = nullptr;    // [batch, q_rows, num_heads, head_dim_v] out_dtype()
  const void* dout = nullptr;   // like out, dtype
  float* delta = nullptr;       // [batch, num_heads, q_rows] fp32
  const float* dlse = nullptr;  // like delta, or null
  const float* lse = nullptr;   // like delta; read only with dlse
  float* dq_acc = nullptr;      // as BackwardCall's: 0 after it, or null
};

// Of a call's dq_acc.
inline int64_t DqElements(const AttentionProblem& problem, int64_t q_rows) {
  return problem.batch * q_rows * problem.num_heads * problem.head_dim;
}

// dsinks[h] = -sum over b and i of exp(sinks[h] - lse[b, h, i]) * delta[b, h, i], where a sink
// of -inf has none. In an order that depends on the sizes alone.
struct SinkGradientCall {
  const AttentionProblem* problem = nullptr;
  int64_t q_rows = 0;
  const float* sinks = nullptr;  // [num_heads]
  const float* lse = nullptr;    // [batch, num_heads, q_rows]
  const float* delta = nullptr;  // likewise
  float* dsinks = nullptr;       // [num_heads], overwritten
};

// Gradients of all q rows against the keys of all blocks, with the global lse
// and delta (so the result is additive over blocks):
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
  int offer = kNoOffer;
};

// The bias's gradient at all pairs of the call's queries and keys, which are stored, not added
// to: ds before the softcap's derivative, or behind it where the bias is before the softcap,
// summed over the batch rows and heads that share it, in a fixed order. Pairs that are no pair of
// the call, or that the band hides, may stay as they are.
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

// Partials of the same rows over disjoint sets of keys, which become one: the k-fold form of
// common/attention/merge.h, with terms in the order of the parts. A part of lse -inf adds nothing.
//   out_acc  [batch, q_rows, num_heads, head_dim_v] fp32; written unless `final`
//   out      like out_acc, out_dtype(); written when `final`
//   lse      [batch, num_heads, q_rows] fp32, written
//   sinks    as in ForwardCall
// out_acc or out, where that is fp32, and lse may be the same memory as one part's.
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

// Softmax weights of some rows, before dropout. A call for each group of blocks that the forward
// has, with its flags:
//   target  [rows.size(), num_heads, columns] fp32: row, head, the key's position in its document
// An initial call begins with no key; each stores the scores of the keys that a row sees, and a
// final one makes exp(score - lse) of all of them, 0 for a key that is not seen. Keys of no block
// are not seen. A row whose lse is -inf has zeros.
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
  int offer = kNoOffer;
};

// target[i] += source[i], fp32, in order of i on every back end.
struct AddCall {
  float* target = nullptr;
  const float* source = nullptr;
  int64_t count = 0;
};

// target[i] = source[i] rounded to nearest even. For fp32 a plain copy; target
// and source are then allowed to be the same memory.
struct ConvertCall {
  DType dtype = DType::kFloat32;
  void* target = nullptr;
  const float* source = nullptr;
  int64_t count = 0;
  int offer = kNoOffer;
};

// Run r of `runs`: run_bytes bytes at target + r * target_pitch from source + r * source_pitch.
// Source and target do not overlap.
struct CopyCall {
  void* target = nullptr;
  const void* source = nullptr;
  int64_t runs = 0;
  int64_t run_bytes = 0;
  int64_t source_pitch = 0;
  int64_t target_pitch = 0;
};

// Some rows and heads of a whole tensor, which a part's tensor has by themselves: part = whole.
//   whole [outer, rows, heads, inner_bytes], part [outer, part_rows, part_heads, inner_bytes]
// or, with heads_first, [outer, heads, rows, inner_bytes] both. Two of a part's heads may be one of
// the whole's.
struct GatherCall {
  bool heads_first = false;
  int64_t outer = 1;
  int64_t inner_bytes = 0;
  int64_t rows = 0;
  int64_t part_rows = 0;
  int64_t heads = 1;
  int64_t part_heads = 1;
  // Host memory, valid until the call has been started. Runs ascend in `first`, from 0 on without
  // gaps, and in the rows that they name; a head of the whole for each of the part's.
  absl::Span<const RowRun> row_runs;
  absl::Span<const int32_t> head_of;
  const void* whole = nullptr;
  void* part = nullptr;
};

// What a part has at some rows and heads of a whole tensor: as GatherCall, of fp32.
struct ScatterPart {
  int64_t rows = 0;
  absl::Span<const RowRun> row_runs;
  absl::Span<const int32_t> head_of;
  const float* values = nullptr;  // [outer, rows, heads, width], as heads_first says
  const float* lse = nullptr;     // [outer, heads, rows], where it merges
};

// The way back, of several parts at once, for each row and head of the whole:
//   sums    values = before + parts, in the order of parts, and of the heads within one
//   merges  (values, lse) = (before, its lse) and the parts', as MergeCall. No two heads of parts
//           are one of the whole's at one row. Not heads_first.
// There is nothing before where it is initial: 0, of lse -inf. Where it is final the values are
// rounded into `result` and sinks join, as in ForwardCall; else `values` has them, and may lack
// what no part has, as that stays. Of heads_first, neither initial nor final.
struct ScatterCall {
  bool merges = false;
  bool heads_first = false;
  bool initial = false;
  bool final = false;
  DType dtype = DType::kFloat32;  // of `result`
  int64_t outer = 1;
  int64_t rows = 0;
  int64_t heads = 1;
  int64_t width = 0;  // at most 256, but for heads_first
  std::vector<ScatterPart> parts;
  // [outer, rows, heads, width]; read unless initial, and null where it is initial and final
  float* values = nullptr;
  void* result = nullptr;        // like values; may be the same memory where that is fp32
  float* lse = nullptr;          // merges: [outer, heads, rows]; read unless initial, written
  const float* sinks = nullptr;  // merges, final: [heads], or null
};

using KernelCall = std::variant<ForwardCall, DeltaCall, SinkGradientCall, BackwardCall,
                                BiasGradientCall, ProbabilitiesCall, ZeroCall, AddCall, ConvertCall,
                                MergeCall, CopyCall, GatherCall, ScatterCall>;

// The problem of a call that multiplies q by k; null for the others.
inline const AttentionProblem* ProductProblem(const KernelCall& call) {
  if (const auto* forward = std::get_if<ForwardCall>(&call)) return forward->problem;
  if (const auto* backward = std::get_if<BackwardCall>(&call)) return backward->problem;
  if (const auto* gradient = std::get_if<BiasGradientCall>(&call)) return gradient->problem;
  if (const auto* rows = std::get_if<ProbabilitiesCall>(&call)) return rows->problem;
  return nullptr;
}

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_ATTENTION_KERNEL_H_
