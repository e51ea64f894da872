// The tensors of an inline operation, which travel in Reserve and Finished instead of on a shard
// stream.
//
// Tests: inline_run_test.cc
#ifndef RINGATTN_WORKER_OPERATION_INLINE_RUN_H_
#define RINGATTN_WORKER_OPERATION_INLINE_RUN_H_

#include "absl/status/status.h"
#include "ringattn/v1/worker_control.pb.h"
#include "worker/operation/shard_operation.h"

namespace ringattn::worker {

// Copies the client's tensors to the operation's inputs. INVALID_ARGUMENT: the operation has more
// than one member, a tensor is not an input or has another size, or an input is missing.
absl::Status WriteInlineInputs(const v1::InlineRun& run, ShardOperation& operation);

// Appends the outputs in streaming order. The device copies them in microseconds. REQUIRES:
// finished.
absl::Status ReadInlineOutputs(const ShardOperation& operation,
                               google::protobuf::RepeatedPtrField<v1::TensorChunk>* outputs);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_OPERATION_INLINE_RUN_H_
