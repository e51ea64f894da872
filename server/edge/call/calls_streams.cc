#include "server/edge/call/calls_streams.h"

#include "server/edge/call/call_failures.h"

namespace ringattn::server {

std::optional<Failure> CallsStreams::Enter(Stream* stream, const std::string& client,
                                           absl::Duration retry_after) {
  absl::MutexLock lock(&mutex_);
  if (closed_) return ServerEnds(retry_after);
  int64_t& of_client = by_client_[client];
  if (of_client >= max_per_client_) return TooManyCallsStreams(max_per_client_, retry_after);
  ++of_client;
  streams_[stream] = client;
  return std::nullopt;
}

void CallsStreams::Leave(Stream* stream) {
  absl::MutexLock lock(&mutex_);
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return;
  const auto count = by_client_.find(found->second);
  if (--count->second == 0) by_client_.erase(count);
  streams_.erase(found);
}

void CallsStreams::Close() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
  for (const auto& [stream, client] : streams_) stream->OnClosed();
}

int64_t CallsStreams::streams() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(streams_.size());
}

}  // namespace ringattn::server
