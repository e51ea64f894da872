// MemberPlane: the data plane of a request whose tensors bypass this process. The members copy them
// from and to memory that the client shares, or the client streams them to the members. The members
// report progress to the core. This class rejects chunks and reports the sums.
#ifndef RINGATTN_SERVER_EDGE_DATA_MEMBER_PLANE_H_
#define RINGATTN_SERVER_EDGE_DATA_MEMBER_PLANE_H_

#include <cstdint>
#include <optional>

#include <grpcpp/support/byte_buffer.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/edge/data/data_plane.h"

namespace ringattn::server {

// Thread safe.
class MemberPlane final : public DataPlane {
 public:
  MemberPlane(const ValidRequest& request, v1::Transport transport);

  std::optional<Failure> Open() override { return std::nullopt; }
  std::optional<Failure> Feed(const grpc::ByteBuffer& message) override;
  bool HasRoom() const override { return true; }  // the end of the stream, or a chunk to reject
  bool complete() const override { return true; }
  Failure Incomplete() const override { return {}; }  // never called
  void Drain() override;
  void Delivered(int64_t) override {}
  TransferStalls Look() override;
  TransferTotals totals() const override ABSL_LOCKS_EXCLUDED(mutex_);
  void Advanced(const TransferAdvanced& advanced) override ABSL_LOCKS_EXCLUDED(mutex_);
  void Succeeded() override ABSL_LOCKS_EXCLUDED(mutex_);
  void Stop() override {}

 private:
  mutable absl::Mutex mutex_;
  TransferTotals totals_ ABSL_GUARDED_BY(mutex_);
  bool waits_for_client_ ABSL_GUARDED_BY(mutex_) = false;
  const v1::Transport transport_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_DATA_MEMBER_PLANE_H_
