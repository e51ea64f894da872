#include "worker/service/shard_service.h"

#include <utility>

#include "common/security/secret.h"
#include "worker/service/shard_exchange.h"

namespace ringattn::worker {

ShardServiceImpl::ShardServiceImpl(OperationRegistry* registry, std::string secret,
                                   ShardServiceHooks hooks)
    : registry_(registry), secret_(std::move(secret)), hooks_(std::move(hooks)) {}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ShardServiceImpl::Exchange(
    grpc::CallbackServerContext* context) {
  // Deletes itself when the call is done.
  auto* exchange = new ShardExchange(context, registry_, &hooks_);
  if (grpc::Status status = CheckSecret(*context, secret_); status.ok()) {
    exchange->Begin();
  } else {
    exchange->Reject(std::move(status));
  }
  return exchange;
}

}  // namespace ringattn::worker
