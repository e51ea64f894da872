// The audit log's line of a Forward or Backward call that has ended.
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

// What is known of the call at its end.
struct EndedCall {
  const Caller& caller;
  const char* method;
  const std::optional<HeaderRequest>& request;   // none: no header came
  const std::optional<BeginDownload>& download;  // none: nothing was computed
  v1::Transport transport;
  const std::string& transport_reason;  // why the tensors took this way; empty: nothing was asked
  TransferTotals totals;
  uint64_t generation;
  absl::Duration time;
  absl::Duration download_time;
  const grpc::Status& status;
};

void WriteAuditLine(const EndedCall& call, AuditLog* audit);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_CALL_AUDIT_H_
