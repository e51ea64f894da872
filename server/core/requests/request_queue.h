// RequestQueue: requests that do not reserve memory yet, and each client's share of the queue.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_REQUEST_QUEUE_H_
#define RINGATTN_SERVER_CORE_REQUESTS_REQUEST_QUEUE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "server/core/events/events.h"

namespace ringattn::server {

// Queued requests, of all clients or of one.
struct QueueShare {
  int64_t requests = 0;
  int64_t bytes = 0;  // to be uploaded
};

// The needs of a queued request, which follow from its plan.
struct QueueNeeds {
  double cost_seconds = 0;   // of devices
  int64_t memory_bytes = 0;  // the most on any member
  // Admission must look at it in its turn, even if it could be placed nowhere.
  bool is_special = false;
};

// Keeps the extremes of what several queued requests need. An event then need not look at requests
// that it cannot help. Not thread safe.
class NeedsExtremes {
 public:
  void Add(const QueueNeeds& needs);
  // REQUIRES: the same needs were added.
  void Remove(const QueueNeeds& needs);
  // Returns the least cost and the most memory, and whether any is special. No request: infinity, 0
  // and false.
  QueueNeeds Get() const;

 private:
  std::map<double, int64_t> costs_;    // how many requests have this cost
  std::map<int64_t, int64_t> memory_;  // or need this memory
  int64_t special_ = 0;
};

// FairOrder determines the order of service. Not thread safe.
class RequestQueue {
 public:
  // REQUIRES: the stream is not in it.
  void Add(StreamId stream, const std::string& client, int64_t bytes);
  // Replaces what is known of the request's needs. It is then one that admission has not looked at.
  // No effect if the stream is not queued.
  void SetNeeds(StreamId stream, const QueueNeeds& needs);
  // No effect if the stream is not queued.
  void Remove(StreamId stream);

  bool Has(StreamId stream) const { return entries_.count(stream) > 0; }
  const QueueShare& all() const { return all_.share; }
  QueueShare Of(const std::string& client) const;
  // Returns the extremes of all requests whose needs are known.
  QueueNeeds extremes() const { return all_.extremes.Get(); }
  // Returns those of one client's requests. REQUIRES: it has a queued request.
  QueueNeeds ExtremesOf(const std::string& client) const {
    return by_client_.at(client).extremes.Get();
  }
  // Returns the requests whose needs were set since the last call.
  std::set<StreamId> TakeNew();
  bool empty() const { return entries_.empty(); }
  struct Entry {
    std::string client;
    int64_t bytes = 0;
    std::optional<QueueNeeds> needs;  // nullopt: no plan yet
  };
  // Returns null if the stream is not queued.
  const Entry* Find(StreamId stream) const;
  // By stream.
  const std::map<StreamId, Entry>& entries() const { return entries_; }

 private:
  struct Part {
    QueueShare share;
    NeedsExtremes extremes;
  };

  std::map<StreamId, Entry> entries_;
  std::map<std::string, Part> by_client_;
  Part all_;
  std::set<StreamId> new_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_REQUEST_QUEUE_H_
