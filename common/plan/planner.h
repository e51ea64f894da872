// The planner: picks layout, schedule and ring size of one request by a cost model,
// or checks the ones that the client forces. Pure.
#ifndef RINGATTN_COMMON_PLAN_PLANNER_H_
#define RINGATTN_COMMON_PLAN_PLANNER_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/attention/attention_spec.h"
#include "common/attention/tuning.h"
#include "common/layout/shard_plan.h"
#include "common/schedule/schedule.h"

namespace ringattn {

// What the client asked for; unset fields are the planner's to choose.
struct PlanChoice {
  std::optional<Layout> layout;
  std::optional<ScheduleKind> schedule;
  std::optional<int> world_size;  // 1..Limits::max_world_size
  int64_t stripe = 1;             // striped only; >= 1
  // kAllGather only: K/V of so many kv heads at a time, a divisor of theirs; 0: of all.
  int64_t heads_per_step = 0;
  // Backward without out and lse: the program computes them first.
  bool recompute_forward = false;
  // The forward's inputs stay, for a backward later (ScheduleBuilder).
  bool keeps_inputs = false;
  Tuning tuning;  // of the kernels; no plan depends on it
  std::vector<std::string>
      members;  // by name, as many as world_size; empty: the coordinator's choice

  bool operator==(const PlanChoice&) const = default;
};

// Stripes longer than one token, per axis. Each is a span of 24 bytes on the q and the
// k/v axis: 3 MiB, and a queued request, which holds its plan, may have as much again of
// cu_seqlens (Limits::max_documents).
inline constexpr int64_t kMaxStripes = int64_t{1} << 16;
// Every rank is planned against the pieces of all shards (spans, cut at documents), at
// some 100 ns each: 0.5 s. Other layouts stay below 2^19 pieces.
inline constexpr int64_t kMaxPieceVisits = int64_t{1} << 22;

// A bias or a mask of more is spread over the ring, whatever the number of tokens.
inline constexpr int64_t kSingleDevicePairBytes = int64_t{1} << 30;

struct PlannerInputs {
  int ready_workers = 0;
  int64_t single_device_threshold_tokens = 32768;
  // The slowest member's figures. The defaults are one CPU core's order of magnitude;
  // workers measure theirs when they start and when they form a ring.
  double device_flops_per_s = 3e10;
  double link_bytes_per_s = 1e9;
  double step_overhead_s = 1e-4;   // of each compute call, beside its arithmetic
  double exchange_overhead_s = 0;  // of a step's transfers, beside their bytes

  bool operator==(const PlannerInputs&) const = default;
};

// How planning is ended early.
struct PlanControl {
  // Asked on the planning thread before each pass over the pieces of two ranks' shards, of
  // which there are 2^20 at most: tens of milliseconds. Once it says yes, planning ends and
  // it is not asked again. Empty: never.
  std::function<bool()> cancelled;

  bool IsCancelled() const { return cancelled && cancelled(); }
};

struct Plan {
  ShardPlan shards;  // layout, world size, stripe, spans
  ScheduleKind schedule = ScheduleKind::kSingle;
  int64_t heads_per_step = 0;  // of ScheduleBuilder: 0 unless K/V of some heads are gathered
  // Per rank, as the schedule has them.
  std::vector<int64_t> buffer_bytes;  // memory to reserve
  // What workers' kernels need beside it: theirs to say, so empty until they have.
  std::vector<int64_t> workspace_bytes;
  std::vector<int64_t> tiles;  // kTileRows^2, per batch row and query head
  std::vector<int64_t> sent_bytes;
  int64_t exchanged_bytes = 0;  // between ranks, all of them together
  int64_t spans = 0;            // of the shards, on both axes and all ranks, where they are cut off
  int64_t step_count = 0;
  // From the first rank's start to the last one's end: per step the busiest rank,
  // where compute and exchange overlap.
  double predicted_compute_seconds = 0;
  double predicted_step_seconds = 0;  // the longest step
  // Of the busiest rank, its steps one after another, as if it never waited for others. Where
  // ranks have much to do at different steps, the sum of the busiest ones says too much; this
  // compares schedules.
  double busiest_rank_seconds = 0;
  double flops = 0;    // of unmasked pairs, multiply-adds counted twice
  std::string reason;  // one sentence: why this plan
};

//   UNAVAILABLE          no worker is ready
//   FAILED_PRECONDITION  world_size exceeds the workers that are ready
//   INVALID_ARGUMENT     schedule "single" with a world_size above 1; a stripe that
//                        cuts shards into too many pieces (above)
//   CANCELLED            control.cancelled said so
// The message names the field.
// A deterministic request's layout and ring size do not depend on the rates in `inputs`, which
// differ from one measurement to the next.
absl::StatusOr<Plan> PlanRequest(const AttentionSpec& spec, Direction direction,
                                 const PlanChoice& choice, const PlannerInputs& inputs,
                                 const PlanControl& control = {});

// Floating point operations of `pairs` visible pairs per batch row and head.
double FlopsOfPairs(const AttentionSpec& spec, Direction direction, bool recompute_forward,
                    double pairs);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_PLANNER_H_
