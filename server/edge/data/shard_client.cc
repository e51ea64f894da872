#include "server/edge/data/shard_client.h"

#include <utility>

#include <grpcpp/support/channel_arguments.h>

#include "common/security/secret.h"
#include "common/wire/open_metadata.h"
#include "common/wire/transport.h"

namespace ringattn::server {
namespace {

constexpr char kExchangeMethod[] = "/ringattn.v1.ShardService/Exchange";

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, const Limits& limits,
                                           const TransportSecurity& security) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(limits.max_message_bytes));
  arguments.SetMaxSendMessageSize(-1);
  wire::SetTransport(&arguments);
  // Reconnects quickly to a worker that restarts at the same address.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  return security.Dial(address, arguments);
}

}  // namespace

std::shared_ptr<grpc::Channel> ShardChannels::Next(const std::string& address) {
  absl::MutexLock lock(&mutex_);
  Worker& worker = workers_[address];
  if (worker.channels.size() < kChannelsPerWorker) {
    worker.channels.push_back(MakeChannel(address, limits_, security_));
    return worker.channels.back();
  }
  worker.next = (worker.next + 1) % kChannelsPerWorker;
  return worker.channels[worker.next];
}

void ShardChannels::Keep(const std::set<std::string>& addresses) {
  std::map<std::string, Worker> removed;  // destroyed without the lock
  absl::MutexLock lock(&mutex_);
  for (auto it = workers_.begin(); it != workers_.end();) {
    if (addresses.count(it->first) > 0) {
      ++it;
    } else {
      removed.insert(workers_.extract(it++));
    }
  }
}

ShardStream::ShardStream(std::shared_ptr<ShardStreamOwner> owner, int rank,
                         std::shared_ptr<grpc::Channel> channel)
    : owner_(std::move(owner)), rank_(rank), stub_(std::move(channel)) {}

std::shared_ptr<ShardStream> ShardStream::Make(std::shared_ptr<ShardStreamOwner> owner, int rank,
                                               std::shared_ptr<grpc::Channel> channel,
                                               const std::string& secret,
                                               const v1::OpenShard& open) {
  std::shared_ptr<ShardStream> stream(new ShardStream(std::move(owner), rank, std::move(channel)));
  stream->self_ = stream;
  stream->context_.AddMetadata(kSecretMetadataKey, secret);
  wire::PutOpenShard(open, &stream->context_);
  stream->stub_.PrepareBidiStreamingCall(&stream->context_, kExchangeMethod, {}, stream.get());
  // The hold allows operations outside of reactions until Close().
  stream->AddHold();
  stream->StartRead(&stream->incoming_);
  return stream;
}

void ShardStream::Write(grpc::ByteBuffer message, int64_t payload_bytes) {
  Next next = Next::kNothing;
  {
    absl::MutexLock lock(&mutex_);
    if (closed_) return;
    outgoing_.push_back({std::move(message), payload_bytes});
    next = TakeWrite();
  }
  Start(next);
}

void ShardStream::WritesDone() {
  Next next = Next::kNothing;
  {
    absl::MutexLock lock(&mutex_);
    half_close_ = true;
    next = TakeWrite();
  }
  Start(next);
}

ShardStream::Next ShardStream::TakeWrite() {
  if (writing_ || closed_) return Next::kNothing;
  Next next = Next::kNothing;
  if (!outgoing_.empty()) {
    writing_ = true;
    in_flight_ = std::move(outgoing_.front());
    outgoing_.pop_front();
    next = Next::kWrite;
  } else if (half_close_ && !half_closed_) {
    half_closed_ = true;
    next = Next::kHalfClose;
  }
  // The stream's own hold may be removed before Start returns.
  if (next != Next::kNothing) AddHold();
  return next;
}

void ShardStream::Start(Next next) {
  switch (next) {
    case Next::kNothing:
      return;
    case Next::kRead:
      StartRead(&incoming_);
      break;
    case Next::kWrite:
      StartWrite(&in_flight_.message);
      break;
    case Next::kHalfClose:
      StartWritesDone();
      break;
  }
  RemoveHold();
}

void ShardStream::Read() {
  {
    absl::MutexLock lock(&mutex_);
    if (closed_) return;
    AddHold();
  }
  Start(Next::kRead);
}

void ShardStream::Close() {
  if (std::exchange(closed_, true)) return;
  RemoveHold();
}

void ShardStream::Cancel() {
  absl::MutexLock lock(&mutex_);
  if (closed_) return;
  context_.TryCancel();
  Close();
}

void ShardStream::OnReadDone(bool ok) {
  if (ok) {
    owner_->OnShardMessage(rank_, std::move(incoming_));
    return;
  }
  absl::MutexLock lock(&mutex_);
  Close();  // OnDone reports the cause
}

void ShardStream::OnWriteDone(bool ok) {
  int64_t written = 0;
  Next next = Next::kNothing;
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    written = std::exchange(in_flight_, {}).payload_bytes;
    if (!ok) return Close();
    next = TakeWrite();
  }
  Start(next);
  owner_->OnShardWritten(rank_, written);
}

void ShardStream::OnDone(const grpc::Status& status) {
  const std::shared_ptr<ShardStream> self = std::move(self_);
  const std::shared_ptr<ShardStreamOwner> owner = std::move(owner_);
  owner->OnShardEnded(rank_, status);
}

}  // namespace ringattn::server
