#include "server/edge/upload_router.h"

#include <cassert>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/wire/crc32c.h"
#include "common/wire/grpc_slices.h"
#include "common/wire/proto_values.h"
#include "server/edge/payload.h"
#include "server/edge/shard_runs.h"

namespace ringattn::server {
namespace {

Failure BadChunk(std::string field, std::string message) {
  Failure failure;
  failure.code = absl::StatusCode::kInvalidArgument;
  failure.message = std::move(message);
  failure.reason = "BAD_CHUNK";
  failure.field = std::move(field);
  return failure;
}

std::string Place(TensorId id, uint64_t offset, int64_t bytes) {
  return absl::StrCat("chunk of ", TensorName(id), " at ", offset, " with ", bytes, " bytes ");
}

std::vector<wire::Fragment> FragmentsOf(const std::vector<grpc::Slice>& slices) {
  std::vector<wire::Fragment> fragments;
  fragments.reserve(slices.size());
  for (const grpc::Slice& slice : slices) fragments.push_back({slice.begin(), slice.size()});
  return fragments;
}

}  // namespace

UploadRouter::UploadRouter(const ValidRequest& request, const ShardPlan& shards,
                           const Limits& limits)
    : max_chunk_bytes_(limits.max_chunk_bytes_up), world_size_(shards.world_size) {
  for (TensorId id : request.inputs) {
    const int64_t bytes = BytesOf(request.spec, id);
    inputs_.push_back({id, ShardMap(request.spec, shards, id), ByteRangeSet(bytes)});
    total_bytes_ += bytes;
  }
}

std::optional<Failure> UploadRouter::Check(const wire::ChunkHeader& chunk,
                                           const std::vector<grpc::Slice>& payload, int64_t bytes,
                                           Input** input) {
  const std::optional<TensorId> id = TensorFromNumber(chunk.tensor);
  if (!id.has_value()) {
    return BadChunk("chunk.tensor", absl::StrCat(chunk.tensor, " names no tensor"));
  }
  *input = nullptr;
  for (Input& candidate : inputs_) {
    if (candidate.id == *id) *input = &candidate;
  }
  if (*input == nullptr) {
    return BadChunk("chunk.tensor", absl::StrCat(TensorName(*id), " is no input of this request"));
  }
  const uint64_t size = (*input)->map.global_bytes();
  const std::string place = Place(*id, chunk.offset, bytes);
  if (chunk.offset > size || static_cast<uint64_t>(bytes) > size - chunk.offset) {
    return BadChunk(chunk.offset > size ? "chunk.offset" : "chunk.data",
                    absl::StrCat(place, "ends outside the tensor of ", size, " bytes"));
  }
  if (bytes > max_chunk_bytes_) {
    return BadChunk("chunk.data",
                    absl::StrCat(place, "is larger than the limit of ", max_chunk_bytes_));
  }
  if (bytes == 0 && size > 0) return BadChunk("chunk.data", place + "has no data");
  if (chunk.crc32c.has_value() && wire::Crc32c(FragmentsOf(payload)) != *chunk.crc32c) {
    return BadChunk("chunk.crc32c", place + "has another crc32c");
  }
  if (bytes == 0) return std::nullopt;
  switch ((*input)->arrived.Add(chunk.offset, bytes)) {
    case ByteRangeSet::Added::kNew:
      return std::nullopt;
    case ByteRangeSet::Added::kOverlaps:
      return BadChunk("chunk.offset", place + "overlaps bytes that were sent before");
    case ByteRangeSet::Added::kOutside:  // was looked at above
    case ByteRangeSet::Added::kTooManyRanges:
      break;
  }
  Failure failure = BadChunk("chunk.offset", place + "leaves too many gaps between chunks");
  failure.code = absl::StatusCode::kResourceExhausted;
  return failure;
}

UploadRouter::Parts UploadRouter::Cut(const ShardMap& map, int64_t begin,
                                      PayloadReader reader) const {
  Parts parts(world_size_);
  ShardRuns runs(&map, begin, begin + reader.left());
  while (const ByteRun* run = runs.Current()) {
    std::optional<Part>& part = parts[run->rank];
    // How much this rank gets of the chunk is not known before its end; the chunk's
    // rest bounds it.
    if (!part.has_value()) part = Part{run->local_offset, PayloadBuilder(reader.left())};
    assert(part->local_begin + part->payload.bytes() == run->local_offset);
    const int64_t run_bytes = run->bytes;
    reader.MoveTo(run_bytes, &part->payload);
    runs.Advance(run_bytes);
  }
  return parts;
}

UploadRouter::Parts UploadRouter::Copies(int64_t begin,
                                         const std::vector<grpc::Slice>& payload) const {
  Parts parts(world_size_);
  for (std::optional<Part>& part : parts) {
    PayloadReader reader(payload);  // by reference
    const int64_t bytes = reader.left();
    part = Part{begin, PayloadBuilder(bytes)};
    reader.MoveTo(bytes, &part->payload);
  }
  return parts;
}

std::optional<Failure> UploadRouter::Route(const wire::ChunkHeader& chunk,
                                           std::vector<grpc::Slice> payload,
                                           std::vector<RoutedChunk>* routed) {
  const int64_t bytes = PayloadReader(payload).left();
  Input* input = nullptr;
  if (std::optional<Failure> failure = Check(chunk, payload, bytes, &input)) return failure;
  received_bytes_ += bytes;
  if (bytes == 0) return std::nullopt;
  const auto begin = static_cast<int64_t>(chunk.offset);
  Parts parts = input->map.replicated() ? Copies(begin, payload)
                                        : Cut(input->map, begin, PayloadReader(std::move(payload)));
  for (int rank = 0; rank < world_size_; ++rank) {
    if (!parts[rank].has_value()) continue;
    Part& part = *parts[rank];
    wire::ChunkHeader header;
    header.tensor = chunk.tensor;
    header.offset = part.local_begin;
    const int64_t part_bytes = part.payload.bytes();
    // The client's crc still holds where the chunk lies in one shard.
    if (part_bytes == bytes) header.crc32c = chunk.crc32c;
    routed->push_back(
        {rank,
         wire::MakeChunkBuffer(wire::EncodeChunkPrefix(wire::kExchangeRequest, header, part_bytes),
                               part.payload.Take()),
         part_bytes});
  }
  return std::nullopt;
}

Failure UploadRouter::Incomplete() const {
  for (const Input& input : inputs_) {
    if (input.arrived.complete()) continue;
    return BadChunk("chunk.data",
                    absl::StrCat("the stream ended before all of ", TensorName(input.id),
                                 " was sent: the byte at ", input.arrived.first_missing(),
                                 " is missing, ", input.arrived.covered_bytes(), " of ",
                                 input.map.global_bytes(), " bytes arrived"));
  }
  assert(false && "nothing is missing");
  return {};
}

}  // namespace ringattn::server
