// ScheduleKind: the algorithms that spread attention over a ring, and the properties that callers
// ask of them.
#ifndef RINGATTN_COMMON_SCHEDULE_SCHEDULE_KIND_H_
#define RINGATTN_COMMON_SCHEDULE_SCHEDULE_KIND_H_

#include <cstdint>

#include "common/attention/attention_spec.h"
#include "common/attention/tensors.h"

namespace ringattn {

// schedule_table.h has the implementation of each kind.
enum class ScheduleKind : uint8_t {
  kSingle = 0,       // one rank, no exchange
  kRing = 1,         // K/V travels around the ring (ring.h)
  kAllGather = 2,    // every rank gathers K/V first (all_gather.h)
  kPassQ = 3,        // queries travel around the ring (resident_keys.h)
  kReplicatedQ = 4,  // every rank gathers queries first (resident_keys.h)
  // K/V travels around rings of group_size ranks, and from group to group once per round (ring.h)
  kDoubleRing = 5,
};
// Every kind, in the order of their numbers.
inline constexpr ScheduleKind kAllScheduleKinds[] = {ScheduleKind::kSingle, ScheduleKind::kRing,
                                                     ScheduleKind::kAllGather, ScheduleKind::kPassQ,
                                                     ScheduleKind::kReplicatedQ};

const char* ScheduleKindName(ScheduleKind kind);  // "single", "ring", ...

// Returns whether K/V stay in place and ranks compute on each other's queries.
inline bool KeepsKeysInPlace(ScheduleKind kind) {
  return kind == ScheduleKind::kPassQ || kind == ScheduleKind::kReplicatedQ;
}

// Returns the axis along which the schedule shards a bias, its gradient and a mask: kKv if queries
// travel, else kQ (ShardPlan::pair_axis).
Axis PairAxisOf(ScheduleKind kind, const AttentionOptions& options);

// Returns which bias or mask of the request cannot be sharded by keys, such as "mask of bits"; null
// if there is none. To shard by keys, a position must be a row, which excludes packed documents and
// dilated levels, and a column must have whole bytes.
const char* UnshardableByKeys(const AttentionSpec& spec);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_SCHEDULE_KIND_H_
