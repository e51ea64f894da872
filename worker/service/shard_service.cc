#include "worker/service/shard_service.h"

#include <utility>

#include "worker/service/shard_exchange.h"

namespace ringattn::worker {

ShardServiceImpl::ShardServiceImpl(OperationRegistry* registry, std::string secret,
                                   ShardServiceHooks hooks)
    : registry_(registry), secret_(std::move(secret)), hooks_(std::move(hooks)) {}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ShardServiceImpl::Exchange(
    grpc::CallbackServerContext* context) {
  const auto [begin, end] = context->client_metadata().equal_range("ringattn-secret");
  const bool authentic = begin != end && std::next(begin) == end &&
                         SecretsEqual({begin->second.data(), begin->second.size()}, secret_);
  // Deletes itself when the call is done.
  auto* exchange = new ShardExchange(context, registry_, &hooks_);
  if (authentic) {
    exchange->Begin();
  } else {
    exchange->Reject({grpc::StatusCode::UNAUTHENTICATED, "the cluster's secret is needed"});
  }
  return exchange;
}

}  // namespace ringattn::worker
