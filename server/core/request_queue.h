// RequestQueue: requests that are not yet reserving, first come first served.
#ifndef RINGATTN_SERVER_CORE_REQUEST_QUEUE_H_
#define RINGATTN_SERVER_CORE_REQUEST_QUEUE_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>

#include "server/core/events.h"

namespace ringattn::server {

// Not thread safe.
class RequestQueue {
 public:
  void PushBack(StreamId stream, int64_t bytes) {
    entries_.emplace_back(stream, bytes);
    bytes_ += bytes;
  }
  void PushFront(StreamId stream, int64_t bytes) {
    entries_.emplace_front(stream, bytes);
    bytes_ += bytes;
  }
  void Remove(StreamId stream) {
    const auto found = std::find_if(entries_.begin(), entries_.end(),
                                    [&](const auto& entry) { return entry.first == stream; });
    if (found == entries_.end()) return;
    bytes_ -= found->second;
    entries_.erase(found);
  }
  // REQUIRES: not empty.
  StreamId front() const { return entries_.front().first; }
  bool empty() const { return entries_.empty(); }
  int64_t size() const { return static_cast<int64_t>(entries_.size()); }
  // That will be uploaded.
  int64_t bytes() const { return bytes_; }

 private:
  std::deque<std::pair<StreamId, int64_t>> entries_;
  int64_t bytes_ = 0;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUEST_QUEUE_H_
