// Schedule: one Program per rank (program.h) that together compute one request. One
// executor runs every program; a single device, the ring and whatever follows are
// different values of one type, each built by a file of its own under schedule/.
#ifndef RINGATTN_COMMON_SCHEDULE_SCHEDULE_H_
#define RINGATTN_COMMON_SCHEDULE_SCHEDULE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/attention/attention_spec.h"
#include "common/layout/shard_plan.h"
#include "common/program/program.h"

namespace ringattn {

enum class ScheduleKind : uint8_t {
  kSingle = 0,     // one rank, nothing travels
  kRing = 1,       // K/V travels (schedule/ring_forward.h, ring_backward.h), over 1 rank or more
  kAllGather = 2,  // K/V is gathered first (schedule/all_gather.h), over 1 rank or more
  // Queries travel, K/V stays (schedule/resident_keys.h), over 1 rank or more.
  kPassQ = 3,
  kReplicatedQ = 4,
};
// Every kind, in the order of their numbers.
inline constexpr ScheduleKind kAllScheduleKinds[] = {ScheduleKind::kSingle, ScheduleKind::kRing,
                                                     ScheduleKind::kAllGather, ScheduleKind::kPassQ,
                                                     ScheduleKind::kReplicatedQ};
// Whether K/V stay where they are, and ranks compute on each other's queries.
inline bool KeepsKeysInPlace(ScheduleKind kind) {
  return kind == ScheduleKind::kPassQ || kind == ScheduleKind::kReplicatedQ;
}
// Whether ranks have a bias and a mask by their keys (AttentionSpec::pairs_by_keys): a position is
// then a row, which packed documents and levels of dilation have not, and a column a byte or more.
bool CutsPairsByKeys(ScheduleKind kind, const AttentionOptions& options);
// What of a request whose pairs are cut by keys cannot be: "mask of bits", ... Null: nothing.
const char* NotCutByKeys(const AttentionSpec& spec);
const char* ScheduleKindName(ScheduleKind kind);

struct Schedule {
  ScheduleKind kind = ScheduleKind::kSingle;
  Direction direction = Direction::kForward;
  // Backward without out and lse: a forward pass runs first in the same program.
  bool recompute_forward = false;
  // Blocks, of keys or of queries, go straight from their owner to the ranks that need them.
  bool direct = false;
  std::vector<Program> programs;  // one per rank
};

// Builds the programs of one request, each by itself: a rank's program costs about
// 1/world_size of all of them. Pure: every process that builds a rank's program from
// the same arguments gets the same value. Not thread safe.
class ScheduleBuilder {
 public:
  // Once it has said yes, what is built is worthless and ends early. Empty: never.
  using Cancelled = std::function<bool()>;

  // `spec` and `plan` outlive the builder. `cancelled` is asked, on the caller's thread,
  // before each pass over the pieces of two ranks' shards.
  // `keeps_inputs`: no input's buffer is written to, so that it can outlive the program or be
  // lent to it. Backward programs never do; a forward one takes one more K/V buffer for it.
  // `heads_per_step`: kAllGather gathers and computes K/V of so many kv heads at a time
  // (schedule/head_groups.h); 0: of all of them.
  // A dilated problem's program is of its parts (schedule/dilated.h), whatever the kind.
  // REQUIRES: kind kSingle only with a world_size of 1; recompute_forward only backward;
  // spec.pairs_by_keys as CutsPairsByKeys, but for one rank, where both are the same;
  // heads_per_step 0, or a divisor of num_kv_heads with kAllGather, no gradient of a bias that
  // heads share, and no dilation.
  ScheduleBuilder(const AttentionSpec& spec, const ShardPlan& plan, ScheduleKind kind,
                  Direction direction, bool recompute_forward, Cancelled cancelled = {},
                  bool keeps_inputs = false, int64_t heads_per_step = 0);
  ~ScheduleBuilder();
  ScheduleBuilder(const ScheduleBuilder&) = delete;
  ScheduleBuilder& operator=(const ScheduleBuilder&) = delete;

  Program MakeProgram(int rank);

  bool direct() const;     // Schedule::direct
  bool cancelled() const;  // it has said yes

 private:
  struct Shared;  // what the ranks have in common

  const AttentionSpec& spec_;
  const ShardPlan& plan_;
  const ScheduleKind kind_;
  const Direction direction_;
  const bool recompute_forward_;
  const bool keeps_inputs_;
  const int64_t heads_per_step_;  // 0: all at once
  std::unique_ptr<Shared> shared_;
};

// The program of one rank. REQUIRES: as ScheduleBuilder.
Program MakeProgram(const AttentionSpec& spec, const ShardPlan& plan, ScheduleKind kind,
                    Direction direction, bool recompute_forward, int rank,
                    bool keeps_inputs = false, int64_t heads_per_step = 0);

// The programs of all ranks.
Schedule MakeSchedule(const AttentionSpec& spec, const ShardPlan& plan, ScheduleKind kind,
                      Direction direction, bool recompute_forward, int64_t heads_per_step = 0);

// A table: buffers, then per rank and step the transfers with peers and bytes and
// the calls with tiles, then totals.
std::string ToString(const Schedule& schedule, const AttentionSpec& spec);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_SCHEDULE_H_
