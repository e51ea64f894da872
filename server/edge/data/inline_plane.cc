#include "server/edge/data/inline_plane.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/attention/tensors.h"
#include "server/edge/data/bad_chunk.h"

namespace ringattn::server {

InlinePlane::InlinePlane(Direction direction, const ValidRequest& request, const ReplyChoice& reply,
                         const ShardPlan& shards)
    : merger_(request, shards,
              direction == Direction::kForward ? wire::kForwardResponse : wire::kBackwardResponse,
              reply.max_chunk_bytes, reply.with_crc32c,
              /*read_ahead_bytes=*/std::numeric_limits<int64_t>::max()) {
  for (TensorId id : request.inputs) totals_.bytes_up += BytesOf(request.spec, id);
  totals_.received_bytes = totals_.bytes_up;
  totals_.sent_bytes = totals_.bytes_down = merger_.total_bytes();
}

absl::StatusOr<std::vector<DownloadMerger::Chunk>> InlinePlane::Cut(
    const google::protobuf::RepeatedPtrField<v1::TensorChunk>& outputs) {
  for (const v1::TensorChunk& output : outputs) {
    wire::ChunkHeader header;
    header.tensor = static_cast<int>(output.tensor());
    header.offset = output.offset();
    absl::Status added = merger_.Add(/*rank=*/0, header, {grpc::Slice(output.data())});
    if (!added.ok()) return added;
  }
  std::vector<DownloadMerger::Chunk> chunks;
  while (std::optional<DownloadMerger::Chunk> chunk = merger_.Next()) {
    chunks.push_back(*std::move(chunk));
  }
  if (merger_.done()) return chunks;
  return absl::InternalError(
      absl::StrCat("sent ", merger_.sent_bytes(), " of ", merger_.total_bytes(), " output bytes"));
}

std::optional<Failure> InlinePlane::Feed(const grpc::ByteBuffer&) {
  return BadChunk("chunk", "the header carried all tensors: no message may follow it");
}

TransferStalls InlinePlane::Look() {
  TransferStalls stalls;
  stalls.known = false;
  return stalls;
}

}  // namespace ringattn::server
