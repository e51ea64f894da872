// Program: the work of one rank, as data.
//
// A program is a list of buffers, whose sizes are fixed before it runs, and a list of steps. A step
// is a group of transfers and a list of compute calls. A call names every operand as a range of
// bytes; a buffer's role implies nothing.
//
// Ordering. Transfers and calls take effect as if executed one after another in program order: a
// step's transfers as one group, then its calls. The executor derives the real dependencies from
// the byte ranges that each of them reads and writes, so a transfer overlaps every call that does
// not need its bytes. Transfers between two ranks match in program order: the n-th send of rank a
// to rank b in step s is the n-th receive from a in step s of b, with the same bytes.
//
// Lanes. Transfers inside a host and transfers between hosts are in separate lanes (lane.h). The
// executor starts a step's transfers as one group per lane, and neither lane waits for the other
// unless their bytes conflict. AssignLanes sets the lanes, and lane_check.h checks them.
#ifndef RINGATTN_COMMON_PROGRAM_PROGRAM_H_
#define RINGATTN_COMMON_PROGRAM_PROGRAM_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/attention/tensors.h"
#include "common/attention/tuning.h"
#include "common/program/lane.h"

namespace ringattn {

// Index into Program::buffers.
using BufferId = int;
inline constexpr BufferId kNoBuffer = -1;

// Where a buffer's initial bytes come from.
enum class BufferSource : uint8_t {
  kUpload,    // from the client, before the program runs
  kRetained,  // memory that outlives the program and is lent to it (Operation::LentBuffer)
  kScratch,   // none: the program writes before it reads
};

struct BufferSpec {
  std::string name;  // "q", "k", "kv_slot1.k", "dq_acc", ...
  int64_t bytes = 0;
  BufferSource source = BufferSource::kScratch;
  // Set for buffers that hold this rank's shard of a protocol tensor, in its TensorLayout with
  // local rows. Inputs are filled before the program runs (by `source`); outputs are read after it.
  // The shard starts at the beginning of the buffer. Buffers of exchanged tensors (k, v and their
  // segment ids) may be larger if they later hold another rank's block.
  std::optional<TensorId> input;
  std::optional<TensorId> output;
};

// A range of a buffer's bytes. Calls without an operand have kNone in its place.
struct ByteRange {
  BufferId buffer = kNoBuffer;
  int64_t offset = 0;
  int64_t bytes = 0;

  bool operator==(const ByteRange&) const = default;
};
inline constexpr ByteRange kNone{};

// Returns whether the ranges share a byte.
bool Overlap(const ByteRange& a, const ByteRange& b);

struct Transfer {
  enum class Kind : uint8_t { kSend, kReceive };
  Kind kind = Kind::kSend;
  int peer = 0;  // rank in the ring of this request
  ByteRange range;
  Lane lane = Lane::kInside;  // the same on both ranks
  // How many steps the transfer may take, beginning with its own. Until its last step ends, no
  // other transfer writes the bytes that it sends or accesses the bytes that it receives. 1 inside
  // a host, where AssignLanes sets it.
  int steps = 1;
};

struct OptionOperand {
  TensorId tensor = TensorId::kSinks;
  ByteRange range;
};

// Queries of a compute call: rows [row_begin, row_end) of source_rank's q shard, with all heads, in
// ranges of exactly that many rows:
//   q       [batch, rows, num_heads, head_dim] spec dtype
//   out_acc [batch, rows, num_heads, head_dim_v] fp32, the partial; may share out's bytes
//           if results are fp32
//   out     [batch, rows, num_heads, head_dim_v] the spec's result_dtype()
//   dout    the same shape in the spec's dtype
//   lse     [batch, num_heads, rows] fp32; delta and dlse have the same form
//   dq_acc  [batch, rows, num_heads, head_dim] fp32, accumulated into
// ComputeCall::Op states which of them a call has.
struct QOperand {
  int source_rank = 0;
  int64_t row_begin = 0;
  int64_t row_end = 0;
  ByteRange q;
  ByteRange out_acc;
  ByteRange out;
  ByteRange lse;
  ByteRange dout;
  ByteRange delta;
  ByteRange dq_acc;
  // Inputs that only some requests have (TensorInfo::is_present), in their rank's layout.
  std::vector<OptionOperand> options;

  int64_t rows() const { return row_end - row_begin; }
  // kNone if the call has no such operand.
  const ByteRange& Option(TensorId tensor) const;
};

// Keys (and values) of a compute call: rows [row_begin, row_end) of source_rank's kv shard, with
// all heads, in ranges of exactly that many rows:
//   k       [batch, rows, num_kv_heads, head_dim] spec dtype
//   v       [batch, rows, num_kv_heads, head_dim_v] spec dtype
//   dk, dv  the same shapes in fp32 (backward), accumulated into
//   dk_out, dv_out  dk and dv in the spec's dtype, if the call has a hint
//                   (ComputeCall::store_hint)
//   segment_ids     [batch, rows] int32, if the request has them
struct KvOperand {
  int source_rank = 0;
  int64_t row_begin = 0;
  int64_t row_end = 0;
  ByteRange k;
  ByteRange v;
  ByteRange dk;
  ByteRange dv;
  ByteRange dk_out;
  ByteRange dv_out;
  ByteRange segment_ids;
  // If not 0, k and v may still be in transfer when the call starts, and its kernel waits for them:
  // the step `late` - 1 after the call's step receives them. Operands are in the order of this
  // number. Schedules never set it (worker/executor/late_keys.h).
  int late = 0;

  int64_t rows() const { return row_end - row_begin; }
};

// A partial result over some keys, for the rows of the call's q operand:
//   out [batch, rows, num_heads, head_dim_v] fp32, lse [batch, num_heads, rows] fp32
struct PartialOperand {
  ByteRange out;
  ByteRange lse;
};

// Heads of a call: kv heads [begin, begin + count) of `of`, with the query heads that share them.
// The call's operands then have only these heads, except tensors without a head axis.
struct HeadRange {
  int64_t begin = 0;
  int64_t count = 0;
  int64_t of = 0;  // 0: all heads; begin and count are then unused

  bool all() const { return of == 0; }
  bool operator==(const HeadRange&) const = default;
};

// Byte layout of a copy: `runs` runs of run_bytes each. Consecutive runs begin `pitch` bytes apart.
// The call's source and target ranges reach from the first run to the last.
struct CopyForm {
  int64_t runs = 0;
  int64_t run_bytes = 0;
  int64_t source_pitch = 0;
  int64_t target_pitch = 0;

  bool operator==(const CopyForm&) const = default;
};

// Rows and heads of a part of a dilated problem (common/layout/dilation.h). Describes a copy
// between a tensor of the whole problem and one that holds only the part:
//   [outer, rows, heads, inner_bytes], or [outer, heads, rows, inner_bytes]
struct PartForm {
  enum class Heads : uint8_t { kNone, kQuery, kKeyValue };  // kNone: heads is 1
  bool of_keys = false;                                     // rows of keys; else of queries
  Heads heads_of = Heads::kNone;
  bool heads_first = false;
  int64_t outer = 1;
  int64_t inner_bytes = 0;
  int64_t rows = 0;  // of the whole tensor
  // of the part; with several parts in a kGather each has a different number
  int64_t part_rows = 0;
  int64_t heads = 1;
  int64_t part_heads = 1;  // of the part, like part_rows

  int64_t whole_bytes() const { return outer * rows * heads * inner_bytes; }
  int64_t part_bytes() const { return outer * part_rows * part_heads * inner_bytes; }
  bool operator==(const PartForm&) const = default;
};

struct ComputeCall {
  enum class Op : uint8_t {
    // Attention of q over `kv`, merged into the partial. Has q and lse; out_acc unless it is both
    // initial and final; out if it is final, and then sinks if the request has them. Sinks join the
    // softmax once, after all keys.
    kForward,
    // delta = rowsum(dout * out) - dlse; 0 where lse is -inf. Has out, dout and delta; with dlse
    // also dlse and lse. Sets dq_acc to 0 if it has one.
    kDelta,
    // target [num_heads] fp32 = -sum over batch and rows of exp(sink - lse) * delta. Has
    // sinks, lse, delta.
    kSinkGradient,
    // dq_acc += ..., and each operand's dk, dv += ... Has q, lse, dout, delta, dq_acc.
    kBackward,
    // target (the rank's shard of dbias) = the gradient of the bias at the pairs of q and `kv`.
    // Other pairs keep their values. Has q, lse, dout, delta.
    kBiasGradient,
    // target (the rank's shard of probabilities): the scores of its chosen rows with the keys of
    // `kv`. The last of these calls is final: it replaces all scores by exp(score - lse), and by 0
    // at keys that a row does not see. The first call is initial: target holds no scores before it.
    // Has q, and lse if it is final; its kv operands have only keys and their ids.
    kProbabilities,
    kZero,     // target = 0
    kAdd,      // target += source, fp32
    kConvert,  // target (the spec's result_dtype()) = source (fp32)
    // Merges the partials of q's rows, in their order. Has lse and out_acc; if it is final, out
    // instead of out_acc, and then sinks if the request has them. Its targets may be part of a
    // buffer.
    kMerge,
    kCopy,  // target = source, run by run
    // Between a dilated problem and its parts, from `part` on (`form`):
    kGather,  // target (of the part) = source at the part's rows and heads
    // Adds `parts` (which have only out) to source at their rows and heads, in fp32, and writes the
    // sum to target: in the results' dtype if it is final, else over source's bytes. An initial
    // call has no source and adds to 0.
    kScatterAdd,
    // Merges `parts` into the partial q.out_acc, q.lse at their rows and heads. An initial call has
    // no earlier partial. A final call writes out instead, with sinks if the request has them.
    kScatterMerge,
  };
  Op op = Op::kForward;

  QOperand q;                 // all except kZero, kAdd, kConvert, kCopy
  std::vector<KvOperand> kv;  // kForward, kBackward, kBiasGradient, kProbabilities
  bool initial = false;       // kForward: no earlier partial; kProbabilities, kScatter*
  // kForward, kMerge: write out, in the results' dtype; kProbabilities, kScatter*
  bool final = false;
  HeadRange heads;                    // kForward, kBackward, kBiasGradient
  std::vector<PartialOperand> parts;  // kMerge, kScatterAdd, kScatterMerge
  ByteRange source;                   // kAdd, kConvert, kCopy, kGather, kScatterAdd
  // kZero, kAdd, kConvert, kCopy, kSinkGradient, kBiasGradient, kProbabilities, kGather,
  // kScatterAdd
  ByteRange target;
  CopyForm copy;  // kCopy

  // Index, in DilatedPartsOf, of the part of a dilated problem that the call computes on; of the
  // first of several for kScatter*. The call's operands, heads, row numbers and counts then refer
  // to the part.
  int part = kWhole;
  static constexpr int kWhole = -1;
  int64_t part_query_heads = 0;  // of `of_query_heads` in all
  int64_t of_query_heads = 0;
  // kGather: in the tensor's element size. kScatterAdd, kScatterMerge (of out): in fp32's.
  PartForm form;

  // kBackward: the number of a hint. The call may store dk and dv rounded, in dk_out and dv_out of
  // its operands, and leave dk and dv unchanged, because no other call adds to them and only
  // kConvert reads them. A device that does so skips the kZero and kConvert calls of that number.
  int store_hint = kNoStoreHint;
  static constexpr int kNoStoreHint = -1;

  // For reports and the cost model. tiles: 128 x 128 tiles with work, per batch row and query head.
  // pairs: pairs (i, j) that are not masked, per batch row and head of the call.
  int64_t tiles = 0;
  int64_t pairs = 0;

  // The fraction of all heads that the call works on.
  double share_of_heads() const {
    const double of_part =
        heads.all() ? 1.0 : static_cast<double>(heads.count) / static_cast<double>(heads.of);
    if (part == kWhole) return of_part;
    return of_part * static_cast<double>(part_query_heads) / static_cast<double>(of_query_heads);
  }
};

const char* OpName(ComputeCall::Op op);  // "forward", "zero", ...

// Calls visit(range) for every operand of the call, including kNone.
template <typename Call, typename Visit>
void ForEachRange(Call& call, const Visit& visit) {
  for (auto* range : {&call.q.q, &call.q.out_acc, &call.q.out, &call.q.lse, &call.q.dout,
                      &call.q.delta, &call.q.dq_acc, &call.source, &call.target}) {
    visit(*range);
  }
  for (auto& option : call.q.options) visit(option.range);
  for (auto& keys : call.kv) {
    for (auto* range :
         {&keys.k, &keys.v, &keys.dk, &keys.dv, &keys.dk_out, &keys.dv_out, &keys.segment_ids}) {
      visit(*range);
    }
  }
  for (auto& partial : call.parts) {
    visit(partial.out);
    visit(partial.lse);
  }
}

struct Step {
  std::vector<Transfer> transfers;
  std::vector<ComputeCall> calls;
};

struct Program {
  int rank = 0;
  Tuning tuning;  // of the kernels of its calls
  std::vector<BufferSpec> buffers;
  std::vector<Step> steps;

  int64_t BufferBytes() const;
  int64_t SentBytes() const;
  int64_t SentBytes(Lane lane) const;
  // Per batch row and query head, over all heads.
  int64_t TileCount() const;
  int64_t PairCount() const;
};

// Sets the lane of every transfer. Transfers inside a host get one step.
//   host_of_rank  by rank of the program's ring, as for LaneBetween
void AssignLanes(const std::vector<int>& host_of_rank, Program& program);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROGRAM_PROGRAM_H_
