// What others learn of shard streams.
#ifndef RINGATTN_WORKER_OPERATION_SHARD_HOOKS_H_
#define RINGATTN_WORKER_OPERATION_SHARD_HOOKS_H_

#include <cstdint>
#include <functional>

#include "absl/time/time.h"
#include "worker/operation/shard_operation.h"

namespace ringattn::worker {

struct ShardServiceHooks {
  // All inputs of the operation have arrived. Called once per operation at most.
  std::function<void(const OperationInfo&)> on_uploaded;
  // Tensor bytes received and sent, for metrics.
  std::function<void(int64_t)> on_received_bytes;
  std::function<void(int64_t)> on_sent_bytes;
  // Outputs are on the host; what copying them from the device took. Once per exchange.
  std::function<void(absl::Duration)> on_downloaded;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_OPERATION_SHARD_HOOKS_H_
