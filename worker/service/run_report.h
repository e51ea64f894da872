// Converts the report of one rank's run to its proto.
#ifndef RINGATTN_WORKER_SERVICE_RUN_REPORT_H_
#define RINGATTN_WORKER_SERVICE_RUN_REPORT_H_

#include <string>

#include "ringattn/v1/attention.pb.h"
#include "worker/executor/executor.h"
#include "worker/operation/shard_operation.h"

namespace ringattn::worker {

// Times are relative to the moment at which the operation was reserved on this worker.
v1::RankReport MakeRankReport(ShardOperation& operation, const ExecutionReport& report,
                              const std::string& worker_name);

// Returns the floating-point operations of the rank's program: unmasked pairs, with a multiply-add
// counted as two.
double FlopsOf(const Operation& operation);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_RUN_REPORT_H_
