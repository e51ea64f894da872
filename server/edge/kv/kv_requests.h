// Validates the requests of KvCacheService and turns them into events of the core. Pure, except for
// the random ids and seeds.
// Tests: kv_requests_test.
#ifndef RINGATTN_SERVER_EDGE_KV_KV_REQUESTS_H_
#define RINGATTN_SERVER_EDGE_KV_KV_REQUESTS_H_

#include <variant>

#include "common/base/limits.h"
#include "ringattn/v1/kv_cache.pb.h"
#include "server/core/events/events.h"
#include "server/edge/access/stream_slots.h"

namespace ringattn::server {

inline constexpr size_t kKvCacheIdBytes = 16;

// Both leave `call` at 0.
std::variant<KvCacheRequested, Failure> ReadCreateCache(const v1::CreateCacheRequest& request,
                                                        const Caller& caller, const Limits& limits);
std::variant<KvWriterRequested, Failure> ReadOpenCache(const v1::OpenCacheRequest& request,
                                                       const Caller& caller);

struct KvPage {
  int size = 100;
  std::string after;  // id; empty: from the start
};
std::variant<KvPage, Failure> ReadListCaches(const v1::ListCachesRequest& request);

// The failure of a status that names a field at the start of its message, e.g. ParseKvCacheSpec's
// and ParseStep's, or that has a KvErrorReason.
Failure KvRequestFailure(const absl::Status& status);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_KV_KV_REQUESTS_H_
