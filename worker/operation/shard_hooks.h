// Callbacks that report the progress of shard streams.
#ifndef RINGATTN_WORKER_OPERATION_SHARD_HOOKS_H_
#define RINGATTN_WORKER_OPERATION_SHARD_HOOKS_H_

#include <cstdint>
#include <functional>

#include "absl/time/time.h"
#include "worker/operation/shard_operation.h"

namespace ringattn::worker {

struct ShardServiceHooks {
  // All inputs of the operation have arrived. Called at most once per operation.
  std::function<void(const OperationInfo&)> on_uploaded;
  // Tensor bytes received and sent, for metrics.
  std::function<void(int64_t)> on_received_bytes;
  std::function<void(int64_t)> on_sent_bytes;
  // Outputs have been copied to the host; the duration of that copy. Called once per exchange.
  std::function<void(absl::Duration)> on_downloaded;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_OPERATION_SHARD_HOOKS_H_
