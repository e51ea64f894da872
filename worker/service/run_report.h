// The report of one rank's run, as the wire carries it.
#ifndef RINGATTN_WORKER_SERVICE_RUN_REPORT_H_
#define RINGATTN_WORKER_SERVICE_RUN_REPORT_H_

#include <string>

#include "ringattn/v1/attention.pb.h"
#include "worker/executor/executor.h"
#include "worker/operation/shard_operation.h"

namespace ringattn::worker {

// Times count from the moment at which the operation was reserved here.
v1::RankReport MakeRankReport(ShardOperation& operation, const ExecutionReport& report,
                              const std::string& worker_name);

// Floating-point operations of the rank's program: unmasked pairs, multiply-adds
// counted twice.
double FlopsOf(const Operation& operation);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_RUN_REPORT_H_
