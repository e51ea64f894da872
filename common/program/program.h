// Program: what one rank does, as data.
//
// A program is a list of buffers, sized before anything runs, and a list of steps. A
// step is a group of transfers and a list of compute calls. Every operand of a call is
// a range of bytes that stands in the call: nothing is known by a buffer's role.
//
// Ordering. Operations take effect as if executed one after another in program
// order (a step's transfers as one group, then its calls). The executor derives
// the real dependencies from the byte ranges that each operation reads and
// writes, so a transfer that touches nothing a call needs runs beside it.
// Transfers between two ranks match in program order: the n-th send of rank a to
// rank b in step s is the n-th receive from a in step s of b, same bytes.
#ifndef RINGATTN_COMMON_PROGRAM_PROGRAM_H_
#define RINGATTN_COMMON_PROGRAM_PROGRAM_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/attention/tensors.h"
#include "common/attention/tuning.h"

namespace ringattn {

// Index into Program::buffers.
using BufferId = int;
inline constexpr BufferId kNoBuffer = -1;

// Where the bytes that a buffer begins with come from.
enum class BufferSource : uint8_t {
  kUpload,    // the client sends them before the program runs
  kRetained,  // memory that outlives the program, lent to it (Operation::LentBuffer)
  kScratch,   // nowhere: the program writes before it reads
};

struct BufferSpec {
  std::string name;  // "q", "k", "kv_slot1.k", "dq_acc", ...
  int64_t bytes = 0;
  BufferSource source = BufferSource::kScratch;
  // Set for buffers that hold this rank's shard of a protocol tensor, in its
  // TensorLayout with local rows: inputs are filled before the program runs
  // (by `source`), outputs are read after it. The shard lies at the buffer's beginning; what
  // travels (k, v, their segment ids) may be larger, where it later holds another rank's block.
  std::optional<TensorId> input;
  std::optional<TensorId> output;
};

// Bytes of a buffer; kNone where a call has no such operand.
struct ByteRange {
  BufferId buffer = kNoBuffer;
  int64_t offset = 0;
  int64_t bytes = 0;

  bool operator==(const ByteRange&) const = default;
};
inline constexpr ByteRange kNone{};

struct Transfer {
  enum class Kind : uint8_t { kSend, kReceive };
  Kind kind = Kind::kSend;
  int peer = 0;  // rank in the ring of this request
  ByteRange range;
};

struct OptionOperand {
  TensorId tensor = TensorId::kSinks;
  ByteRange range;
};

// Queries that a compute call works on: rows [row_begin, row_end) of source_rank's q
// shard, with all heads, in ranges of exactly that many rows:
//   q       [batch, rows, num_heads, head_dim] spec dtype
//   out_acc [batch, rows, num_heads, head_dim_v] fp32, the partial; may be out's bytes
//           where results are fp32
//   out     [batch, rows, num_heads, head_dim_v] the spec's result_dtype()
//   dout    the same in spec dtype
//   lse     [batch, num_heads, rows] fp32; delta and dlse alike
//   dq_acc  [batch, rows, num_heads, head_dim] fp32, accumulated into
// Which of them a call has: ComputeCall::Op.
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

// Keys (and values) that a compute call works on: rows [row_begin, row_end) of
// source_rank's kv shard, with all heads, in ranges of exactly that many rows:
//   k [batch, rows, num_kv_heads, head_dim], v [.., head_dim_v], spec dtype
//   dk, dv: the same shapes in fp32 (backward), accumulated into
//   dk_out, dv_out: of an offer (ComputeCall::offer), dk and dv in the spec's dtype
//   segment_ids [batch, rows] int32, where the request has them
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
  // k and v may still be on their way when the call starts, and its kernel waits for them. Behind
  // all operands that are not. Schedules make none: worker/executor/late_keys.h.
  bool late = false;

  int64_t rows() const { return row_end - row_begin; }
};

// A partial result over some keys, of the rows of the call's q operand:
//   out [batch, rows, num_heads, head_dim_v] fp32, lse [batch, num_heads, rows] fp32
struct PartialOperand {
  ByteRange out;
  ByteRange lse;
};

// Heads that a call works on: kv heads [begin, begin + count) of `of`, with the query heads that
// share them. Its operands then have these heads alone, but for what has no heads.
struct HeadRange {
  int64_t begin = 0;
  int64_t count = 0;
  int64_t of = 0;  // 0: all heads, and the other two mean nothing

  bool all() const { return of == 0; }
  bool operator==(const HeadRange&) const = default;
};

// Which bytes of source and target a copy is of: `runs` runs of run_bytes, each `pitch` bytes
// behind the one before it. Source and target of the call reach from the first to the last.
struct CopyForm {
  int64_t runs = 0;
  int64_t run_bytes = 0;
  int64_t source_pitch = 0;
  int64_t target_pitch = 0;

  bool operator==(const CopyForm&) const = default;
};

// Rows and heads of a part of a dilated problem (common/layout/dilation.h), between a tensor of the
// whole one and one that has just them:
//   [outer, rows, heads, inner_bytes], or [outer, heads, rows, inner_bytes]
struct PartForm {
  enum class Heads : uint8_t { kNone, kQuery, kKeyValue };  // kNone: heads are 1
  bool of_keys = false;  // whose rows: the keys', or the queries'
  Heads heads_of = Heads::kNone;
  bool heads_first = false;
  int64_t outer = 1;
  int64_t inner_bytes = 0;
  int64_t rows = 0;       // of the whole tensor, then of the part's
  int64_t part_rows = 0;  // kGather: of several parts each has its own
  int64_t heads = 1;
  int64_t part_heads = 1;  // likewise

  int64_t whole_bytes() const { return outer * rows * heads * inner_bytes; }
  int64_t part_bytes() const { return outer * part_rows * part_heads * inner_bytes; }
  bool operator==(const PartForm&) const = default;
};

struct ComputeCall {
  enum class Op : uint8_t {
    // Attention of q over `kv`, merged into the partial. Has q and lse; out_acc unless it
    // is both initial and final; out if it is final, and then sinks where the request has
    // them: they join the softmax once, after all keys.
    kForward,
    // delta = rowsum(dout * out) - dlse. Has out, dout, delta; with dlse also that and lse:
    // where lse is -inf, delta is 0. Beside it dq_acc becomes 0, where it has that.
    kDelta,
    // target [num_heads] fp32 = -sum over batch and rows of exp(sink - lse) * delta. Has
    // sinks, lse, delta.
    kSinkGradient,
    // dq_acc += ..., and each operand's dk, dv += ... Has q, lse, dout, delta, dq_acc.
    kBackward,
    // target (the rank's shard of dbias) = the bias's gradient, at the pairs of q and `kv`; other
    // pairs stay. Has q, lse, dout, delta.
    kBiasGradient,
    // target (the rank's shard of probabilities): the scores of its chosen rows with the keys of
    // `kv`; behind the last of these calls, which is final, exp(score - lse), and 0 at keys that a
    // row does not see. The first is initial: there are no scores before it. Has q, and lse where
    // it is final; of an operand only the keys and their ids.
    kProbabilities,
    kZero,     // target = 0
    kAdd,      // target += source, fp32
    kConvert,  // target (the spec's result_dtype()) = source (fp32)
    // The partials of q's rows become one, in their order. Has lse and out_acc; if it is final
    // out instead, and then sinks where the request has them. Targets may be a part's bytes.
    kMerge,
    kCopy,  // target = source, in runs
    // Between the whole of a dilated problem and its parts, from `part` on (`form`):
    kGather,  // target, the part's, = source at the part's rows and heads
    // The parts' (`parts`, of which there is an out alone) are added to source at their rows and
    // heads, fp32. An initial one has no source, but 0. Into target: where it is final in the
    // results' dtype, else source's bytes.
    kScatterAdd,
    // The partial q.out_acc, q.lse is merged with `parts` at their rows and heads; an initial one
    // has none before it. If it is final into out instead, and then sinks where the request has
    // them.
    kScatterMerge,
  };
  Op op = Op::kForward;

  QOperand q;                 // all but kZero, kAdd, kConvert, kCopy
  std::vector<KvOperand> kv;  // kForward, kBackward, kBiasGradient, kProbabilities
  bool initial = false;       // kForward: there is no previous partial; kProbabilities, kScatter*
  // kForward, kMerge: write out, in the results' dtype; kProbabilities, kScatter*
  bool final = false;
  HeadRange heads;                    // kForward, kBackward, kBiasGradient
  std::vector<PartialOperand> parts;  // kMerge, kScatterAdd, kScatterMerge
  ByteRange source;                   // kAdd, kConvert, kCopy, kGather, kScatterAdd
  // kZero, kAdd, kConvert, kCopy, kSinkGradient, kBiasGradient, kProbabilities, kGather,
  // kScatterAdd
  ByteRange target;
  CopyForm copy;  // kCopy

  // Of a dilated problem: by number in DilatedPartsOf, the part that the call is of. Its operands,
  // heads, ranks' rows and counts are then the part's. Of kScatter* the first of several.
  int part = kWhole;
  static constexpr int kWhole = -1;
  int64_t part_query_heads = 0;  // of `of_query_heads`, all
  int64_t of_query_heads = 0;
  // kGather: of the tensor's own bytes. kScatterAdd, kScatterMerge (of out): of fp32's.
  PartForm form;

  // kBackward: the number of its offer to store dk and dv rounded, in dk_out and dv_out of its
  // operands, and to leave dk and dv alone, as no other call adds to them and none but kConvert
  // reads them. A device that takes it needs no kZero and no kConvert of that number.
  int offer = kNoOffer;
  static constexpr int kNoOffer = -1;

  // For reports and the cost model: 128 x 128 tiles with work, per batch row and
  // query head, and pairs (i, j) that are not masked, per batch row and head that the
  // call works on.
  int64_t tiles = 0;
  int64_t pairs = 0;

  // The part of all heads that it works on.
  double share_of_heads() const {
    const double of_part =
        heads.all() ? 1.0 : static_cast<double>(heads.count) / static_cast<double>(heads.of);
    if (part == kWhole) return of_part;
    return of_part * static_cast<double>(part_query_heads) / static_cast<double>(of_query_heads);
  }
};

const char* OpName(ComputeCall::Op op);  // "forward", "zero", ...

// Calls visit(range) for every operand of the call, also for kNone.
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
  Tuning tuning;  // of its calls' kernels
  std::vector<BufferSpec> buffers;
  std::vector<Step> steps;

  int64_t BufferBytes() const;
  int64_t SentBytes() const;
  // Per batch row and query head, of all heads.
  int64_t TileCount() const;
  int64_t PairCount() const;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROGRAM_PROGRAM_H_
