// KvRelays: the open relay streams by cache, so that the core can end those of fenced writers.
#ifndef RINGATTN_SERVER_EDGE_KV_KV_RELAYS_H_
#define RINGATTN_SERVER_EDGE_KV_KV_RELAYS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/limits.h"
#include "server/core/events/events.h"
#include "server/edge/access/stream_slots.h"

namespace ringattn::server {

// One relay stream, as the registry ends it.
class KvRelayStream {
 public:
  virtual ~KvRelayStream() = default;
  // Ends the stream unless it has ended.
  virtual void Fail(const Failure& failure) = 0;
  // Called about every 50 ms.
  virtual void OnTick(absl::Time now) = 0;
};

// Thread safe. Calls streams without its lock.
class KvRelays {
 public:
  explicit KvRelays(const Limits& limits) : limits_(limits) {}

  // Adds a stream until Leave. Returns the failure if the client has too many, or the server ends.
  std::optional<Failure> Enter(const std::shared_ptr<KvRelayStream>& stream, const Caller& caller,
                               absl::Duration retry_after) ABSL_LOCKS_EXCLUDED(mutex_);
  // The stream carries steps of this epoch. Ends an earlier stream of the cache.
  void Attach(const KvRelayStream* stream, const std::string& cache_id, uint64_t epoch)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void Leave(const KvRelayStream* stream) ABSL_LOCKS_EXCLUDED(mutex_);

  // Ends the cache's streams of epochs up to `epoch`.
  void End(const std::string& cache_id, uint64_t epoch, const Failure& failure)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends all current and future streams.
  void Close(const Failure& failure) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnTick(absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t streams() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    std::weak_ptr<KvRelayStream> stream;
    std::string client;
    std::string cache_id;  // empty: not attached
    uint64_t epoch = 0;
  };

  const Limits limits_;
  mutable absl::Mutex mutex_;
  std::map<const KvRelayStream*, Entry> streams_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, const KvRelayStream*> by_cache_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int64_t> by_client_ ABSL_GUARDED_BY(mutex_);
  std::optional<Failure> closed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_KV_KV_RELAYS_H_
