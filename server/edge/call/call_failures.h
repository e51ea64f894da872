// The failures that the edge itself reports to clients: code, reason and message.
#ifndef RINGATTN_SERVER_EDGE_CALL_CALL_FAILURES_H_
#define RINGATTN_SERVER_EDGE_CALL_CALL_FAILURES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/base/limits.h"
#include "server/core/events/events.h"
#include "server/edge/access/stream_slots.h"

namespace ringattn::server {

// Returns RESOURCE_EXHAUSTED with RetryInfo. REQUIRES: full is not kNone.
Failure LimitReached(ExhaustedLimit full, const Limits& limits, absl::Duration retry_after);
// For the oldest stream without a header when there are too many of them.
Failure Evicted(const Limits& limits, absl::Duration retry_after);
// The core's event queue is full.
Failure CoreBusy(absl::Duration retry_after);
Failure ServerEnds(absl::Duration retry_after);
Failure TooManyCallsStreams(int64_t max_per_client, absl::Duration retry_after);
Failure HeaderMissing();
Failure HeaderLate(absl::Duration limit);
Failure HeaderTooLarge(int64_t bytes, int64_t limit);
Failure UploadTooSlow(const Limits& limits);
// The worker of an inline operation sent outputs that are not the request's.
Failure BadOutputs(const absl::Status& status);
Failure DeadlinePassed();
Failure CancelledByClient();

// For all writers of a request (writer_groups.h).
Failure WritersDiffer(int index);
// `why`: why the writer's stream ended.
Failure WriterLost(int index, const std::string& why);
Failure WriterReplaced(int index);
Failure WriterMissing(const std::vector<int>& indices, int count, absl::Duration limit);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_CALL_FAILURES_H_
