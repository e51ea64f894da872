#include "server/edge/kv/kv_shard_stream.h"

#include <utility>

#include "common/security/secret.h"

namespace ringattn::server {

KvShardStream::KvShardStream(std::shared_ptr<KvShardStreamOwner> owner, int rank,
                             const std::shared_ptr<grpc::Channel>& channel)
    : owner_(std::move(owner)), rank_(rank), stub_(v1::KvShardService::NewStub(channel)) {}

std::shared_ptr<KvShardStream> KvShardStream::Open(std::shared_ptr<KvShardStreamOwner> owner,
                                                   int rank,
                                                   const std::shared_ptr<grpc::Channel>& channel,
                                                   const std::string& secret) {
  std::shared_ptr<KvShardStream> stream(new KvShardStream(std::move(owner), rank, channel));
  stream->self_ = stream;
  stream->context_.AddMetadata(kSecretMetadataKey, secret);
  stream->stub_->async()->Steps(&stream->context_, stream.get());
  // The hold permits operations outside of reactions until Close().
  stream->AddHold();
  stream->StartCall();
  return stream;
}

void KvShardStream::Send(v1::StepRequest request) {
  absl::MutexLock lock(&mutex_);
  if (closed_) return;  // OnShardEnded follows
  request_ = std::move(request);
  response_.Clear();
  pending_ = 2;
  StartWrite(&request_);
  StartRead(&response_);
}

void KvShardStream::Cancel() {
  absl::MutexLock lock(&mutex_);
  context_.TryCancel();
  Close();
}

void KvShardStream::Close() {
  if (std::exchange(closed_, true)) return;
  RemoveHold();
}

void KvShardStream::OnReadDone(bool ok) { Finished(ok); }
void KvShardStream::OnWriteDone(bool ok) { Finished(ok); }

void KvShardStream::Finished(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    --pending_;
    if (!ok) Close();
    if (closed_ || pending_ > 0) return;
  }
  owner_->OnShardAnswer(rank_, &response_);
}

void KvShardStream::OnDone(const grpc::Status& status) {
  const std::shared_ptr<KvShardStream> self = std::exchange(self_, nullptr);
  const std::shared_ptr<KvShardStreamOwner> owner = std::exchange(owner_, nullptr);
  // Waits until the last holder has released the lock.
  { absl::MutexLock lock(&mutex_); }
  owner->OnShardEnded(rank_, status);
}

}  // namespace ringattn::server
