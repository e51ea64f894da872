// The planner: chooses layout, schedule and ring size of one request by a cost model, or checks
// those that the client sets. Pure.
// Tests: planner_test.cc, double_ring_plan_test.cc
#ifndef RINGATTN_COMMON_PLAN_PLANNER_H_
#define RINGATTN_COMMON_PLAN_PLANNER_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/attention/attention_spec.h"
#include "common/attention/tuning.h"
#include "common/layout/shard_plan.h"
#include "common/plan/host_figures.h"
#include "common/schedule/schedule.h"

namespace ringattn {

// The client's choices. The planner chooses unset fields.
struct PlanChoice {
  std::optional<Layout> layout;
  std::optional<ScheduleKind> schedule;
  std::optional<int> world_size;  // 1..Limits::max_world_size
  // The following fields go into the recipe as they are (ProgramRecipe).
  int64_t stripe = 1;          // >= 1; ignored unless the layout is kStriped
  int64_t heads_per_step = 0;  // ignored unless the schedule is kAllGather
  // Ranks per group; 0: the members of one host. Ignored unless the schedule is kDoubleRing.
  int64_t group_size = 0;
  bool recompute_forward = false;
  bool keeps_inputs = false;
  Tuning tuning;
  // Workers by name, as many as world_size; empty: the coordinator chooses.
  std::vector<std::string> members;
  // The coordinator's: rings of fewer workers lack the memory. Ignored with world_size.
  int min_world_size = 0;

  bool operator==(const PlanChoice&) const = default;
};

// Maximum number of stripes longer than one token, per axis. Each is a span of 24 bytes on the q
// and the k/v axis: 3 MiB. A queued request holds its plan, and may hold the same amount of
// cu_seqlens (Limits::max_documents).
inline constexpr int64_t kMaxStripes = int64_t{1} << 16;
// Maximum number of piece visits. The planner visits the pieces of all shards (spans, divided at
// documents) for every rank, at about 100 ns each: 0.5 s. Other layouts stay below 2^19 pieces.
inline constexpr int64_t kMaxPieceVisits = int64_t{1} << 22;

// A larger bias or mask uses the whole ring, for any number of tokens.
inline constexpr int64_t kSingleDevicePairBytes = int64_t{1} << 30;

struct PlannerInputs {
  int ready_workers = 0;
  int64_t single_device_threshold_tokens = 32768;
  // The slowest member's figures. The defaults have the order of magnitude of one CPU core; workers
  // measure theirs when they start and when they form a ring.
  double device_flops_per_s = 3e10;
  double link_bytes_per_s = 1e9;
  double step_overhead_s = 1e-4;   // per compute call, in addition to its arithmetic
  double exchange_overhead_s = 0;  // per step with transfers, in addition to their bytes

  // The hosts of the workers, in ring order; empty: all workers are on one host.
  std::vector<HostFigures> hosts;
  // One rank's rate to another host, per direction. The default is that of
  // Limits::default_host_link_bytes_per_second.
  double host_link_bytes_per_s = 1.25e9;
  // The rate out of a host and into it, per direction, that all its ranks share. A value below
  // host_link_bytes_per_s, such as 0 (not measured), does not count.
  double host_total_bytes_per_s = 0;
  double host_exchange_overhead_s = 1e-4;  // per step with transfers between hosts
  bool host_link_measured = false;
  // The host of each of PlanChoice::members; empty: no members are named, or all are on one host.
  std::vector<int> host_of_member;

  // Returns the rate that the ranks of a host share.
  double HostBytesPerSecond() const {
    return std::max(host_link_bytes_per_s, host_total_bytes_per_s);
  }

  bool operator==(const PlannerInputs&) const = default;
};

// Cancels planning.
struct PlanControl {
  // Polled on the planning thread before each pass over the pieces of two ranks' shards. A pass has
  // at most 2^20 pieces and takes tens of milliseconds. After it returns true, planning ends and it
  // is not polled again. Empty: never.
  std::function<bool()> cancelled;

  bool IsCancelled() const { return cancelled && cancelled(); }
};

struct Plan {
  ProgramRecipe recipe;
  ShardPlan shards;  // of the recipe's layout and stripe, on world_size ranks
  // By rank.
  std::vector<int64_t> buffer_bytes;  // memory to reserve
  // Additional memory for kernels. Workers report it; empty until then.
  std::vector<int64_t> workspace_bytes;
  std::vector<int64_t> tiles;  // kTileRows^2, per batch row and query head
  std::vector<int64_t> sent_bytes;
  int64_t exchanged_bytes = 0;  // sum of sent_bytes
  int64_t spans = 0;            // of all shards on both axes; set when the spans are dropped
  int64_t step_count = 0;
  // From the first rank's start to the last rank's end (cost_model.h).
  double predicted_compute_seconds = 0;
  double predicted_step_seconds = 0;  // the longest step
  // The time of the busiest rank's steps if it never waits for other ranks. Used to compare
  // schedules whose ranks wait for each other differently.
  double busiest_rank_seconds = 0;
  double flops = 0;  // of unmasked pairs, multiply-adds counted twice
  // The planner chose a ring of some hosts, and there are larger ones.
  bool may_grow = false;
  std::string reason;  // why the planner chose this plan, in one sentence
};

// Plans a request. Errors, with the field's name in the message:
//   UNAVAILABLE          no worker is ready
//   FAILED_PRECONDITION  world_size exceeds the number of ready workers; schedule "double_ring"
//                        without group_size over hosts with different numbers of members
//   INVALID_ARGUMENT     schedule "single" with a world_size above 1; a stripe that
//                        divides shards into too many pieces (above); a group_size that does not
//                        divide the ring size
//   CANCELLED            control.cancelled returned true
// Layout and ring size of a deterministic request do not depend on the rates in `inputs`, because
// measured rates vary. With several hosts, it gets the workers of one.
//
// With several hosts, a request that needs more than one device gets the workers of as many hosts
// as the cost model predicts to pay off. A ring over hosts with equally many members is a double
// ring if that is predicted to be faster and the request is not deterministic.
absl::StatusOr<Plan> PlanRequest(const AttentionSpec& spec, Direction direction,
                                 const PlanChoice& choice, const PlannerInputs& inputs,
                                 const PlanControl& control = {});

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PLAN_PLANNER_H_
