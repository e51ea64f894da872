// KvShardService: the steps of writers. One class serves both listeners of a worker: the data
// address, for the coordinator's relay, and the client data address, for clients' direct streams.
#ifndef RINGATTN_WORKER_KV_STEP_STREAMS_H_
#define RINGATTN_WORKER_KV_STEP_STREAMS_H_

#include <cstdint>
#include <functional>
#include <string>

#include <grpcpp/grpcpp.h>

#include "absl/time/time.h"
#include "ringattn/v1/kv_cache.grpc.pb.h"
#include "worker/kv/kv_store.h"

namespace ringattn::worker {

// For metrics. Called on any thread; must not block.
struct StepHooks {
  std::function<void()> on_step = [] {};                                // a step was begun
  std::function<void(absl::Duration)> on_call = [](absl::Duration) {};  // a layer call's time
  // A step or a stream was refused; the reason as in ErrorInfo or RowRefusal.
  std::function<void(const std::string& reason)> on_refused = [](const std::string&) {};
  std::function<void(int64_t)> on_received_bytes = [](int64_t) {};
  std::function<void(int64_t)> on_sent_bytes = [](int64_t) {};
};

// Thread safe. `store` must outlive the server that serves this.
class KvShardServiceImpl
    : public v1::KvShardService::WithCallbackMethod_Steps<v1::KvShardService::Service> {
 public:
  // With `secret`, calls must carry it, and StepHello needs no token: the coordinator's. Without,
  // StepHello must carry the cache's token.
  KvShardServiceImpl(KvStore* store, std::string secret, StepHooks hooks);

  grpc::ServerBidiReactor<v1::StepRequest, v1::StepResponse>* Steps(
      grpc::CallbackServerContext* context) override;

 private:
  KvStore* const store_;
  const std::string secret_;
  const StepHooks hooks_;
};

// `status` with ErrorInfo in its details. "BAD_CALL", "KV_FENCED", ...: KvErrorReason; OVER_LIMIT
// and INVALID_REQUEST where there is none.
grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KV_STEP_STREAMS_H_
