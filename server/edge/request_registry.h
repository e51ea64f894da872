// RequestRegistry: the open Forward and Backward streams by id, so that the core's
// actions find them.
#ifndef RINGATTN_SERVER_EDGE_REQUEST_REGISTRY_H_
#define RINGATTN_SERVER_EDGE_REQUEST_REGISTRY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/core/events.h"

namespace ringattn::server {

class RequestStream;

// Thread safe; its lock is held for moments only and no other is taken under it.
class RequestRegistry {
 public:
  // Streams that may be open at a time, those without a header included. Twice the
  // queue: as many again may be served, rejected or without a header yet.
  explicit RequestRegistry(size_t max_streams) : max_streams_(max_streams) {}

  // A fresh id, or 0 if too many streams are open.
  StreamId Add(std::shared_ptr<RequestStream> stream);
  void Remove(StreamId id);
  std::shared_ptr<RequestStream> Find(StreamId id) const;
  std::vector<std::shared_ptr<RequestStream>> All() const;

 private:
  const size_t max_streams_;
  mutable absl::Mutex mutex_;
  StreamId last_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<StreamId, std::shared_ptr<RequestStream>> streams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_REQUEST_REGISTRY_H_
