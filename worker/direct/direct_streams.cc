#include "worker/direct/direct_streams.h"

#include <algorithm>
#include <utility>

#include "common/security/secret.h"

namespace ringattn::worker {

namespace {

// The duration of a lookup may reveal something about a digest, but nothing about the token.
std::string KeyOf(const std::string& token) { return SecretDigest::Of(token).ToHex(); }

}  // namespace

const char* StreamRefusalName(StreamRefusal refusal) {
  switch (refusal) {
    case StreamRefusal::kToken:
      return "token";
    case StreamRefusal::kParts:
      return "parts";
  }
  return "";
}

DirectStreams::DirectStreams(DirectStreamsOptions options, DirectStreamsHooks hooks)
    : hooks_(std::move(hooks)), reporter_(hooks_.send, options.report_interval) {
  transfer_hooks_.on_delivered = [this](const OperationInfo& info) { reporter_.Delivered(info); };
  transfer_hooks_.on_failed = [this](const OperationInfo& info, bool bad_chunk,
                                     const std::string& why) {
    reporter_.Failed(info, bad_chunk ? TransferEnd::kBadChunk : TransferEnd::kWorkerError, why);
  };
}

void DirectStreams::Begin(const std::shared_ptr<ShardOperation>& operation,
                          const v1::Reserve& reserve) {
  absl::StatusOr<OperationWriters> writers =
      OperationWriters::Read(reserve, operation->operation().spec());
  if (!writers.ok()) {
    return transfer_hooks_.on_failed(operation->info(), false,
                                     std::string(writers.status().message()));
  }
  auto transfer = std::make_shared<DirectTransfer>(operation, reserve.token(), *std::move(writers),
                                                   &transfer_hooks_);
  if (!transfer->Start()) {
    return transfer_hooks_.on_failed(operation->info(), false,
                                     "the operation already has another stream");
  }
  reporter_.Watch(transfer.get(), transfer->info(),
                  [watched = transfer.get()] { return watched->progress(); });
  {
    absl::MutexLock lock(&mutex_);
    transfers_[KeyOf(reserve.token())].swap(transfer);
  }
  // An earlier transfer with the same token, if any. The coordinator gives each token to one
  // operation only.
  if (transfer != nullptr) reporter_.Unwatch(transfer.get());
}

void DirectStreams::Forget(const std::string& operation_id, uint64_t generation) {
  std::shared_ptr<DirectTransfer> forgotten;  // destroyed after the lock is released
  {
    absl::MutexLock lock(&mutex_);
    const auto found = std::find_if(transfers_.begin(), transfers_.end(), [&](const auto& entry) {
      const OperationInfo& info = entry.second->info();
      return info.id == operation_id && info.generation == generation;
    });
    if (found == transfers_.end()) return;
    forgotten = std::move(found->second);
    forgotten->Forget();
    transfers_.erase(found);
  }
  reporter_.Unwatch(forgotten.get());
}

void DirectStreams::ForgetAll() {
  std::map<std::string, std::shared_ptr<DirectTransfer>> forgotten;
  {
    absl::MutexLock lock(&mutex_);
    forgotten.swap(transfers_);
  }
  for (const auto& [key, transfer] : forgotten) {
    transfer->Forget();
    reporter_.Unwatch(transfer.get());
  }
}

std::shared_ptr<DirectTransfer> DirectStreams::Find(const std::string& token) {
  const std::string key = KeyOf(token);
  absl::MutexLock lock(&mutex_);
  const auto found = transfers_.find(key);
  return found == transfers_.end() ? nullptr : found->second;
}

absl::StatusOr<std::unique_ptr<ShardLease>> DirectStreams::Open(
    const std::optional<v1::OpenShard>& open, OperationListener* listener) {
  absl::StatusOr<std::unique_ptr<ShardLease>> lease = DirectTransfer::Refusal();
  const auto transfer = open.has_value() ? Find(open->token()) : nullptr;
  if (transfer != nullptr) lease = transfer->Open(*open, listener);
  if (!lease.ok()) {
    const bool by_token = absl::IsUnauthenticated(lease.status());
    hooks_.on_refused(by_token ? StreamRefusal::kToken : StreamRefusal::kParts);
  }
  return lease;
}

}  // namespace ringattn::worker
