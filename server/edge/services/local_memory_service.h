// LocalMemoryServiceImpl: the public LocalMemoryService, which announces clients' regions to the
// workers.
#ifndef RINGATTN_SERVER_EDGE_SERVICES_LOCAL_MEMORY_SERVICE_H_
#define RINGATTN_SERVER_EDGE_SERVICES_LOCAL_MEMORY_SERVICE_H_

#include <cstdint>
#include <map>

#include <grpcpp/grpcpp.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/base/limits.h"
#include "ringattn/v1/local_memory.grpc.pb.h"
#include "server/edge/access/callers.h"
#include "server/edge/loop/core_loop.h"

namespace ringattn::server {

// Thread safe.
class LocalMemoryServiceImpl final
    : public v1::LocalMemoryService::WithCallbackMethod_Attach<v1::LocalMemoryService::Service> {
 public:
  // All pointers must outlive the server's calls.
  LocalMemoryServiceImpl(const Limits& limits, absl::Duration retry_after, CoreLoop* core,
                         Callers* callers);

  grpc::ServerUnaryReactor* Attach(grpc::CallbackServerContext* call,
                                   const v1::AttachRequest* request,
                                   v1::AttachResponse* response) override;

  // Called from the core's thread.
  void Complete(const AttachCompleted& completed);

 private:
  struct Pending {
    grpc::ServerUnaryReactor* reactor = nullptr;
    v1::AttachResponse* response = nullptr;
  };

  const Limits limits_;
  const absl::Duration retry_after_;
  CoreLoop* const core_;
  Callers* const callers_;
  absl::Mutex mutex_;
  uint64_t last_call_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, Pending> pending_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_SERVICES_LOCAL_MEMORY_SERVICE_H_
