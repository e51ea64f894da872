// ShardService: transfers tensor bytes between the coordinator and this worker. Incoming chunks are
// parsed without protobuf and copied once. Outgoing chunks are sent from the operation's own
// buffers.
#ifndef RINGATTN_WORKER_SERVICE_SHARD_SERVICE_H_
#define RINGATTN_WORKER_SERVICE_SHARD_SERVICE_H_

#include <memory>
#include <optional>
#include <string>

#include <grpcpp/grpcpp.h>

#include "ringattn/v1/shard.grpc.pb.h"
#include "worker/operation/operation_registry.h"
#include "worker/operation/shard_access.h"
#include "worker/operation/shard_hooks.h"

namespace ringattn::worker {

// Thread safe.
class ShardServiceImpl
    : public v1::ShardService::WithRawCallbackMethod_Exchange<v1::ShardService::Service>,
      private ShardAccess {
 public:
  // `registry` must outlive the server that serves this.
  ShardServiceImpl(OperationRegistry* registry, std::string secret, ShardServiceHooks hooks);

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Exchange(
      grpc::CallbackServerContext* context) override;

 private:
  absl::StatusOr<std::unique_ptr<ShardLease>> Open(const std::optional<v1::OpenShard>& open,
                                                   OperationListener* listener) override;

  OperationRegistry* const registry_;
  const std::string secret_;
  const ShardServiceHooks hooks_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_SHARD_SERVICE_H_
