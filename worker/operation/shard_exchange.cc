#include "worker/operation/shard_exchange.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/base/limits.h"
#include "common/wire/chunk_codec.h"
#include "common/wire/crc32c.h"
#include "common/wire/grpc_slices.h"
#include "common/wire/open_metadata.h"

namespace ringattn::worker {
namespace {

// From the end of the operation to the end of the call. A peer that reads nothing must not hold
// memory longer than the coordinator (--control_timeout, 10 s) or a teardown (5 s) waits for it.
constexpr absl::Duration kTimeToLeave = absl::Seconds(2);

grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

}  // namespace

ShardExchange::ShardExchange(grpc::CallbackServerContext* context, ShardAccess* access,
                             const ShardServiceHooks* hooks)
    : context_(context), access_(access), hooks_(hooks), cut_off_(context) {}

void ShardExchange::Begin() {
  const std::optional<v1::OpenShard> open = wire::ReadOpenShard(*context_);
  // Without the lock: the operation may notify this object at once.
  absl::StatusOr<std::unique_ptr<ShardLease>> lease = access_->Open(open, this);
  if (!lease.ok()) return Reject(ToGrpc(lease.status()));
  lease_ = *std::move(lease);
  operation_ = lease_->operation();
  max_chunk_bytes_ = open->max_chunk_bytes() == 0 ? Limits().max_chunk_bytes_down_default
                                                  : open->max_chunk_bytes();
  with_crc32c_ = open->with_crc32c();
  absl::MutexLock lock(&mutex_);
  opened_ = true;
  Advance();
  if (!ended_ && !failure_.has_value()) StartRead(&incoming_);
}

void ShardExchange::Reject(grpc::Status status) {
  absl::MutexLock lock(&mutex_);
  Fail(std::move(status));
}

void ShardExchange::OnReadDone(bool ok) {
  if (!ok) {
    // Half-closed or broken. If the call broke, OnCancel reports it too.
    absl::MutexLock lock(&mutex_);
    if (absl::Status status = lease_->OnInputsEnd(); !status.ok()) Fail(ToGrpc(status));
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
    return {grpc::StatusCode::INVALID_ARGUMENT,
            "the message is not a chunk; only chunks may be sent"};
  }
  lease_->OnChunk();
  absl::Status status =
      operation_->Write(message->chunk(), message->payload(), message->payload_bytes());
  lease_->OnChunkTaken(static_cast<int64_t>(message->payload_bytes()), status);
  if (!status.ok()) return ToGrpc(status);
  hooks_->on_received_bytes(message->payload_bytes());
  if (operation_->TakeUploadedNotice()) hooks_->on_uploaded(operation_->info());
  return grpc::Status::OK;
}

void ShardExchange::OnWriteDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  writing_ = false;
  outgoing_.Clear();
  if (lease_ != nullptr) {
    const int64_t sent = std::exchange(in_flight_bytes_, 0);
    lease_->OnSent(ok ? sent : 0);
    if (ok && done_sent_) lease_->OnDone();
  }
  if (!ok && !failure_.has_value()) {
    failure_ = grpc::Status(grpc::StatusCode::CANCELLED, "the peer closed the connection");
  }
  Advance();
}

void ShardExchange::OnCancel() {
  absl::MutexLock lock(&mutex_);
  Fail({grpc::StatusCode::CANCELLED, "the call was cancelled"});
}

void ShardExchange::OnDone() {
  lease_.reset();
  std::unique_ptr<Download> download;
  {
    absl::MutexLock lock(&mutex_);
    download.swap(download_);
  }
  // Without the lock: destroying the download waits for a running on_ready, which takes the lock.
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
  const absl::Status over = opened_ ? operation_->ended() : absl::OkStatus();
  if (!over.ok()) cut_off_.Arm(kTimeToLeave);
  if (ended_) return;
  if (!over.ok() && !failure_.has_value() && !done_sent_) failure_ = ToGrpc(over);
  if (failure_.has_value()) {
    // The reply to OpenShard fits every window except a hostile peer's, so its write ends soon.
    // Cancelling it would hide the status.
    if (writing_ && download_ == nullptr) return;
    // A chunk that waits for flow control would delay the status and keep the operation's memory.
    if (writing_) return context_->TryCancel();
    ended_ = true;
    return Finish(*failure_);
  }
  if (writing_ || !opened_) return;
  if (NextMessage()) {
    writing_ = true;
    lease_->OnSend();
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
    outputs_ = lease_->Outputs();
    std::vector<DeviceRange> ranges;
    for (const ShardLease::OutputRange& output : outputs_) ranges.push_back(output.memory);
    download_ = operation_->BeginDownload(std::move(ranges), [this] { OnOperationChanged(); });
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
  const ShardLease::OutputRange& output = outputs_[piece.range];
  wire::ChunkHeader header{static_cast<int32_t>(output.id),
                           static_cast<uint64_t>(output.begin + piece.offset), std::nullopt};
  if (with_crc32c_) header.crc32c = wire::Crc32c(piece.data, piece.bytes);
  // The slice keeps the operation or the staging memory alive until gRPC has sent it.
  using Keeper = std::pair<std::shared_ptr<ShardOperation>, std::shared_ptr<const void>>;
  const auto drop = [](void* keeper) { delete static_cast<Keeper*>(keeper); };
  outgoing_ = wire::MakeChunkBuffer(
      wire::EncodeChunkPrefix(wire::kExchangeResponse, header, piece.bytes),
      {wire::BorrowSlice(piece.data, piece.bytes, drop, new Keeper(operation_, piece.keeper))});
  sent_bytes_ += piece.bytes;
  in_flight_bytes_ = piece.bytes;
  hooks_->on_sent_bytes(piece.bytes);
}

}  // namespace ringattn::worker
