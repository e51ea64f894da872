#include "worker/direct/direct_streams.h"

#include <algorithm>
#include <vector>

#include "absl/time/clock.h"
#include "common/observability/log.h"
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
    : options_(std::move(options)), hooks_(std::move(hooks)) {
  transfer_hooks_.on_delivered = [this](const OperationInfo& info) {
    v1::JoinRequest message;
    message.mutable_delivered()->set_operation_id(info.id);
    message.mutable_delivered()->set_generation(info.generation);
    hooks_.send(std::move(message));
  };
  transfer_hooks_.on_failed = [this](const OperationInfo& info, bool bad_chunk,
                                     const std::string& why) { SendFailed(info, bad_chunk, why); };
  reporter_ = std::thread([this] { Report(); });
}

DirectStreams::~DirectStreams() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  reporter_.join();
}

void DirectStreams::Begin(const std::shared_ptr<ShardOperation>& operation,
                          const v1::Reserve& reserve) {
  auto transfer = std::make_shared<DirectTransfer>(operation, reserve.token(), &transfer_hooks_);
  if (!transfer->Start()) {
    return SendFailed(operation->info(), false, "the operation has another stream");
  }
  absl::MutexLock lock(&mutex_);
  transfers_[KeyOf(reserve.token())] = {std::move(transfer), {}};
}

void DirectStreams::Forget(const std::string& operation_id, uint64_t generation) {
  std::shared_ptr<DirectTransfer> forgotten;  // let go of without the lock
  absl::MutexLock lock(&mutex_);
  const auto found = std::find_if(transfers_.begin(), transfers_.end(), [&](const auto& entry) {
    const OperationInfo& info = entry.second.transfer->info();
    return info.id == operation_id && info.generation == generation;
  });
  if (found == transfers_.end()) return;
  forgotten = std::move(found->second.transfer);
  forgotten->Forget();
  transfers_.erase(found);
}

void DirectStreams::ForgetAll() {
  std::map<std::string, Entry> forgotten;
  {
    absl::MutexLock lock(&mutex_);
    forgotten.swap(transfers_);
  }
  for (const auto& [id, entry] : forgotten) entry.transfer->Forget();
}

absl::StatusOr<std::unique_ptr<ShardLease>> DirectStreams::Open(const v1::OpenShard& open,
                                                                OperationListener* listener) {
  std::shared_ptr<DirectTransfer> transfer;
  {
    const std::string key = KeyOf(open.token());
    absl::MutexLock lock(&mutex_);
    const auto found = transfers_.find(key);
    if (found != transfers_.end()) transfer = found->second.transfer;
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

// ------------------------------------------------------------- to the coordinator

void DirectStreams::SendFailed(const OperationInfo& info, bool bad_chunk, const std::string& why) {
  LogWarning("a client's stream failed", {{"request_id", info.request_id},
                                          {"traceparent", info.traceparent},
                                          {"operation_id", info.id},
                                          {"generation", info.generation},
                                          {"reason", why}});
  v1::JoinRequest message;
  v1::TransferProgress* progress = message.mutable_transfer_progress();
  progress->set_operation_id(info.id);
  progress->set_generation(info.generation);
  if (bad_chunk) {
    progress->set_bad_chunk(why);
  } else {
    progress->set_failure(why);
  }
  hooks_.send(std::move(message));
}

void DirectStreams::Report() {
  while (true) {
    std::vector<v1::JoinRequest> messages;
    {
      absl::MutexLock lock(&mutex_);
      if (mutex_.AwaitWithTimeout(absl::Condition(&stopping_), options_.report_interval)) return;
      for (auto& [key, entry] : transfers_) {
        const DirectTransfer::Progress now = entry.transfer->progress();
        if (now == entry.reported) continue;
        entry.reported = now;
        v1::TransferProgress* progress = messages.emplace_back().mutable_transfer_progress();
        progress->set_operation_id(entry.transfer->info().id);
        progress->set_generation(entry.transfer->info().generation);
        progress->set_received(now.received_bytes);
        progress->set_sent(now.sent_bytes);
        progress->set_waits_for_client(now.waits_for_client);
      }
    }
    for (v1::JoinRequest& message : messages) hooks_.send(std::move(message));
    RefuseLate();
  }
}

}  // namespace ringattn::worker
