// KvCacheServiceImpl: the public KvCacheService.
#ifndef RINGATTN_SERVER_EDGE_SERVICES_KV_CACHE_SERVICE_H_
#define RINGATTN_SERVER_EDGE_SERVICES_KV_CACHE_SERVICE_H_

#include <cstdint>
#include <map>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ringattn/v1/kv_cache.grpc.pb.h"
#include "server/edge/kv/kv_context.h"

namespace ringattn::server {

using KvCacheServiceBase = v1::KvCacheService::WithCallbackMethod_CreateCache<
    v1::KvCacheService::WithCallbackMethod_OpenCache<
        v1::KvCacheService::WithCallbackMethod_GetCache<
            v1::KvCacheService::WithCallbackMethod_ListCaches<
                v1::KvCacheService::WithCallbackMethod_DeleteCache<
                    v1::KvCacheService::WithCallbackMethod_HoldCaches<
                        v1::KvCacheService::WithCallbackMethod_Steps<
                            v1::KvCacheService::Service>>>>>>>;

// Thread safe.
class KvCacheServiceImpl final : public KvCacheServiceBase {
 public:
  explicit KvCacheServiceImpl(const KvContext* context) : context_(context) {}

  grpc::ServerUnaryReactor* CreateCache(grpc::CallbackServerContext* call,
                                        const v1::CreateCacheRequest* request,
                                        v1::CreateCacheResponse* response) override;
  grpc::ServerUnaryReactor* OpenCache(grpc::CallbackServerContext* call,
                                      const v1::OpenCacheRequest* request,
                                      v1::OpenCacheResponse* response) override;
  grpc::ServerUnaryReactor* GetCache(grpc::CallbackServerContext* call,
                                     const v1::GetCacheRequest* request,
                                     v1::KvCacheInfo* response) override;
  grpc::ServerUnaryReactor* ListCaches(grpc::CallbackServerContext* call,
                                       const v1::ListCachesRequest* request,
                                       v1::ListCachesResponse* response) override;
  grpc::ServerUnaryReactor* DeleteCache(grpc::CallbackServerContext* call,
                                        const v1::DeleteCacheRequest* request,
                                        v1::DeleteCacheResponse* response) override;
  grpc::ServerBidiReactor<v1::HoldCachesRequest, v1::HoldCachesResponse>* HoldCaches(
      grpc::CallbackServerContext* call) override;
  grpc::ServerBidiReactor<v1::StepRequest, v1::StepResponse>* Steps(
      grpc::CallbackServerContext* call) override;

  // The core's answers to CreateCache and OpenCache.
  void Answer(const KvCacheAnswered& answer) ABSL_LOCKS_EXCLUDED(mutex_);
  void Answer(const KvWriterAnswered& answer) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  template <typename Response>
  struct Pending {
    grpc::ServerUnaryReactor* reactor = nullptr;
    Response* response = nullptr;
    Caller caller;
    absl::Time since;
  };
  template <typename Response>
  using Calls = std::map<uint64_t, Pending<Response>>;

  // Passes an event to the core and remembers the call until the core answers it.
  template <typename Event, typename Answered, typename Response>
  void Submit(Event event, const Caller& caller, grpc::ServerUnaryReactor* reactor,
              Response* response, Calls<Response>* calls) ABSL_LOCKS_EXCLUDED(mutex_);
  template <typename Answered, typename Response>
  void Complete(const Answered& answer, const char* method, Calls<Response>* calls)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Finishes the call with the failure, and writes its audit line.
  void Refuse(const Failure& failure, const char* method, const Caller& caller,
              grpc::ServerUnaryReactor* reactor) const;
  void Audit(const char* method, const Caller& caller, const grpc::Status& status,
             absl::Duration time, int64_t bytes_per_worker = 0,
             const v1::KvPlacement& placement = {}) const;

  const KvContext* const context_;
  absl::Mutex mutex_;
  uint64_t last_call_ ABSL_GUARDED_BY(mutex_) = 0;
  // Guarded by mutex_, which the templates above cannot state.
  Calls<v1::CreateCacheResponse> creating_;
  Calls<v1::OpenCacheResponse> opening_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_SERVICES_KV_CACHE_SERVICE_H_
