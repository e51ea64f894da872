// RequestContext: the server's parts that every Forward and Backward call uses.
#ifndef RINGATTN_SERVER_EDGE_CALL_REQUEST_CONTEXT_H_
#define RINGATTN_SERVER_EDGE_CALL_REQUEST_CONTEXT_H_

#include <string>

#include "absl/time/time.h"
#include "common/base/limits.h"
#include "server/edge/access/audit_log.h"
#include "server/edge/access/callers.h"
#include "server/edge/call/calls_streams.h"
#include "server/edge/call/lease_holds.h"
#include "server/edge/call/request_registry.h"
#include "server/edge/call/writer_groups.h"
#include "server/edge/data/data_plane.h"
#include "server/edge/data/shard_client.h"
#include "server/edge/loop/core_loop.h"
#include "server/edge/status/server_metrics.h"

namespace ringattn::server {

// All members outlive the server's calls and are constant while it serves.
struct RequestContext {
  Limits limits;
  std::string secret;
  absl::Duration retry_after = absl::Seconds(1);
  CoreLoop* core = nullptr;
  RequestRegistry* registry = nullptr;
  WriterGroups* writers = nullptr;
  ShardChannels* channels = nullptr;
  ServerMetrics* metrics = nullptr;
  Callers* callers = nullptr;
  LeaseHolds* holds = nullptr;  // of residuals
  CallsStreams* calls_streams = nullptr;
  AuditLog* audit = nullptr;  // null: no audit log
  // Null: CoordinatorRelay.
  MakeDataPlane make_data_plane = nullptr;
  // Interval of transfer reports to the core, whose limits are in seconds.
  absl::Duration report_interval = absl::Milliseconds(200);
  // A broken connection first appears as a half-close; gRPC reports the cancellation within this
  // time.
  absl::Duration cancel_notice = absl::Milliseconds(100);
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_REQUEST_CONTEXT_H_
