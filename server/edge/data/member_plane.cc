#include "server/edge/data/member_plane.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/attention/tensors.h"
#include "server/edge/data/bad_chunk.h"

namespace ringattn::server {

MemberPlane::MemberPlane(const ValidRequest& request, v1::Transport transport)
    : transport_(transport) {
  for (TensorId id : request.inputs) totals_.bytes_up += BytesOf(request.spec, id);
  for (TensorId id : request.outputs) totals_.bytes_down += BytesOf(request.spec, id);
}

std::optional<Failure> MemberPlane::Feed(const grpc::ByteBuffer&) {
  const char* const way = transport_ == v1::TRANSPORT_HOST_MEMORY   ? "are copied from host memory"
                          : transport_ == v1::TRANSPORT_CUDA_MEMORY ? "are copied from CUDA memory"
                                                                    : "go to the workers";
  return BadChunk("chunk", absl::StrCat("the tensors ", way,
                                        " (Accepted.transport): no message may follow the header"));
}

// The members have computed, so they have all inputs.
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

// A tensor that every member takes whole is counted once per member, so the sum is clamped.
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
