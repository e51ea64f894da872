// Plans without their spans, as the coordinator keeps and reports them. Spans follow from layout,
// ring size and stripe, and they dominate a plan's size: 3 MiB compared with 2 KiB for the rest.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_PLAN_SUMMARY_H_
#define RINGATTN_SERVER_CORE_REQUESTS_PLAN_SUMMARY_H_

#include <cstdint>

#include "common/plan/planner.h"

namespace ringattn::server {

// Replaces every shard by one span of as many rows (no span for an empty shard) and stores the
// number of spans in Plan::spans.
Plan WithoutSpans(Plan plan);
// Returns the shards with all their spans. REQUIRES: the plan was made for this spec.
ShardPlan ShardsOf(const Plan& plan, const AttentionSpec& spec);

// Returns the largest buffers of any member. Members are chosen before ranks, so each must have
// room for them.
int64_t LargestBuffers(const Plan& plan);

// Returns the memory that the plan occupies.
int64_t BytesOf(const Plan& plan);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_PLAN_SUMMARY_H_
