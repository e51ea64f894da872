// KvContext: the server's parts that the calls of KvCacheService use.
#ifndef RINGATTN_SERVER_EDGE_KV_KV_CONTEXT_H_
#define RINGATTN_SERVER_EDGE_KV_KV_CONTEXT_H_

#include <string>

#include "absl/time/time.h"
#include "common/base/limits.h"
#include "server/edge/access/audit_log.h"
#include "server/edge/access/callers.h"
#include "server/edge/call/lease_holds.h"
#include "server/edge/data/shard_client.h"
#include "server/edge/loop/core_loop.h"
#include "server/edge/status/server_metrics.h"

namespace ringattn::server {

class KvRelays;

// All members outlive the server's calls and are constant while it serves.
struct KvContext {
  Limits limits;
  std::string secret;
  absl::Duration retry_after = absl::Seconds(1);
  CoreLoop* core = nullptr;
  Callers* callers = nullptr;
  ShardChannels* channels = nullptr;
  ServerMetrics* metrics = nullptr;
  LeaseHolds* holds = nullptr;  // of caches
  KvRelays* relays = nullptr;
  AuditLog* audit = nullptr;  // null: no audit log
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_KV_KV_CONTEXT_H_
