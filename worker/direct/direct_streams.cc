#include "worker/direct/direct_streams.h"

#include <algorithm>

#include "absl/time/clock.h"
#include "common/security/secret.h"
#include "worker/service/shard_exchange.h"

namespace ringattn::worker {

namespace {

// How long a search takes says something of a digest, and nothing of the token.
std::string KeyOf(const std::string& token) { return SecretDigest::Of(token).ToHex(); }

}  // namespace

const char* StreamRefusalName(StreamRefusal refusal) {
  switch (refusal) {
    case StreamRefusal::kToken:
      return "token";
    case StreamRefusal::kParts:
      return "parts";
    case StreamRefusal::kLate:
      return "late";
    case StreamRefusal::kCrowded:
      return "crowded";
  }
  return "";
}

DirectStreams::DirectStreams(DirectStreamsOptions options, DirectStreamsHooks hooks)
    : options_(std::move(options)),
      hooks_(std::move(hooks)),
      reporter_(hooks_.send, options_.report_interval, [this] { RefuseLate(); }) {
  transfer_hooks_.on_delivered = [this](const OperationInfo& info) { reporter_.Delivered(info); };
  transfer_hooks_.on_failed = [this](const OperationInfo& info, bool bad_chunk,
                                     const std::string& why) {
    reporter_.Failed(info, bad_chunk ? TransferEnd::kBadChunk : TransferEnd::kHere, why);
  };
}

void DirectStreams::Begin(const std::shared_ptr<ShardOperation>& operation,
                          const v1::Reserve& reserve) {
  auto transfer = std::make_shared<DirectTransfer>(operation, reserve.token(), &transfer_hooks_);
  if (!transfer->Start()) {
    return transfer_hooks_.on_failed(operation->info(), false, "the operation has another stream");
  }
  reporter_.Watch(transfer.get(), transfer->info(),
                  [watched = transfer.get()] { return watched->progress(); });
  {
    absl::MutexLock lock(&mutex_);
    transfers_[KeyOf(reserve.token())].swap(transfer);
  }
  // Of the same token, which the coordinator gives to one operation alone.
  if (transfer != nullptr) reporter_.Unwatch(transfer.get());
}

void DirectStreams::Forget(const std::string& operation_id, uint64_t generation) {
  std::shared_ptr<DirectTransfer> forgotten;  // let go of without the lock
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

absl::StatusOr<std::unique_ptr<ShardLease>> DirectStreams::Open(const v1::OpenShard& open,
                                                                OperationListener* listener) {
  std::shared_ptr<DirectTransfer> transfer;
  {
    const std::string key = KeyOf(open.token());
    absl::MutexLock lock(&mutex_);
    const auto found = transfers_.find(key);
    if (found != transfers_.end()) transfer = found->second;
  }
  absl::StatusOr<std::unique_ptr<ShardLease>> lease = DirectTransfer::Refusal();
  if (transfer != nullptr) lease = transfer->Open(open, listener);
  if (!lease.ok()) {
    const bool by_token = absl::IsUnauthenticated(lease.status());
    hooks_.on_refused(by_token ? StreamRefusal::kToken : StreamRefusal::kParts);
  }
  return lease;
}

// ------------------------------------------------------------ without a token yet

void DirectStreams::OnWaiting(ShardExchange* exchange) {
  absl::MutexLock lock(&waiting_mutex_);
  waiting_.emplace_back(exchange, absl::Now());
  if (static_cast<int64_t>(waiting_.size()) <= options_.limits.max_calls_without_token) return;
  // Under the lock, behind which the exchange ends: it is still there.
  waiting_.front().first->Reject({grpc::StatusCode::RESOURCE_EXHAUSTED,
                                  "too many calls without a token; this one was the oldest"});
  waiting_.pop_front();
  hooks_.on_refused(StreamRefusal::kCrowded);
}

void DirectStreams::OnWaited(ShardExchange* exchange) {
  absl::MutexLock lock(&waiting_mutex_);
  const auto found = std::find_if(waiting_.begin(), waiting_.end(), [exchange](const auto& entry) {
    return entry.first == exchange;
  });
  if (found != waiting_.end()) waiting_.erase(found);
}

void DirectStreams::RefuseLate() {
  absl::MutexLock lock(&waiting_mutex_);
  const absl::Time oldest = absl::Now() - options_.limits.token_timeout;
  while (!waiting_.empty() && waiting_.front().second < oldest) {
    waiting_.front().first->Reject(
        {grpc::StatusCode::DEADLINE_EXCEEDED, "no OpenShard with a token came in time"});
    waiting_.pop_front();
    hooks_.on_refused(StreamRefusal::kLate);
  }
}

}  // namespace ringattn::worker
