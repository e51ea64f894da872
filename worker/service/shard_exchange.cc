#include "worker/service/shard_exchange.h"

#include <utility>

#include "absl/status/status.h"
#include "common/base/limits.h"
#include "common/wire/chunk_codec.h"
#include "common/wire/crc32c.h"
#include "common/wire/grpc_slices.h"

namespace ringattn::worker {
namespace {

grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

}  // namespace

ShardExchange::ShardExchange(grpc::CallbackServerContext* context, OperationRegistry* registry,
                             const ShardServiceHooks* hooks)
    : context_(context), registry_(registry), hooks_(hooks) {}

void ShardExchange::Begin() { StartRead(&incoming_); }

void ShardExchange::Reject(grpc::Status status) {
  absl::MutexLock lock(&mutex_);
  Fail(std::move(status));
}

void ShardExchange::OnReadDone(bool ok) {
  if (!ok) {
    // Half-closed or broken; a broken call says so elsewhere too.
    absl::MutexLock lock(&mutex_);
    if (operation_ == nullptr) {
      Fail({grpc::StatusCode::INVALID_ARGUMENT, "the stream ended before OpenShard"});
    } else if (!operation_->InputsComplete()) {
      Fail({grpc::StatusCode::INVALID_ARGUMENT, "the stream ended before all inputs arrived"});
    }
    return;
  }
  grpc::Status status = HandleMessage();
  absl::MutexLock lock(&mutex_);
  if (!status.ok()) return Fail(std::move(status));
  Advance();
  if (!ended_ && !failure_.has_value()) StartRead(&incoming_);
}

grpc::Status ShardExchange::HandleMessage() {
  absl::StatusOr<wire::ReceivedMessage> message =
      wire::ReceivedMessage::Parse(wire::kExchangeRequest, incoming_);
  if (!message.ok()) return ToGrpc(message.status());
  if (!message->is_chunk()) {
    absl::StatusOr<v1::ExchangeRequest> request = wire::ParseProto<v1::ExchangeRequest>(&incoming_);
    if (!request.ok()) return ToGrpc(request.status());
    if (!request->has_open() || operation_ != nullptr) {
      return {grpc::StatusCode::INVALID_ARGUMENT, "OpenShard must come first, once"};
    }
    return Open(request->open());
  }
  if (operation_ == nullptr) {
    return {grpc::StatusCode::INVALID_ARGUMENT, "OpenShard must come first, once"};
  }
  absl::Status status =
      operation_->Write(message->chunk(), message->payload(), message->payload_bytes());
  if (!status.ok()) return ToGrpc(status);
  hooks_->on_received_bytes(message->payload_bytes());
  if (operation_->TakeUploadedNotice()) hooks_->on_uploaded(operation_->info());
  return grpc::Status::OK;
}

grpc::Status ShardExchange::Open(const v1::OpenShard& open) {
  std::shared_ptr<ShardOperation> operation =
      registry_->Find(open.operation_id(), open.generation());
  if (operation == nullptr) {
    return {grpc::StatusCode::NOT_FOUND, "no such operation is reserved in this generation"};
  }
  const Limits limits;
  if (open.max_chunk_bytes() > limits.max_chunk_bytes_up) {
    return {grpc::StatusCode::INVALID_ARGUMENT,
            "max_chunk_bytes is over Limits.max_chunk_bytes_up"};
  }
  max_chunk_bytes_ =
      open.max_chunk_bytes() == 0 ? limits.max_chunk_bytes_down_default : open.max_chunk_bytes();
  with_crc32c_ = open.with_crc32c();
  if (!operation->SetListener(this)) {
    return {grpc::StatusCode::INVALID_ARGUMENT, "the operation has an open exchange already"};
  }
  absl::MutexLock lock(&mutex_);
  operation_ = std::move(operation);
  opened_ = true;
  return grpc::Status::OK;
}

void ShardExchange::OnWriteDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  writing_ = false;
  outgoing_.Clear();
  if (!ok && !failure_.has_value()) {
    failure_ = grpc::Status(grpc::StatusCode::CANCELLED, "the peer is gone");
  }
  Advance();
}

void ShardExchange::OnCancel() {
  absl::MutexLock lock(&mutex_);
  Fail({grpc::StatusCode::CANCELLED, "the call was cancelled"});
}

void ShardExchange::OnDone() {
  if (operation_ != nullptr) operation_->RemoveListener();
  std::unique_ptr<Download> download;
  {
    absl::MutexLock lock(&mutex_);
    download.swap(download_);
  }
  // Without the lock, which its notice takes: it waits for one in progress.
  download.reset();
  delete this;
}

void ShardExchange::OnOperationChanged() {
  absl::MutexLock lock(&mutex_);
  Advance();
}

void ShardExchange::Fail(grpc::Status status) {
  if (!failure_.has_value()) failure_ = std::move(status);
  Advance();
}

void ShardExchange::Advance() {
  if (ended_) return;
  if (!failure_.has_value() && opened_ && !done_sent_) {
    if (absl::Status status = operation_->ended(); !status.ok()) failure_ = ToGrpc(status);
  }
  if (failure_.has_value()) {
    // The answer to OpenShard always fits the peer's window and is gone in a moment;
    // cancelling it would hide the status.
    if (writing_ && download_ == nullptr) return;
    // A chunk that waits for flow control would hold the status back, and with it the
    // operation's memory.
    if (writing_) return context_->TryCancel();
    ended_ = true;
    return Finish(*failure_);
  }
  if (writing_ || !opened_) return;
  if (NextMessage()) {
    writing_ = true;
    StartWrite(&outgoing_);
  } else if (failure_.has_value()) {
    Advance();
  } else if (done_sent_) {
    ended_ = true;
    Finish(grpc::Status::OK);
  }
}

bool ShardExchange::NextMessage() {
  if (!opened_sent_) {
    opened_sent_ = true;
    v1::ExchangeResponse response;
    response.mutable_opened();
    outgoing_ = wire::SerializeProto(response);
    return true;
  }
  if (done_sent_ || !operation_->finished()) return false;
  if (download_ == nullptr) {
    outputs_ = operation_->StreamedOutputs();
    download_ = operation_->BeginDownload(outputs_, [this] { OnOperationChanged(); });
  }
  if (!download_->finished()) {
    absl::StatusOr<std::optional<Download::HostRange>> piece = download_->Next(max_chunk_bytes_);
    if (!piece.ok()) {
      failure_ = ToGrpc(piece.status());
      return false;
    }
    if (!piece->has_value()) return false;
    MakeChunk(**piece);
    return true;
  }
  hooks_->on_downloaded(download_->copy_time());
  done_sent_ = true;
  v1::ExchangeResponse response;
  response.mutable_done()->set_bytes_sent(sent_bytes_);
  outgoing_ = wire::SerializeProto(response);
  return true;
}

void ShardExchange::MakeChunk(const Download::HostRange& piece) {
  const ShardOperation::Output& output = outputs_[piece.range];
  wire::ChunkHeader header{static_cast<int32_t>(output.id),
                           static_cast<uint64_t>(output.offset + piece.offset), std::nullopt};
  if (with_crc32c_) header.crc32c = wire::Crc32c(piece.data, piece.bytes);
  // The slice keeps the memory, the operation's or staging, until gRPC has sent it.
  using Keeper = std::pair<std::shared_ptr<ShardOperation>, std::shared_ptr<const void>>;
  const auto drop = [](void* keeper) { delete static_cast<Keeper*>(keeper); };
  outgoing_ = wire::MakeChunkBuffer(
      wire::EncodeChunkPrefix(wire::kExchangeResponse, header, piece.bytes),
      {wire::BorrowSlice(piece.data, piece.bytes, drop, new Keeper(operation_, piece.keeper))});
  sent_bytes_ += piece.bytes;
  hooks_->on_sent_bytes(piece.bytes);
}

}  // namespace ringattn::worker
