// ShardService: tensor bytes between the coordinator and this worker. Chunks are
// parsed by hand and copied once on the way in, and sent from the operation's own
// buffers on the way out.
#ifndef RINGATTN_WORKER_SERVICE_SHARD_SERVICE_H_
#define RINGATTN_WORKER_SERVICE_SHARD_SERVICE_H_

#include <functional>
#include <string>

#include <grpcpp/grpcpp.h>

#include "absl/time/time.h"
#include "ringattn/v1/shard.grpc.pb.h"
#include "worker/service/operation_registry.h"

namespace ringattn::worker {

struct ShardServiceHooks {
  // All inputs of the operation have arrived. Called once per operation at most.
  std::function<void(const OperationInfo&)> on_uploaded;
  // Tensor bytes received from and sent to the coordinator, for metrics.
  std::function<void(int64_t)> on_received_bytes;
  std::function<void(int64_t)> on_sent_bytes;
  // Outputs are on the host; what copying them from the device took. Once per exchange.
  std::function<void(absl::Duration)> on_downloaded;
};

// Thread safe.
class ShardServiceImpl
    : public v1::ShardService::WithRawCallbackMethod_Exchange<v1::ShardService::Service> {
 public:
  // `registry` outlives the server that serves this.
  ShardServiceImpl(OperationRegistry* registry, std::string secret, ShardServiceHooks hooks);

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Exchange(
      grpc::CallbackServerContext* context) override;

 private:
  OperationRegistry* const registry_;
  const std::string secret_;
  const ShardServiceHooks hooks_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_SERVICE_SHARD_SERVICE_H_
