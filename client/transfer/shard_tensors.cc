#include "client/transfer/shard_tensors.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/transfer/server_error.h"
#include "client/transfer/tensor_bytes.h"
#include "common/layout/tensor_route.h"
#include "common/layout/writer_rows.h"
#include "common/wire/crc32c.h"
#include "common/wire/token_spans.h"

namespace ringattn::client {
namespace {

// Shorter pieces are gathered into one buffer, because a slice costs about as much as copying them.
constexpr int64_t kShortestPiece = 16 << 10;

// The most ranges of one input to all members. More messages take far longer than their bytes.
constexpr size_t kMostRanges = 16 << 10;

// The map of one tensor, which is sharded along its axis.
absl::StatusOr<ShardMap> MapOf(v1::TensorId tensor, const TensorLayout& layout,
                               const ShardPlan& plan) {
  std::vector<Shard> shards = ShardsOf(plan, layout);
  const bool is_cut = layout.axis == Axis::kQ || layout.axis == Axis::kKv;
  if (is_cut) {
    if (const std::string why = CheckCover(shards, layout.rows, "rank"); !why.empty()) {
      return ServerError(absl::StrCat("the tickets do not cover each token of ",
                                      TensorIdName(tensor), " once: ", why));
    }
  }
  return ShardMap(layout, shards);
}

}  // namespace

uint64_t ShardTensors::Route::bytes(int rank) const {
  int64_t bytes = 0;
  for (const WriterRange& range : ranges[rank]) bytes += range.end - range.begin;
  return bytes;
}

// Visits one window at a time. With runs of four bytes, a list for a whole chunk would be larger
// than the chunk.
template <typename Visit>
void ShardTensors::Route::ForEachRun(int rank, int64_t offset, int64_t bytes,
                                     const Visit& visit) const {
  constexpr int64_t kWindow = 64 << 10;
  for (const int64_t end = offset + bytes; offset < end; offset += kWindow) {
    for (const ByteRun& run : map.FromLocal(rank, offset, std::min(kWindow, end - offset))) {
      if (!writer.has_value()) {
        visit(run.global_offset, run.bytes);
        continue;
      }
      for (const ByteRun& held : writer->FromGlobal(run.global_offset, run.bytes)) {
        visit(held.rank == 0 ? held.local_offset : int64_t{-1}, held.bytes);
      }
    }
  }
}

absl::StatusOr<std::unique_ptr<ShardTensors>> ShardTensors::Make(
    const google::protobuf::RepeatedPtrField<v1::ShardTicket>& tickets,
    std::vector<InputTensor> inputs, std::vector<OutputTensor> outputs, uint64_t max_chunk_bytes,
    bool pairs_by_keys, const std::optional<WriterChoice>& writer) {
  if (tickets.empty()) return ServerError("a direct stream without tickets");
  ShardPlan plan;
  plan.world_size = tickets.size();
  for (int rank = 0; rank < tickets.size(); ++rank) {
    const v1::ShardTicket& ticket = tickets[rank];
    if (ticket.rank() != static_cast<uint32_t>(rank) || ticket.endpoints().empty() ||
        ticket.token().empty()) {
      return ServerError(absl::StrCat("the ticket of rank ", rank, " is malformed"));
    }
    for (const auto& [spans, shards] :
         {std::pair(&ticket.q(), &plan.q), std::pair(&ticket.kv(), &plan.kv)}) {
      absl::StatusOr<Shard> shard = FromProto(*spans);
      if (!shard.ok()) return ServerError(absl::StrCat("a ticket: ", shard.status().message()));
      shards->push_back(*std::move(shard));
    }
  }
  int64_t keys = 0;
  for (const Shard& shard : plan.kv) keys += RowsIn(shard);
  const auto map_of = [&](v1::TensorId tensor,
                          const TensorLayout& layout) -> absl::StatusOr<ShardMap> {
    const bool is_pairs = InfoOf(static_cast<TensorId>(tensor)).form == TensorForm::kPairs;
    if (!pairs_by_keys || !is_pairs) return MapOf(tensor, layout, plan);
    if (keys > 0 && (layout.inner_bytes < keys || layout.inner_bytes % keys != 0)) {
      return ServerError(
          absl::StrCat("the tickets do not cover the columns of ", TensorIdName(tensor)));
    }
    return MapOf(tensor, CutByKeys(layout, keys), plan);
  };
  const auto route_of = [&](v1::TensorId tensor, const TensorLayout& layout,
                            bool is_input) -> absl::StatusOr<Route> {
    absl::StatusOr<ShardMap> map = map_of(tensor, layout);
    if (!map.ok()) return map.status();
    Route route{*std::move(map), std::nullopt, {}};
    const bool splits = writer.has_value() && IsSplitByWriters(static_cast<TensorId>(tensor));
    if (splits) {
      const Shard& own = layout.axis == Axis::kQ ? writer->rows.q : writer->rows.kv;
      const std::vector<Shard> all = {own, RestOf(own, layout.rows)};
      if (const std::string why = CheckCover(all, layout.rows, "span"); !why.empty()) {
        return absl::InvalidArgumentError(
            absl::StrCat("writer: the tokens of ", TensorIdName(tensor), ": ", why));
      }
      route.writer.emplace(layout, all);
    }
    size_t ranges = 0;
    for (int rank = 0; rank < plan.world_size; ++rank) {
      const int64_t bytes = route.map.local_bytes(rank);
      std::vector<WriterRange>& ranges_of_rank = route.ranges.emplace_back();
      if (splits) {
        ranges_of_rank = RangesOfWriter(route.map, rank, *route.writer, 0, /*gap_bytes=*/0);
      } else if (bytes > 0 && (!is_input || !writer.has_value() || writer->index == 0)) {
        ranges_of_rank = {{0, bytes}};
      }
      ranges += ranges_of_rank.size();
    }
    // Each range of an input is a message.
    if (is_input && ranges > kMostRanges) {
      return absl::FailedPreconditionError(
          absl::StrCat("direct streams would send ", TensorIdName(tensor), " in ", ranges,
                       " pieces, more than ", kMostRanges,
                       ", because the plan's layout differs from the writers' rows; choose "
                       "plan.layout and plan.world_size after them, or host memory"));
    }
    return route;
  };
  std::unique_ptr<ShardTensors> tensors(new ShardTensors);
  tensors->max_chunk_bytes_ = static_cast<int64_t>(max_chunk_bytes);
  for (InputTensor& input : inputs) {
    if (!IsCutAsOne(plan, static_cast<TensorId>(input.tensor))) {
      return ServerError(absl::StrCat("the tickets shard the components of ",
                                      TensorIdName(input.tensor), " differently"));
    }
    absl::StatusOr<Route> route = route_of(input.tensor, input.layout, /*is_input=*/true);
    if (!route.ok()) return route.status();
    tensors->inputs_.push_back({std::move(input), *std::move(route)});
  }
  for (OutputTensor& output : outputs) {
    absl::StatusOr<Route> route = route_of(output.tensor, output.layout, /*is_input=*/false);
    if (!route.ok()) return route.status();
    tensors->outputs_.push_back({std::move(output), *std::move(route)});
  }
  for (int rank = 0; rank < plan.world_size; ++rank) {
    auto source = std::make_unique<Source>();
    for (const Input& input : tensors->inputs_) source->bytes += input.route.bytes(rank);
    tensors->bytes_up_ += source->bytes;
    tensors->sources_.push_back(std::move(source));
    auto sink = std::make_unique<Sink>();
    absl::MutexLock lock(&sink->mutex);
    for (const Output& output : tensors->outputs_) {
      sink->arrived.emplace_back(output.route.map.local_bytes(rank));
    }
    tensors->bytes_down_ += tensors->bytes_down(rank);
    tensors->sinks_.push_back(std::move(sink));
  }
  return tensors;
}

uint64_t ShardTensors::bytes_down(int rank) const {
  uint64_t bytes = 0;
  for (const Output& output : outputs_) bytes += output.route.bytes(rank);
  return bytes;
}

// --- Inputs -----------------------------------------------------------------------

std::optional<ShardTensors::Chunk> ShardTensors::Next(int rank) {
  Source& source = *sources_[rank];
  const Input* input = nullptr;
  int64_t offset = 0, bytes = 0;
  {
    absl::MutexLock lock(&source.mutex);
    while (source.tensor < inputs_.size() &&
           source.range == inputs_[source.tensor].route.ranges[rank].size()) {
      ++source.tensor;
      source.range = 0;
    }
    if (source.tensor == inputs_.size()) return std::nullopt;
    input = &inputs_[source.tensor];
    const WriterRange& range = input->route.ranges[rank][source.range];
    offset = range.begin + source.offset;
    bytes = std::min(max_chunk_bytes_, range.end - offset);
    source.offset += bytes;
    if (range.begin + source.offset == range.end) {
      ++source.range;
      source.offset = 0;
    }
  }
  dealt_bytes_ += bytes;
  return Cut(*input, rank, offset, bytes);
}

ShardTensors::Chunk ShardTensors::Cut(const Input& input, int rank, int64_t offset,
                                      int64_t bytes) const {
  Chunk chunk{input.tensor.tensor, static_cast<uint64_t>(offset), static_cast<uint64_t>(bytes)};
  uint8_t* target = nullptr;  // where the next bytes are gathered, once gathering has started
  const auto gather = [&target](const uint8_t* data, uint64_t size) {
    std::memcpy(target, data, size);
    target += size;
  };
  const auto add = [&](const uint8_t* data, uint64_t size) {
    if (target != nullptr) return gather(data, size);
    std::vector<ConstBytes>& pieces = chunk.pieces;
    if (!pieces.empty() && pieces.back().data() + pieces.back().size() == data) {
      pieces.back() = ConstBytes(pieces.back().data(), pieces.back().size() + size);
      return;
    }
    pieces.emplace_back(data, size);
    const auto count = static_cast<int64_t>(pieces.size());
    if (count <= 1 || count * kShortestPiece <= bytes) return;
    chunk.gathered.reset(new uint8_t[bytes]);  // not zeroed
    target = chunk.gathered.get();
    for (const ConstBytes& piece : pieces) gather(piece.data(), piece.size());
    pieces.clear();
  };
  input.route.ForEachRun(rank, offset, bytes, [&](int64_t at, int64_t run_bytes) {
    input.tensor.bytes.ForEachPiece(at, run_bytes, add);
  });
  if (target != nullptr) chunk.pieces = {ConstBytes(chunk.gathered.get(), bytes)};
  return chunk;
}

// --- Outputs ----------------------------------------------------------------------

absl::Status ShardTensors::Add(int rank, const wire::ChunkHeader& header,
                               absl::Span<const wire::Fragment> payload, uint64_t payload_bytes) {
  const auto found = std::find_if(outputs_.begin(), outputs_.end(), [&](const Output& output) {
    return output.tensor.tensor == header.tensor;
  });
  if (found == outputs_.end()) {
    return ServerError(absl::StrCat("chunk of tensor ", header.tensor, ", not an output"));
  }
  const std::string chunk = absl::StrCat("chunk of rank ", rank, "'s ",
                                         TensorIdName(found->tensor.tensor), " at ", header.offset);
  {
    Sink& sink = *sinks_[rank];
    absl::MutexLock lock(&sink.mutex);
    switch (sink.arrived[found - outputs_.begin()].Add(header.offset, payload_bytes)) {
      case ByteRangeSet::Added::kNew:
        break;
      case ByteRangeSet::Added::kOutside:
        return ServerError(absl::StrCat(chunk, " with ", payload_bytes, " bytes, beyond its ",
                                        found->route.map.local_bytes(rank)));
      case ByteRangeSet::Added::kOverlaps:
        return ServerError(absl::StrCat(chunk, " overlaps an earlier chunk"));
      case ByteRangeSet::Added::kTooManyRanges:
        return ServerError(absl::StrCat(chunk, " leaves too many gaps"));
    }
  }
  if (payload_bytes == 0) return absl::OkStatus();
  // Each byte range is received once, so only one thread writes it.
  uint32_t crc = 0;
  const uint8_t* from = payload[0].data;
  size_t left = payload[0].size, fragment = 0;
  const auto take = [&](uint8_t* target, uint64_t bytes) {  // null: skips the bytes
    while (bytes > 0) {
      while (left == 0) {
        from = payload[++fragment].data;
        left = payload[fragment].size;
      }
      const size_t now = std::min<uint64_t>(left, bytes);
      if (header.crc32c.has_value()) crc = wire::ExtendCrc32c(crc, from, now);
      if (target != nullptr) {
        std::memcpy(target, from, now);
        target += now;
      }
      from += now;
      left -= now;
      bytes -= now;
    }
  };
  uint64_t own_bytes = 0;
  found->route.ForEachRun(rank, static_cast<int64_t>(header.offset),
                          static_cast<int64_t>(payload_bytes), [&](int64_t at, int64_t bytes) {
                            if (at < 0) return take(nullptr, bytes);
                            found->tensor.bytes.ForEachPiece(at, bytes, take);
                            own_bytes += bytes;
                          });
  if (header.crc32c.has_value() && crc != *header.crc32c) {
    return absl::DataLossError(absl::StrCat(chunk, " has a wrong crc32c"));
  }
  received_bytes_ += own_bytes;
  return absl::OkStatus();
}

}  // namespace ringattn::client
