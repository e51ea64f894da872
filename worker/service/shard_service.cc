#include "worker/service/shard_service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/limits.h"
#include "common/security/secret.h"
#include "common/wire/open_metadata.h"
#include "worker/operation/shard_exchange.h"

namespace ringattn::worker {
namespace {

// The lease of the coordinator's stream, which carries the whole shard.
class WholeLease final : public ShardLease {
 public:
  explicit WholeLease(std::shared_ptr<ShardOperation> operation)
      : operation_(std::move(operation)) {}
  ~WholeLease() override { operation_->RemoveListener(); }

  const std::shared_ptr<ShardOperation>& operation() const override { return operation_; }
  std::vector<OutputRange> Outputs() const override {
    std::vector<OutputRange> parts;
    for (const ShardOperation::Output& output : operation_->StreamedOutputs()) {
      parts.push_back({output.id, output.offset, output.memory});
    }
    return parts;
  }
  absl::Status OnInputsEnd() override {
    if (operation_->InputsComplete()) return absl::OkStatus();
    return absl::InvalidArgumentError("the stream ended before all inputs arrived");
  }

 private:
  const std::shared_ptr<ShardOperation> operation_;
};

}  // namespace

ShardServiceImpl::ShardServiceImpl(OperationRegistry* registry, std::string secret,
                                   ShardServiceHooks hooks)
    : registry_(registry), secret_(std::move(secret)), hooks_(std::move(hooks)) {}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ShardServiceImpl::Exchange(
    grpc::CallbackServerContext* context) {
  // Deletes itself when the call is done.
  auto* exchange = new ShardExchange(context, this, &hooks_);
  if (grpc::Status status = CheckSecret(*context, secret_); status.ok()) {
    exchange->Begin();
  } else {
    exchange->Reject(std::move(status));
  }
  return exchange;
}

absl::StatusOr<std::unique_ptr<ShardLease>> ShardServiceImpl::Open(
    const std::optional<v1::OpenShard>& open, OperationListener* listener) {
  if (!open.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat("the metadata ", wire::kOpenShardMetadataKey,
                                                   " must be a single OpenShard of at most ",
                                                   Limits().max_open_shard_bytes, " bytes"));
  }
  if (open->max_chunk_bytes() > Limits().max_chunk_bytes_up) {
    return absl::InvalidArgumentError("max_chunk_bytes exceeds Limits.max_chunk_bytes_up");
  }
  std::shared_ptr<ShardOperation> operation =
      registry_->Find(open->operation_id(), open->generation());
  if (operation == nullptr) {
    return absl::NotFoundError("this generation has no such operation");
  }
  if (!operation->SetListener(listener)) {
    return absl::InvalidArgumentError("the operation has an open exchange already");
  }
  return std::make_unique<WholeLease>(std::move(operation));
}

}  // namespace ringattn::worker
