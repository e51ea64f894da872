// KvServiceCalls: the unary calls of KvCacheService.
#ifndef RINGATTN_CLIENT_KV_KV_SERVICE_H_
#define RINGATTN_CLIENT_KV_KV_SERVICE_H_

#include <memory>
#include <string>

#include <grpcpp/channel.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/security/bearer_token.h"
#include "ringattn/v1/kv_cache.grpc.pb.h"

namespace ringattn::client {

// Thread safe. Every call blocks, at most until its deadline. A call that cannot connect is
// repeated for `connect_time`; all of them may be sent twice. Errors: the service's, with details.
class KvServiceCalls {
 public:
  // `token` may be null.
  KvServiceCalls(std::shared_ptr<grpc::Channel> channel, std::shared_ptr<BearerToken> token,
                 absl::Duration connect_time);

  absl::StatusOr<v1::CreateCacheResponse> Create(const v1::CreateCacheRequest& request,
                                                 absl::Duration deadline) const;
  absl::StatusOr<v1::OpenCacheResponse> Open(const v1::OpenCacheRequest& request,
                                             absl::Duration deadline) const;
  absl::StatusOr<v1::KvCacheInfo> Get(const std::string& cache_id, absl::Duration deadline) const;
  // As Get, without repetition.
  absl::StatusOr<v1::KvCacheInfo> GetOnce(const std::string& cache_id,
                                          absl::Duration deadline) const;
  absl::StatusOr<v1::ListCachesResponse> List(const v1::ListCachesRequest& request,
                                              absl::Duration deadline) const;
  absl::Status Delete(const std::string& cache_id, absl::Duration deadline) const;

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  const std::shared_ptr<BearerToken>& token() const { return token_; }

 private:
  template <typename Response, typename Call>
  absl::StatusOr<Response> Unary(absl::Duration deadline, const Call& call) const;
  template <typename Response, typename Call>
  absl::StatusOr<Response> Once(absl::Duration deadline, const Call& call) const;

  const std::shared_ptr<grpc::Channel> channel_;
  const std::shared_ptr<BearerToken> token_;
  const absl::Duration connect_time_;
  const std::unique_ptr<v1::KvCacheService::Stub> stub_;
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_KV_KV_SERVICE_H_
