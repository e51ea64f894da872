#include "client/kv/kv_service.h"

#include <algorithm>
#include <utility>

#include <grpcpp/client_context.h>

#include "absl/time/clock.h"
#include "client/api/error.h"
#include "client/kv/grpc_deadline.h"
#include "client/transfer/grpc_status.h"
#include "common/base/monotonic_time.h"

namespace ringattn::client {
namespace {

constexpr absl::Duration kConnectBackoff = absl::Milliseconds(100);

}  // namespace

KvServiceCalls::KvServiceCalls(std::shared_ptr<grpc::Channel> channel,
                               std::shared_ptr<BearerToken> token, absl::Duration connect_time)
    : channel_(std::move(channel)),
      token_(std::move(token)),
      connect_time_(connect_time),
      stub_(v1::KvCacheService::NewStub(channel_)) {}

template <typename Response, typename Call>
absl::StatusOr<Response> KvServiceCalls::Unary(absl::Duration deadline, const Call& call) const {
  const absl::Time begun = MonotonicNow();
  while (true) {
    auto response = Once<Response>(deadline - (MonotonicNow() - begun), call);
    // A reason comes from the server, or reports a failed TLS handshake.
    const bool unconnected =
        absl::IsUnavailable(response.status()) && DetailsOf(response.status()).reason.empty();
    if (!unconnected ||
        MonotonicNow() + kConnectBackoff - begun > std::min(connect_time_, deadline)) {
      return response;
    }
    absl::SleepFor(kConnectBackoff);
  }
}

template <typename Response, typename Call>
absl::StatusOr<Response> KvServiceCalls::Once(absl::Duration deadline, const Call& call) const {
  grpc::ClientContext context;
  if (deadline != absl::InfiniteDuration()) {
    context.set_deadline(GrpcDeadlineIn(deadline));
  }
  if (token_ != nullptr) token_->AddTo(&context);
  Response response;
  const grpc::Status status = call(&context, &response);
  if (!status.ok()) return FromGrpcStatus(status);
  return response;
}

absl::StatusOr<v1::CreateCacheResponse> KvServiceCalls::Create(
    const v1::CreateCacheRequest& request, absl::Duration deadline) const {
  return Unary<v1::CreateCacheResponse>(deadline, [&](auto* context, auto* response) {
    return stub_->CreateCache(context, request, response);
  });
}

absl::StatusOr<v1::OpenCacheResponse> KvServiceCalls::Open(const v1::OpenCacheRequest& request,
                                                           absl::Duration deadline) const {
  return Unary<v1::OpenCacheResponse>(deadline, [&](auto* context, auto* response) {
    return stub_->OpenCache(context, request, response);
  });
}

absl::StatusOr<v1::KvCacheInfo> KvServiceCalls::Get(const std::string& cache_id,
                                                    absl::Duration deadline) const {
  v1::GetCacheRequest request;
  request.set_cache_id(cache_id);
  return Unary<v1::KvCacheInfo>(deadline, [&](auto* context, auto* response) {
    return stub_->GetCache(context, request, response);
  });
}

absl::StatusOr<v1::KvCacheInfo> KvServiceCalls::GetOnce(const std::string& cache_id,
                                                        absl::Duration deadline) const {
  v1::GetCacheRequest request;
  request.set_cache_id(cache_id);
  return Once<v1::KvCacheInfo>(deadline, [&](auto* context, auto* response) {
    return stub_->GetCache(context, request, response);
  });
}

absl::StatusOr<v1::ListCachesResponse> KvServiceCalls::List(const v1::ListCachesRequest& request,
                                                            absl::Duration deadline) const {
  return Unary<v1::ListCachesResponse>(deadline, [&](auto* context, auto* response) {
    return stub_->ListCaches(context, request, response);
  });
}

absl::Status KvServiceCalls::Delete(const std::string& cache_id, absl::Duration deadline) const {
  v1::DeleteCacheRequest request;
  request.set_cache_id(cache_id);
  return Unary<v1::DeleteCacheResponse>(deadline,
                                        [&](auto* context, auto* response) {
                                          return stub_->DeleteCache(context, request, response);
                                        })
      .status();
}

}  // namespace ringattn::client
