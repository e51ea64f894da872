#include "server/edge/kv/kv_relays.h"

#include "absl/strings/str_cat.h"
#include "server/core/kv/kv_failures.h"

namespace ringattn::server {
namespace {

Failure TooManyRelays(int64_t limit, absl::Duration retry_after) {
  Failure failure;
  failure.code = absl::StatusCode::kResourceExhausted;
  failure.reason = "TOO_MANY_STREAMS";
  failure.message = absl::StrCat("this client has ", limit, " open Steps streams, the maximum");
  failure.retry_after = retry_after;
  return failure;
}

}  // namespace

std::optional<Failure> KvRelays::Enter(const std::shared_ptr<KvRelayStream>& stream,
                                       const Caller& caller, absl::Duration retry_after) {
  absl::MutexLock lock(&mutex_);
  if (closed_) return *closed_;
  int64_t& of_client = by_client_[caller.client];
  if (of_client >= limits_.max_streams_per_client) {
    return TooManyRelays(limits_.max_streams_per_client, retry_after);
  }
  ++of_client;
  streams_[stream.get()] = {stream, caller.client, "", 0};
  return std::nullopt;
}

void KvRelays::Attach(const KvRelayStream* stream, const std::string& cache_id, uint64_t epoch) {
  std::shared_ptr<KvRelayStream> replaced;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = streams_.find(stream);
    if (found == streams_.end()) return;
    found->second.cache_id = cache_id;
    found->second.epoch = epoch;
    const KvRelayStream*& newest = by_cache_[cache_id];
    if (newest != nullptr && newest != stream) replaced = streams_.at(newest).stream.lock();
    newest = stream;
  }
  if (replaced != nullptr) replaced->Fail(KvFenced());
}

void KvRelays::Leave(const KvRelayStream* stream) {
  absl::MutexLock lock(&mutex_);
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return;
  const Entry& entry = found->second;
  if (--by_client_[entry.client] == 0) by_client_.erase(entry.client);
  const auto newest = by_cache_.find(entry.cache_id);
  if (newest != by_cache_.end() && newest->second == stream) by_cache_.erase(newest);
  streams_.erase(found);
}

void KvRelays::End(const std::string& cache_id, uint64_t epoch, const Failure& failure) {
  std::shared_ptr<KvRelayStream> stream;
  {
    absl::MutexLock lock(&mutex_);
    const auto newest = by_cache_.find(cache_id);
    if (newest == by_cache_.end()) return;
    const Entry& entry = streams_.at(newest->second);
    if (entry.epoch <= epoch) stream = entry.stream.lock();
  }
  if (stream != nullptr) stream->Fail(failure);
}

void KvRelays::Close(const Failure& failure) {
  std::vector<std::shared_ptr<KvRelayStream>> streams;
  {
    absl::MutexLock lock(&mutex_);
    closed_ = failure;
    for (const auto& [key, entry] : streams_) streams.push_back(entry.stream.lock());
  }
  for (const auto& stream : streams) {
    if (stream != nullptr) stream->Fail(failure);
  }
}

void KvRelays::OnTick(absl::Time now) {
  std::vector<std::shared_ptr<KvRelayStream>> streams;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [key, entry] : streams_) streams.push_back(entry.stream.lock());
  }
  for (const auto& stream : streams) {
    if (stream != nullptr) stream->OnTick(now);
  }
}

int64_t KvRelays::streams() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(streams_.size());
}

}  // namespace ringattn::server
