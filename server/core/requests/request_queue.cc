#include "server/core/requests/request_queue.h"

#include <cassert>

namespace ringattn::server {

void RequestQueue::Add(StreamId stream, const std::string& client, int64_t bytes) {
  assert(!Has(stream));
  entries_[stream] = {client, bytes};
  for (QueueShare* share : {&all_, &by_client_[client]}) {
    ++share->requests;
    share->bytes += bytes;
  }
}

void RequestQueue::Remove(StreamId stream) {
  const auto entry = entries_.find(stream);
  if (entry == entries_.end()) return;
  const auto client = by_client_.find(entry->second.client);
  for (QueueShare* share : {&all_, &client->second}) {
    --share->requests;
    share->bytes -= entry->second.bytes;
  }
  if (client->second.requests == 0) by_client_.erase(client);
  entries_.erase(entry);
}

QueueShare RequestQueue::Of(const std::string& client) const {
  const auto found = by_client_.find(client);
  return found == by_client_.end() ? QueueShare{} : found->second;
}

}  // namespace ringattn::server
