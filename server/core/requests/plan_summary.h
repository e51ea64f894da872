// A plan without the places of its tokens: what is kept and told of it. The places follow
// from layout, ring size and stripe, and their list is by far the largest part: 3 MiB of a
// plan that has 2 KiB otherwise.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_PLAN_SUMMARY_H_
#define RINGATTN_SERVER_CORE_REQUESTS_PLAN_SUMMARY_H_

#include <cstdint>

#include "common/plan/planner.h"

namespace ringattn::server {

// Every shard becomes one span of as many rows (none if it has none); Plan::spans says how many
// there were.
Plan WithoutSpans(Plan plan);
// As it was before WithoutSpans. REQUIRES: it is of this spec.
Plan WithSpans(Plan plan, const AttentionSpec& spec);

// Memory that it takes.
int64_t BytesOf(const Plan& plan);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_PLAN_SUMMARY_H_
