#include "server/edge/call/request_registry.h"

#include <utility>

#include "server/edge/call/request_call.h"

namespace ringattn::server {

RequestRegistry::Entry RequestRegistry::Add(std::shared_ptr<RequestCall> call,
                                            const Caller& caller) {
  absl::MutexLock lock(&mutex_);
  Entry entry;
  const StreamId id = ++last_;
  entry.refused = slots_.Enter(id, caller);
  if (entry.refused != ExhaustedLimit::kNone) return entry;
  entry.id = id;
  calls_.emplace(id, std::move(call));
  if (const std::optional<StreamId> evicted = slots_.TakeEvicted()) {
    entry.evicted = calls_.at(*evicted);
  }
  return entry;
}

ExhaustedLimit RequestRegistry::HeaderCame(StreamId id) {
  absl::MutexLock lock(&mutex_);
  return slots_.HeaderCame(id);
}

void RequestRegistry::Remove(StreamId id) {
  std::shared_ptr<RequestCall> removed;  // destroyed without the lock
  absl::MutexLock lock(&mutex_);
  const auto found = calls_.find(id);
  if (found == calls_.end()) return;
  removed = std::move(found->second);
  calls_.erase(found);
  slots_.Leave(id);
}

std::shared_ptr<RequestCall> RequestRegistry::Find(StreamId id) const {
  absl::MutexLock lock(&mutex_);
  const auto found = calls_.find(id);
  return found == calls_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<RequestCall>> RequestRegistry::All() const {
  absl::MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<RequestCall>> calls;
  calls.reserve(calls_.size());
  for (const auto& [id, call] : calls_) calls.push_back(call);
  return calls;
}

}  // namespace ringattn::server
