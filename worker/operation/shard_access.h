// ShardAccess: who may open a shard stream, on which terms, and who learns how it does. The
// coordinator's streams (shard_service) show the cluster's secret; clients' own (worker/direct) a
// token.
#ifndef RINGATTN_WORKER_OPERATION_SHARD_ACCESS_H_
#define RINGATTN_WORKER_OPERATION_SHARD_ACCESS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ringattn/v1/shard.pb.h"
#include "worker/operation/shard_operation.h"

namespace ringattn::worker {

// An open stream's hold on its operation; destroyed when the stream is done, and then its listener
// hears nothing any more. Thread safe, but for the destructor.
class ShardLease {
 public:
  // Bytes of one output that this stream carries.
  struct Part {
    TensorId id;
    int64_t begin = 0;  // in the shard's tensor
    DeviceRange memory;
  };

  virtual ~ShardLease() = default;

  virtual const std::shared_ptr<ShardOperation>& operation() const = 0;
  // In the order in which they are sent.
  virtual std::vector<Part> Outputs() const = 0;

  // A chunk of an input is being taken, and has been, or was wrong.
  virtual void OnChunk() {}
  virtual void OnChunkTaken(int64_t bytes, const absl::Status& status) {}
  // No more comes on this stream. What is wrong with that, if anything.
  virtual absl::Status OnInputsEnd() = 0;
  // A message has been given to the transport, and the transport has taken so many bytes of it.
  virtual void OnSend() {}
  virtual void OnSent(int64_t bytes) {}
  // Everything has been taken, ShardDone included.
  virtual void OnDone() {}
};

// Thread safe.
class ShardAccess {
 public:
  virtual ~ShardAccess() = default;

  // The stream that asks so may go on, in messages as large as it says: `listener` hears of its
  // operation from here on, on any thread and before this returns, until the lease is gone.
  // Nothing for a call without an OpenShard that can be read.
  virtual absl::StatusOr<std::unique_ptr<ShardLease>> Open(const std::optional<v1::OpenShard>& open,
                                                           OperationListener* listener) = 0;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_OPERATION_SHARD_ACCESS_H_
