#include "server/edge/call/call_audit.h"

#include <algorithm>

#include "common/attention/dtype.h"
#include "server/edge/header/error_details.h"
#include "server/edge/status/server_metrics.h"

namespace ringattn::server {

void WriteAuditLine(const EndedCall& call, AuditLog* audit) {
  static const AttentionSpec* const kNoSpec = new AttentionSpec;
  const AttentionSpec& spec = call.request.has_value() ? call.request->valid.spec : *kNoSpec;
  const BeginDownload& times = call.download.has_value() ? *call.download : BeginDownload();
  audit->Write({{"client", call.caller.principal},
                {"peer", call.caller.connection},
                {"request_id", call.request.has_value() ? call.request->request_id : std::string()},
                {"method", call.method},
                {"prepare", call.request.has_value() && call.request->valid.prepare_ttl},
                {"code", CodeName(call.status.error_code())},
                {"error", call.status.error_message()},
                {"has_header", call.request.has_value()},
                {"dtype", DTypeName(spec.dtype)},
                {"batch", spec.shape.batch},
                {"seq_len_q", spec.shape.seq_len_q},
                {"seq_len_kv", spec.shape.seq_len_kv},
                {"heads", spec.shape.num_heads},
                {"kv_heads", spec.shape.num_kv_heads},
                {"head_dim", spec.shape.head_dim},
                {"documents", std::max<int64_t>(0, spec.shape.num_documents())},
                {"transport", TransportName(call.transport)},
                {"transport_reason", call.transport_reason},
                {"bytes_up", call.totals.received_bytes},
                {"bytes_down", call.totals.sent_bytes},
                {"generation", call.generation},
                {"seconds", absl::ToDoubleSeconds(call.time)},
                {"queue_seconds", absl::ToDoubleSeconds(times.queue_time)},
                {"upload_seconds", absl::ToDoubleSeconds(times.upload_time)},
                {"compute_seconds", absl::ToDoubleSeconds(times.compute_time)},
                {"download_seconds", absl::ToDoubleSeconds(call.download_time)}});
}

}  // namespace ringattn::server
