// KvShardService: the steps of writers. One class serves both listeners of a worker: the data
// address, for the coordinator's relay, and the client data address, for clients' direct streams.
#ifndef RINGATTN_WORKER_KV_STEP_STREAMS_H_
#define RINGATTN_WORKER_KV_STEP_STREAMS_H_

#include <string>

#include <grpcpp/grpcpp.h>

#include "absl/status/status.h"
#include "ringattn/v1/kv_cache.grpc.pb.h"
#include "worker/kv/kv_store.h"
#include "worker/kv/step_rings.h"
#include "worker/kv/step_session.h"

namespace ringattn::worker {

// Thread safe. `store` must outlive the server that serves this.
class KvShardServiceImpl
    : public v1::KvShardService::WithCallbackMethod_Steps<v1::KvShardService::Service> {
 public:
  // With `secret`, calls must carry it, and StepHello needs no token: the coordinator's. Without,
  // StepHello must carry the cache's token, and the call's metadata must carry the StepHello
  // (step_metadata.h). Calls that do not are rejected before a message is read. `rings`: where
  // StepHello.ring may be.
  KvShardServiceImpl(KvStore* store, std::string secret, StepHooks hooks,
                     StepRingOptions rings = {});

  grpc::ServerBidiReactor<v1::StepRequest, v1::StepResponse>* Steps(
      grpc::CallbackServerContext* context) override;

 private:
  KvStore* const store_;
  const std::string secret_;
  const StepHooks hooks_;
  StepRings rings_;  // last: its threads use the rest
};

// `status` with its StepErrorReason as ErrorInfo in the details.
grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KV_STEP_STREAMS_H_
