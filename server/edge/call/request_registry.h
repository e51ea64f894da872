// RequestRegistry: the open Forward and Backward streams by id, for the core's actions, and the
// slots that they hold.
#ifndef RINGATTN_SERVER_EDGE_CALL_REQUEST_REGISTRY_H_
#define RINGATTN_SERVER_EDGE_CALL_REQUEST_REGISTRY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/core/events/events.h"
#include "server/edge/access/stream_slots.h"

namespace ringattn::server {

class RequestCall;

// Thread safe. Its lock is held briefly, and no other lock is taken under it.
class RequestRegistry {
 public:
  explicit RequestRegistry(const Limits& limits) : slots_(limits) {}

  struct Entry {
    StreamId id = 0;                                 // 0: rejected
    ExhaustedLimit refused = ExhaustedLimit::kNone;  // the limit that was reached
    std::shared_ptr<RequestCall> evicted = nullptr;  // must be ended for the new stream
  };
  Entry Add(std::shared_ptr<RequestCall> call, const Caller& caller);
  // See StreamSlots::HeaderCame.
  ExhaustedLimit HeaderCame(StreamId id);
  void Remove(StreamId id);
  std::shared_ptr<RequestCall> Find(StreamId id) const;
  std::vector<std::shared_ptr<RequestCall>> All() const;

 private:
  mutable absl::Mutex mutex_;
  StreamSlots slots_ ABSL_GUARDED_BY(mutex_);
  StreamId last_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<StreamId, std::shared_ptr<RequestCall>> calls_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_REQUEST_REGISTRY_H_
