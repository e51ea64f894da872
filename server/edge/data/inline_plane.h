// InlinePlane: the data plane of an inline operation, whose tensors travel in Reserve and Finished.
// It cuts the worker's outputs into the client's chunks.
#ifndef RINGATTN_SERVER_EDGE_DATA_INLINE_PLANE_H_
#define RINGATTN_SERVER_EDGE_DATA_INLINE_PLANE_H_

#include <optional>
#include <vector>

#include <grpcpp/support/byte_buffer.h>

#include "absl/status/statusor.h"
#include "server/edge/data/data_plane.h"
#include "server/edge/data/download_merger.h"

namespace ringattn::server {

// Thread safe once constructed, except for Cut. The tensors are small (kMaxInlineRunBytes), so the
// core's thread may call every function.
class InlinePlane final : public DataPlane {
 public:
  // REQUIRES: one member, and `shards` with spans.
  InlinePlane(Direction direction, const ValidRequest& request, const ReplyChoice& reply,
              const ShardPlan& shards);

  // Returns the client's messages. INTERNAL: the outputs are not those of the request. Call once.
  absl::StatusOr<std::vector<DownloadMerger::Chunk>> Cut(
      const google::protobuf::RepeatedPtrField<v1::TensorChunk>& outputs);

  std::optional<Failure> Open() override { return std::nullopt; }
  std::optional<Failure> Feed(const grpc::ByteBuffer& message) override;
  bool HasRoom() const override { return true; }  // the end of the stream, or a chunk to reject
  bool complete() const override { return true; }
  Failure Incomplete() const override { return {}; }  // never called
  void Drain() override {}                            // Cut does it
  void Delivered(int64_t) override {}
  TransferStalls Look() override;
  TransferTotals totals() const override { return totals_; }
  void Stop() override {}

 private:
  DownloadMerger merger_;
  TransferTotals totals_;  // constant: the operation has run
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_DATA_INLINE_PLANE_H_
