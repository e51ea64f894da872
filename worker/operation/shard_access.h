// ShardAccess: admission to shard streams. The coordinator's streams (shard_service) present the
// cluster secret; clients' direct streams (worker/direct) present a token.
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

// An admitted stream's reference to its operation. After its destruction the stream's listener is
// not called again. Thread safe, except for the destructor.
class ShardLease {
 public:
  // The bytes of one output that this stream carries.
  struct OutputRange {
    TensorId id;
    int64_t begin = 0;  // offset in the shard's tensor
    DeviceRange memory;
  };

  virtual ~ShardLease() = default;

  virtual const std::shared_ptr<ShardOperation>& operation() const = 0;
  // Returns the outputs in the order in which they are sent.
  virtual std::vector<OutputRange> Outputs() const = 0;

  // OnChunk: a chunk of an input has been received. OnChunkTaken: it has been copied, or rejected
  // with `status`.
  virtual void OnChunk() {}
  virtual void OnChunkTaken(int64_t bytes, const absl::Status& status) {}
  // The peer has half-closed the stream. Returns an error if inputs are still missing.
  virtual absl::Status OnInputsEnd() = 0;
  // OnSend: a message has been passed to gRPC. OnSent: gRPC has sent `bytes` tensor bytes of it.
  virtual void OnSend() {}
  virtual void OnSent(int64_t bytes) {}
  // gRPC has sent every message, ShardDone included.
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
