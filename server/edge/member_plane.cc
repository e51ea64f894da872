#include "server/edge/member_plane.h"

#include <algorithm>

#include "common/attention/tensors.h"

namespace ringattn::server {

MemberPlane::MemberPlane(const TransferSpec& spec)
    : by_host_memory_(spec.accept.transport == v1::TRANSPORT_HOST_MEMORY) {
  for (TensorId id : spec.request.inputs) totals_.bytes_up += BytesOf(spec.request.spec, id);
  for (TensorId id : spec.request.outputs) totals_.bytes_down += BytesOf(spec.request.spec, id);
}

std::optional<Failure> MemberPlane::Feed(const grpc::ByteBuffer&) {
  Failure failure;
  failure.code = absl::StatusCode::kInvalidArgument;
  failure.reason = "BAD_CHUNK";
  failure.field = "chunk";
  failure.message =
      by_host_memory_ ? "the tensors are taken from host memory (Accepted.transport): no message "
                        "may follow the header"
                      : "the tensors go to the workers (Accepted.transport): no message may follow "
                        "the header";
  return failure;
}

// The members have all their inputs, or they could not have computed.
void MemberPlane::Drain() {
  absl::MutexLock lock(&mutex_);
  totals_.received_bytes = totals_.bytes_up;
}

TransferStalls MemberPlane::Look() {
  TransferStalls stalls;
  stalls.known = false;
  absl::MutexLock lock(&mutex_);
  stalls.waits_for_input = waits_for_client_ && totals_.received_bytes < totals_.bytes_up;
  return stalls;
}

TransferTotals MemberPlane::totals() const {
  absl::MutexLock lock(&mutex_);
  return totals_;
}

// A tensor that every member takes whole counts once for each of them: no more than all of it.
void MemberPlane::Advanced(const TransferAdvanced& advanced) {
  absl::MutexLock lock(&mutex_);
  totals_.received_bytes =
      std::max(totals_.received_bytes, std::min(advanced.received_bytes, totals_.bytes_up));
  totals_.sent_bytes =
      std::max(totals_.sent_bytes, std::min(advanced.sent_bytes, totals_.bytes_down));
  waits_for_client_ = advanced.waits_for_client;
}

void MemberPlane::Succeeded() {
  absl::MutexLock lock(&mutex_);
  totals_.received_bytes = totals_.bytes_up;
  totals_.sent_bytes = totals_.bytes_down;
}

}  // namespace ringattn::server
