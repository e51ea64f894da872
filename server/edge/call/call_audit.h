// Writes the audit log's line for an ended Forward or Backward call.
#ifndef RINGATTN_SERVER_EDGE_CALL_CALL_AUDIT_H_
#define RINGATTN_SERVER_EDGE_CALL_CALL_AUDIT_H_

#include <cstdint>
#include <optional>
#include <string>

#include <grpcpp/support/status.h>

#include "absl/time/time.h"
#include "ringattn/v1/attention.pb.h"
#include "server/core/events/events.h"
#include "server/edge/access/audit_log.h"
#include "server/edge/access/callers.h"
#include "server/edge/data/data_plane.h"
#include "server/edge/header/header_translation.h"

namespace ringattn::server {

// The state of the call at its end.
struct EndedCall {
  const Caller& caller;
  const char* method;
  const std::optional<HeaderRequest>& request;   // nullopt: no header arrived
  const std::optional<BeginDownload>& download;  // nullopt: not computed
  v1::Transport transport;
  const std::string& transport_reason;  // reason for the transport; empty: no preference stated
  TransferTotals totals;
  uint64_t generation;
  absl::Duration time;
  absl::Duration download_time;
  const grpc::Status& status;
};

void WriteAuditLine(const EndedCall& call, AuditLog* audit);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_CALL_AUDIT_H_
