#include "server/edge/access/stream_slots.h"

namespace ringattn::server {

// Request slots are twice the queue, to include requests that run or end.
StreamSlots::StreamSlots(const Limits& limits)
    : max_requests_(2 * limits.max_queued_requests),
      max_without_header_(limits.max_streams_without_header),
      max_per_client_(limits.max_streams_per_client),
      max_per_connection_(limits.max_streams_per_connection) {}

ExhaustedLimit StreamSlots::Enter(StreamId id, const Caller& caller) {
  const auto taken = [](const std::map<std::string, int64_t>& counts, const std::string& key) {
    const auto found = counts.find(key);
    return found == counts.end() ? 0 : found->second;
  };
  if (taken(by_connection_, caller.connection) >= max_per_connection_) {
    return ExhaustedLimit::kConnection;
  }
  if (taken(by_client_, caller.client) >= max_per_client_) return ExhaustedLimit::kClient;
  ++by_connection_[caller.connection];
  ++by_client_[caller.client];
  streams_[id].caller = caller;
  headerless_.insert(id);
  return ExhaustedLimit::kNone;
}

std::optional<StreamId> StreamSlots::TakeEvicted() {
  if (without_header() <= max_without_header_) return std::nullopt;
  return headerless_.extract(headerless_.begin()).value();
}

ExhaustedLimit StreamSlots::HeaderCame(StreamId id) {
  if (requests_ >= max_requests_) return ExhaustedLimit::kServer;
  headerless_.erase(id);
  streams_.at(id).is_request = true;
  ++requests_;
  return ExhaustedLimit::kNone;
}

void StreamSlots::Leave(StreamId id) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  Release(&by_client_, found->second.caller.client);
  Release(&by_connection_, found->second.caller.connection);
  requests_ -= found->second.is_request ? 1 : 0;
  headerless_.erase(id);
  streams_.erase(found);
}

void StreamSlots::Release(std::map<std::string, int64_t>* counts, const std::string& key) {
  const auto found = counts->find(key);
  if (--found->second == 0) counts->erase(found);
}

}  // namespace ringattn::server
