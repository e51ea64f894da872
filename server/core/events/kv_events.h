// Events and actions of K/V caches (events.h), and views of caches for the edge and for metrics.
#ifndef RINGATTN_SERVER_CORE_EVENTS_KV_EVENTS_H_
#define RINGATTN_SERVER_CORE_EVENTS_KV_EVENTS_H_

#include <array>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/kv/cache_spec.h"
#include "common/kv/placement.h"
#include "ringattn/v1/kv_cache.pb.h"
#include "server/core/events/client_terms.h"
#include "server/core/events/failure.h"

namespace ringattn::server {

// The reason that a cache ended.
enum class KvCacheEnd : uint8_t {
  kExpired,       // its lease
  kDeleted,       // by its client
  kLost,          // with a worker
  kRanksDiffer,   // its ranks have different block tables
  kInconsistent,  // its ranks' logs cannot be settled
};
inline constexpr KvCacheEnd kKvCacheEnds[] = {KvCacheEnd::kExpired, KvCacheEnd::kDeleted,
                                              KvCacheEnd::kLost, KvCacheEnd::kRanksDiffer,
                                              KvCacheEnd::kInconsistent};
const char* KvCacheEndName(KvCacheEnd end);    // "expired", ...
const char* KvCacheEndReason(KvCacheEnd end);  // "KV_EXPIRED", ...

// ---------------------------------------------------------------- events

// The CreateCache RPC with a validated specification. Answered by KvCacheAnswered.
struct KvCacheRequested {
  uint64_t call = 0;  // identifies the RPC
  std::string principal;
  std::string client;  // that the quota applies to
  ClientTerms terms;
  std::string request_id;    // empty: the request is not repeated
  uint64_t fingerprint = 0;  // of the request without request_id
  std::string id;            // 128 random bits for a new cache
  std::shared_ptr<const KvCacheSpec> spec;
  absl::Duration ttl;
  std::optional<int> world_size;
  std::vector<std::string> members;
  bool divide_blocks = false;
};
// The OpenCache RPC. Answered by KvWriterAnswered.
struct KvWriterRequested {
  uint64_t call = 0;
  std::string principal;
  std::string id;
  std::string token_seed;  // 32 random bytes; the tokens of this epoch are derived from it
  std::string region_id;   // of the caller's step rings; empty: none
  // The caller prefers host memory to direct streams, and these to the relay.
  bool accepts_host_memory = false;
  bool accepts_direct = false;
  bool accepts_relay = false;
  uint64_t answered_step = 0;
  std::vector<std::string> endpoints = {};  // of direct streams, by rank; set by the core
};
struct KvCachesRenewed {  // a hold
  std::vector<std::string> ids;
  std::string principal;
  absl::Duration ttl;
};
struct KvCacheDeleted {  // the DeleteCache RPC
  std::string id;
  std::string principal;
};
// The relay found that the cache cannot go on in this epoch.
struct KvCacheFailed {
  std::string id;
  uint64_t epoch = 0;
  KvCacheEnd end = KvCacheEnd::kLost;
};

// ---------------------------------------------------------------- actions

struct KvCacheAnswered {
  uint64_t call = 0;
  std::optional<Failure> failure;
  v1::CreateCacheResponse response;  // valid unless `failure` is set
};
struct KvWriterAnswered {
  uint64_t call = 0;
  std::optional<Failure> failure;
  v1::OpenCacheResponse response;  // valid unless `failure` is set
};
// Relayed streams of the cache's epochs up to `epoch` must end with this failure.
struct KvWriterEnded {
  std::string id;
  uint64_t epoch = 0;
  Failure failure;
};

// ---------------------------------------------------------------- views

// What the relay needs to serve a writer, or the reason that it must not.
struct KvWriterView {
  std::optional<Failure> failure;
  std::shared_ptr<const KvCacheSpec> spec;
  KvPlacement placement;
  struct Shard {
    std::string worker;
    std::string data_address;
    std::string token;
  };
  std::vector<Shard> shards;  // by rank
};

// The state of a cache, or the reason that the caller does not see it.
struct KvCacheView {
  std::optional<Failure> failure;  // KV_NOT_FOUND
  v1::KvCacheInfo info;            // without `ended`
  std::optional<Failure> ended;    // why it is gone
};

// For metrics.
struct KvCacheCounts {
  int64_t caches = 0;  // that exist
  int64_t open = 0;    // that have a writer
  int64_t bytes = 0;   // summed over workers
  // Since the start.
  int64_t created = 0;
  int64_t refused = 0;                                   // CreateCache calls that failed
  int64_t opened = 0;                                    // epochs that began
  int64_t adopted = 0;                                   // taken over from an earlier coordinator
  std::array<int64_t, std::size(kKvCacheEnds)> ended{};  // by KvCacheEnd
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_EVENTS_KV_EVENTS_H_
