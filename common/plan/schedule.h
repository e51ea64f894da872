// Schedule: what every rank does, as data.
//
// A schedule holds one Program per rank. A program is a list of buffers, sized
// before anything runs, and a list of steps. A step is a group of transfers and
// a list of compute calls. One executor runs every program; ring, single device,
// halo exchange and whatever follows are different values of this type.
//
// Ordering. Operations take effect as if executed one after another in program
// order (a step's transfers as one group, then its calls). The executor derives
// the real dependencies from the buffer ranges that each operation reads and
// writes, so a transfer that touches nothing a call needs runs beside it.
// Transfers between two ranks match in program order: the n-th send of rank a to
// rank b in step s is the n-th receive from a in step s of b, same bytes.
//
// The ring (pass-KV), rank r of W, forward: at step s rank r computes on the
// block of kv_source_rank = (r - s) mod W while it passes that block on to r + 1
// and receives the next from r - 1; two K/V buffers alternate, the home shard's
// being one of them. Only rows that some later rank can see travel at all; where
// windows or documents leave ranks without common keys, blocks go straight to the
// ranks that need them (direct, kv_route.h) instead of through all ranks between.
// Backward: what others contribute to a block's dk, dv travels in fp32 with the block,
// in parts, so that one part travels while the next computes. A part's accumulator
// starts at the first rank that contributes and goes straight home from the last one;
// the owner computes its own block last, on top of what has come home. dq stays.
// Additions have one order, fixed by the schedule, so results do not depend on timing.
// K/V outlives the pass, in a third K/V buffer, where it is needed twice: for direct
// exchange, and for the backward pass.
#ifndef RINGATTN_COMMON_PLAN_SCHEDULE_H_
#define RINGATTN_COMMON_PLAN_SCHEDULE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/attention/tensors.h"
#include "common/plan/shard_plan.h"

namespace ringattn {

enum class ScheduleKind : uint8_t { kSingle = 0, kRing = 1 };
const char* ScheduleKindName(ScheduleKind kind);

// Index into Program::buffers.
using BufferId = int;
inline constexpr BufferId kNoBuffer = -1;

struct BufferSpec {
  std::string name;  // "q", "k", "kv_slot1.k", "dq_acc", ...
  int64_t bytes = 0;
  // Set for buffers that hold this rank's shard of a protocol tensor, in its
  // TensorLayout with local rows: inputs are filled before the program runs,
  // outputs are read after it. The shard lies at the buffer's beginning; k and v
  // may be larger, where they later hold another rank's block.
  std::optional<TensorId> input;
  std::optional<TensorId> output;
};

struct ByteRange {
  BufferId buffer = kNoBuffer;
  int64_t offset = 0;
  int64_t bytes = 0;
};

struct Transfer {
  enum class Kind : uint8_t { kSend, kReceive };
  Kind kind = Kind::kSend;
  int peer = 0;  // rank in the ring of this request
  ByteRange range;
};

// Keys (and values) that a compute call works on: rows [row_begin, row_end) of
// source_rank's kv shard, in ranges of exactly that many rows:
//   k [batch, rows, num_kv_heads, head_dim], v [.., head_dim_v], spec dtype
//   dk, dv: the same shapes in fp32 (backward), accumulated into
struct KvOperand {
  int source_rank = 0;
  int64_t row_begin = 0;
  int64_t row_end = 0;
  ByteRange k;
  ByteRange v;
  ByteRange dk;
  ByteRange dv;

  int64_t rows() const { return row_end - row_begin; }
};

struct ComputeCall {
  enum class Op : uint8_t {
    kForward,   // attention of the whole q shard over `kv`, merged into out_acc, lse
    kDelta,     // delta = rowsum(dout * out)
    kBackward,  // dq_acc += ..., and each operand's dk, dv += ...
    kZero,      // target = 0
    kAdd,       // target += source, fp32
    kConvert,   // target (spec dtype) = source (fp32)
  };
  Op op = Op::kForward;

  std::vector<KvOperand> kv;  // kForward, kBackward
  bool initial = false;       // kForward: there is no previous partial
  bool final = false;         // kForward: write out in the spec's dtype
  ByteRange source;           // kAdd, kConvert
  ByteRange target;           // kZero, kAdd, kConvert

  // For reports and the cost model: 128 x 128 tiles with work, per batch row and
  // query head, and pairs (i, j) that are not masked, per batch row and head.
  int64_t tiles = 0;
  int64_t pairs = 0;
};

struct Step {
  std::vector<Transfer> transfers;
  std::vector<ComputeCall> calls;
};

// Fixed buffers by role, kNoBuffer where the program has none.
struct ProgramBuffers {
  BufferId q = kNoBuffer;        // [batch, rows, num_heads, head_dim]
  BufferId k = kNoBuffer;        // [batch, rows, num_kv_heads, head_dim], home shard
  BufferId v = kNoBuffer;        // [batch, rows, num_kv_heads, head_dim_v], home shard
  BufferId out = kNoBuffer;      // [batch, rows, num_heads, head_dim_v]
  BufferId lse = kNoBuffer;      // [batch, num_heads, rows] fp32
  BufferId out_acc = kNoBuffer;  // like out, fp32; == out when the dtype is fp32
  BufferId dout = kNoBuffer;     // like out
  BufferId delta = kNoBuffer;    // like lse
  BufferId dq_acc = kNoBuffer;   // like q, fp32
};

struct Program {
  int rank = 0;
  std::vector<BufferSpec> buffers;
  ProgramBuffers roles;
  std::vector<Step> steps;

  int64_t BufferBytes() const;
  int64_t SentBytes() const;
  int64_t TileCount() const;  // per batch row and query head, as in ComputeCall
  int64_t PairCount() const;
};

struct Schedule {
  ScheduleKind kind = ScheduleKind::kSingle;
  Direction direction = Direction::kForward;
  // Backward without out and lse: a forward pass runs first in the same program.
  bool recompute_forward = false;
  // Blocks go straight from their owner to the ranks that need them.
  bool direct = false;
  std::vector<Program> programs;  // one per rank
};

// A pure function of its arguments: every process that builds it from the same
// request gets the same value.
// REQUIRES: kind == kSingle iff plan.world_size == 1.
Schedule MakeSchedule(const AttentionSpec& spec, const ShardPlan& plan, Direction direction,
                      bool recompute_forward);

// A table: buffers, then per rank and step the transfers with peers and bytes and
// the calls with tiles, then totals.
std::string ToString(const Schedule& schedule, const AttentionSpec& spec);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_SCHEDULE_H_
