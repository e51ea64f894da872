// One report of several requests that make up a call.
#ifndef RINGATTN_CLIENT_MERGED_REPORT_H_
#define RINGATTN_CLIENT_MERGED_REPORT_H_

#include <string>
#include <vector>

#include "client/api/call.h"

namespace ringattn::client {

// What the call was as a whole; the parts' own reports stay in `parts`. Requests
// overlap, so:
//   times             as ClientTimes says
//   accepted.plan     schedule, layout, world_size and stripe where all parts agree, else
//                     unset; members of all; seconds and bytes summed; ranks summed by rank
//   accepted          generation: the newest; inputs and outputs: none
//   summary.stages    each from its first begin in any part to its last end: their sum is
//                     more than the call took. Begins are counted from when the client
//                     saw Accepted, so they are a round trip late at most
//   summary.compute_seconds  likewise
//   summary.ranks     by worker, in order of appearance: everything summed; times of the
//                     timeline since the first part was accepted
//   summary.attempts  1 + the replays of all parts; flops and bytes: summed
// REQUIRES: at least one part, each of a request that succeeded.
CallReport MergeReports(const std::string& request_id, std::vector<CallReport> parts);

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_MERGED_REPORT_H_
