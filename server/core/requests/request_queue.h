// RequestQueue: requests that do not reserve memory yet, and each client's share of the queue.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_REQUEST_QUEUE_H_
#define RINGATTN_SERVER_CORE_REQUESTS_REQUEST_QUEUE_H_

#include <cstdint>
#include <map>
#include <string>

#include "server/core/events/events.h"

namespace ringattn::server {

// Queued requests, of all clients or of one.
struct QueueShare {
  int64_t requests = 0;
  int64_t bytes = 0;  // to be uploaded
};

// FairOrder determines the order of service. Not thread safe.
class RequestQueue {
 public:
  // REQUIRES: the stream is not in it.
  void Add(StreamId stream, const std::string& client, int64_t bytes);
  // No effect if the stream is not queued.
  void Remove(StreamId stream);

  bool Has(StreamId stream) const { return entries_.count(stream) > 0; }
  const QueueShare& all() const { return all_; }
  QueueShare Of(const std::string& client) const;
  bool empty() const { return entries_.empty(); }
  struct Entry {
    std::string client;
    int64_t bytes = 0;
  };
  // By stream.
  const std::map<StreamId, Entry>& entries() const { return entries_; }

 private:
  std::map<StreamId, Entry> entries_;
  std::map<std::string, QueueShare> by_client_;
  QueueShare all_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_REQUEST_QUEUE_H_
