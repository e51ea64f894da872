#include "server/edge/data/upload_router.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/wire/crc32c.h"
#include "common/wire/grpc_slices.h"
#include "common/wire/proto_values.h"
#include "server/edge/data/bad_chunk.h"
#include "server/edge/data/payload.h"
#include "server/edge/data/shard_runs.h"

namespace ringattn::server {
namespace {

std::string ChunkPrefix(TensorId id, uint64_t offset, int64_t bytes) {
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
    inputs_.push_back({id, TensorRoute::ForUpload(request.spec, shards, id), ByteRangeSet(bytes)});
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
    return BadChunk("chunk.tensor",
                    absl::StrCat(TensorName(*id), " is not an input of this request"));
  }
  const uint64_t size = (*input)->route.global_bytes();
  const std::string prefix = ChunkPrefix(*id, chunk.offset, bytes);
  if (chunk.offset > size || static_cast<uint64_t>(bytes) > size - chunk.offset) {
    return BadChunk(chunk.offset > size ? "chunk.offset" : "chunk.data",
                    absl::StrCat(prefix, "ends outside the tensor of ", size, " bytes"));
  }
  if (bytes > max_chunk_bytes_) {
    return BadChunk("chunk.data",
                    absl::StrCat(prefix, "is larger than the limit of ", max_chunk_bytes_));
  }
  if (bytes == 0 && size > 0) return BadChunk("chunk.data", prefix + "has no data");
  if (chunk.crc32c.has_value() && wire::Crc32c(FragmentsOf(payload)) != *chunk.crc32c) {
    return BadChunk("chunk.crc32c", prefix + "does not match its crc32c");
  }
  if (bytes == 0) return std::nullopt;
  switch ((*input)->arrived.Add(chunk.offset, bytes)) {
    case ByteRangeSet::Added::kNew:
      return std::nullopt;
    case ByteRangeSet::Added::kOverlaps:
      return BadChunk("chunk.offset", prefix + "overlaps bytes that were sent before");
    case ByteRangeSet::Added::kOutside:  // checked above
    case ByteRangeSet::Added::kTooManyRanges:
      break;
  }
  Failure failure = BadChunk("chunk.offset", prefix + "leaves too many gaps between chunks");
  failure.code = absl::StatusCode::kResourceExhausted;
  return failure;
}

UploadRouter::Parts UploadRouter::Cut(const TensorRoute& route, int64_t begin,
                                      PayloadReader reader) const {
  const int64_t bytes = reader.left();
  const size_t tensors = route.parts().size();
  std::vector<std::optional<Part>> by_place(world_size_ * tensors);
  ShardRuns runs(&route, begin, begin + bytes);
  while (const ByteRun* run = runs.Current()) {
    std::optional<Part>& part = by_place[run->rank * tensors + run->part];
    // The rank's share of the chunk is known only at the end; the rest of the chunk bounds it.
    if (!part.has_value()) {
      part = Part{run->rank, route.parts()[run->part], run->local_offset,
                  PayloadBuilder(reader.left())};
    }
    assert(part->local_begin + part->payload.bytes() == run->local_offset);
    const int64_t run_bytes = run->bytes;
    reader.MoveTo(run_bytes, &part->payload);
    runs.Advance(run_bytes);
  }
  Parts parts;
  for (std::optional<Part>& part : by_place) {
    if (part.has_value()) parts.push_back(*std::move(part));
  }
  if (parts.size() == 1) parts[0].is_whole_chunk = true;
  return parts;
}

// Copies the bytes in shard order and drops bytes that no shard has.
UploadRouter::Parts UploadRouter::Gather(const TensorRoute& route, int64_t begin,
                                         const std::vector<grpc::Slice>& payload) const {
  const int64_t bytes = PayloadReader(payload).left();
  std::vector<uint8_t> whole;
  whole.reserve(bytes);
  for (const grpc::Slice& slice : payload) whole.insert(whole.end(), slice.begin(), slice.end());

  std::vector<ByteRun> runs;
  for (const ByteRun& run : route.FromGlobal(begin, bytes)) {
    if (run.rank != kNoRank) runs.push_back(run);
  }
  std::sort(runs.begin(), runs.end(), [](const ByteRun& a, const ByteRun& b) {
    return std::tie(a.rank, a.part, a.local_offset) < std::tie(b.rank, b.part, b.local_offset);
  });
  Parts parts;
  for (size_t first = 0; first < runs.size();) {
    size_t end = first + 1;
    int64_t part_bytes = runs[first].bytes;
    const auto continues = [&](const ByteRun& run) {
      return run.rank == runs[first].rank && run.part == runs[first].part &&
             run.local_offset == runs[first].local_offset + part_bytes;
    };
    while (end < runs.size() && continues(runs[end])) part_bytes += runs[end++].bytes;
    grpc::Slice gathered(grpc_slice_malloc(part_bytes), grpc::Slice::STEAL_REF);
    // The slice has no other reference yet.
    auto* target = const_cast<uint8_t*>(gathered.begin());
    for (size_t i = first; i < end; ++i) {
      std::memcpy(target, whole.data() + (runs[i].global_offset - begin), runs[i].bytes);
      target += runs[i].bytes;
    }
    Part part{runs[first].rank, route.parts()[runs[first].part], runs[first].local_offset,
              PayloadBuilder(part_bytes)};
    part.payload.Append(gathered, 0, part_bytes);
    parts.push_back(std::move(part));
    first = end;
  }
  return parts;
}

UploadRouter::Parts UploadRouter::Copies(TensorId id, int64_t begin,
                                         const std::vector<grpc::Slice>& payload) const {
  Parts parts;
  for (int rank = 0; rank < world_size_; ++rank) {
    PayloadReader reader(payload);  // by reference
    const int64_t bytes = reader.left();
    parts.push_back({rank, id, begin, PayloadBuilder(bytes), true});
    reader.MoveTo(bytes, &parts.back().payload);
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
  const TensorRoute& route = input->route;
  Parts parts = route.replicated()  ? Copies(input->id, begin, payload)
                : route.scattered() ? Gather(route, begin, payload)
                                    : Cut(route, begin, PayloadReader(std::move(payload)));
  for (Part& part : parts) {
    wire::ChunkHeader header;
    header.tensor = static_cast<int>(part.tensor);
    header.offset = part.local_begin;
    const int64_t part_bytes = part.payload.bytes();
    // The client's crc applies if the chunk lies in one shard.
    if (part.is_whole_chunk) header.crc32c = chunk.crc32c;
    routed->push_back(
        {part.rank,
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
                                 input.route.global_bytes(), " bytes arrived"));
  }
  assert(false && "nothing is missing");
  return {};
}

}  // namespace ringattn::server
