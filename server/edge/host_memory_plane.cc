#include "server/edge/host_memory_plane.h"

#include <algorithm>

#include "common/attention/tensors.h"

namespace ringattn::server {

HostMemoryPlane::HostMemoryPlane(const TransferSpec& spec) {
  for (TensorId id : spec.request.inputs) totals_.bytes_up += BytesOf(spec.request.spec, id);
  for (TensorId id : spec.request.outputs) totals_.bytes_down += BytesOf(spec.request.spec, id);
}

std::optional<Failure> HostMemoryPlane::Feed(const grpc::ByteBuffer&) {
  Failure failure;
  failure.code = absl::StatusCode::kInvalidArgument;
  failure.reason = "BAD_CHUNK";
  failure.field = "chunk";
  failure.message =
      "the tensors are taken from host memory (Accepted.transport): no message may "
      "follow the header";
  return failure;
}

// The members have all their inputs, or they could not have computed.
void HostMemoryPlane::Drain() {
  absl::MutexLock lock(&mutex_);
  totals_.received_bytes = totals_.bytes_up;
}

TransferStalls HostMemoryPlane::Look() {
  TransferStalls stalls;
  stalls.known = false;
  return stalls;
}

TransferTotals HostMemoryPlane::totals() const {
  absl::MutexLock lock(&mutex_);
  return totals_;
}

// A tensor that every member takes whole counts once for each of them: no more than all of it.
void HostMemoryPlane::Advanced(int64_t received_bytes, int64_t sent_bytes) {
  absl::MutexLock lock(&mutex_);
  totals_.received_bytes =
      std::max(totals_.received_bytes, std::min(received_bytes, totals_.bytes_up));
  totals_.sent_bytes = std::max(totals_.sent_bytes, std::min(sent_bytes, totals_.bytes_down));
}

void HostMemoryPlane::Succeeded() {
  absl::MutexLock lock(&mutex_);
  totals_.received_bytes = totals_.bytes_up;
  totals_.sent_bytes = totals_.bytes_down;
}

}  // namespace ringattn::server
