#include "server/edge/request_registry.h"

#include <utility>

#include "server/edge/request_stream.h"

namespace ringattn::server {

StreamId RequestRegistry::Add(std::shared_ptr<RequestStream> stream) {
  absl::MutexLock lock(&mutex_);
  if (streams_.size() >= max_streams_) return 0;
  const StreamId id = ++last_;
  streams_.emplace(id, std::move(stream));
  return id;
}

void RequestRegistry::Remove(StreamId id) {
  std::shared_ptr<RequestStream> removed;  // destroyed without the lock
  absl::MutexLock lock(&mutex_);
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  removed = std::move(found->second);
  streams_.erase(found);
}

std::shared_ptr<RequestStream> RequestRegistry::Find(StreamId id) const {
  absl::MutexLock lock(&mutex_);
  const auto found = streams_.find(id);
  return found == streams_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<RequestStream>> RequestRegistry::All() const {
  absl::MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<RequestStream>> streams;
  streams.reserve(streams_.size());
  for (const auto& [id, stream] : streams_) streams.push_back(stream);
  return streams;
}

}  // namespace ringattn::server
