#include "client/transfer/shard_tensors.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/transfer/server_error.h"
#include "client/transfer/tensor_bytes.h"
#include "common/layout/tensor_route.h"
#include "common/wire/crc32c.h"

namespace ringattn::client {
namespace {

// Shorter pieces are gathered into one buffer, because a slice costs about as much as copying them.
constexpr int64_t kShortestPiece = 16 << 10;

absl::StatusOr<Shard> ShardOf(const google::protobuf::RepeatedPtrField<v1::TokenSpan>& spans) {
  constexpr uint64_t kMost = uint64_t{1}
                             << 40;  // tokens; small enough that nothing below overflows
  Shard shard;
  for (const v1::TokenSpan& span : spans) {
    const uint64_t stride = span.stride() == 0 ? 1 : span.stride();
    if (span.begin() >= kMost || span.count() == 0 || span.count() >= kMost || stride >= kMost ||
        stride > kMost / span.count()) {
      return ServerError("a ticket's span is out of range");
    }
    shard.push_back({static_cast<int64_t>(span.begin()), static_cast<int64_t>(span.count()),
                     static_cast<int64_t>(stride)});
  }
  return shard;
}

// Returns true if `shards` together contain each of `rows` tokens once and meet ShardMap's
// requirements.
bool Cover(const std::vector<Shard>& shards, int64_t rows) {
  std::vector<Span> spans;
  int64_t stride = 1;
  for (const Shard& shard : shards) {
    spans.insert(spans.end(), shard.begin(), shard.end());
    for (const Span& span : shard) stride = std::max(stride, span.stride);
  }
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.begin < b.begin; });
  int64_t next = 0;
  for (const Span& span : spans) {
    if (span.begin != next || span.stride != stride) return false;
    if (stride == 1) {
      next += span.length;
    } else {
      if (span.begin >= stride || span.length != (rows - span.begin + stride - 1) / stride) {
        return false;
      }
      ++next;
    }
  }
  return next == (stride == 1 ? rows : std::min(stride, rows));
}

// Visits runs of a member's bytes, one window at a time. With single-byte runs, a list for a whole
// chunk would take hundreds of megabytes.
template <typename Visit>
void ForEachRun(const ShardMap& map, int rank, int64_t offset, int64_t bytes, const Visit& visit) {
  constexpr int64_t kWindow = 64 << 10;
  for (const int64_t end = offset + bytes; offset < end; offset += kWindow) {
    for (const ByteRun& run : map.FromLocal(rank, offset, std::min(kWindow, end - offset))) {
      visit(run);
    }
  }
}

// The map of one tensor, which is sharded along its axis.
absl::StatusOr<ShardMap> MapOf(v1::TensorId tensor, const TensorLayout& layout,
                               const ShardPlan& plan) {
  std::vector<Shard> shards = ShardsOf(plan, layout);
  const bool is_cut = layout.axis == Axis::kQ || layout.axis == Axis::kKv;
  if (is_cut && !Cover(shards, layout.rows)) {
    return ServerError(
        absl::StrCat("the tickets do not cover each token of ", TensorIdName(tensor), " once"));
  }
  return ShardMap(layout, shards);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShardTensors>> ShardTensors::Make(
    const google::protobuf::RepeatedPtrField<v1::ShardTicket>& tickets,
    std::vector<InputTensor> inputs, std::vector<OutputTensor> outputs, uint64_t max_chunk_bytes,
    bool pairs_by_keys) {
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
      absl::StatusOr<Shard> shard = ShardOf(*spans);
      if (!shard.ok()) return shard.status();
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
  std::unique_ptr<ShardTensors> tensors(new ShardTensors);
  tensors->max_chunk_bytes_ = static_cast<int64_t>(max_chunk_bytes);
  for (InputTensor& input : inputs) {
    if (!IsCutAsOne(plan, static_cast<TensorId>(input.tensor))) {
      return ServerError(absl::StrCat("the tickets shard the components of ",
                                      TensorIdName(input.tensor), " differently"));
    }
    absl::StatusOr<ShardMap> map = map_of(input.tensor, input.layout);
    if (!map.ok()) return map.status();
    tensors->inputs_.push_back({std::move(input), *std::move(map)});
  }
  for (OutputTensor& output : outputs) {
    absl::StatusOr<ShardMap> map = map_of(output.tensor, output.layout);
    if (!map.ok()) return map.status();
    tensors->outputs_.push_back({std::move(output), *std::move(map)});
  }
  for (int rank = 0; rank < plan.world_size; ++rank) {
    auto source = std::make_unique<Source>();
    for (const Input& input : tensors->inputs_) source->bytes += input.map.local_bytes(rank);
    tensors->bytes_up_ += source->bytes;
    tensors->sources_.push_back(std::move(source));
    auto sink = std::make_unique<Sink>();
    absl::MutexLock lock(&sink->mutex);
    for (const Output& output : tensors->outputs_) {
      sink->arrived.emplace_back(output.map.local_bytes(rank));
    }
    tensors->bytes_down_ += tensors->bytes_down(rank);
    tensors->sinks_.push_back(std::move(sink));
  }
  return tensors;
}

uint64_t ShardTensors::bytes_down(int rank) const {
  uint64_t bytes = 0;
  for (const Output& output : outputs_) bytes += output.map.local_bytes(rank);
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
           source.offset == inputs_[source.tensor].map.local_bytes(rank)) {
      ++source.tensor;
      source.offset = 0;
    }
    if (source.tensor == inputs_.size()) return std::nullopt;
    input = &inputs_[source.tensor];
    offset = source.offset;
    bytes = std::min(max_chunk_bytes_, input->map.local_bytes(rank) - offset);
    source.offset += bytes;
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
  ForEachRun(input.map, rank, offset, bytes, [&](const ByteRun& run) {
    input.tensor.bytes.ForEachPiece(run.global_offset, run.bytes, add);
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
                                        found->map.local_bytes(rank)));
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
  const auto take = [&](uint8_t* target, uint64_t bytes) {
    while (bytes > 0) {
      while (left == 0) {
        from = payload[++fragment].data;
        left = payload[fragment].size;
      }
      const size_t now = std::min<uint64_t>(left, bytes);
      if (header.crc32c.has_value()) crc = wire::ExtendCrc32c(crc, from, now);
      std::memcpy(target, from, now);
      target += now;
      from += now;
      left -= now;
      bytes -= now;
    }
  };
  ForEachRun(found->map, rank, static_cast<int64_t>(header.offset),
             static_cast<int64_t>(payload_bytes), [&](const ByteRun& run) {
               found->tensor.bytes.ForEachPiece(run.global_offset, run.bytes, take);
             });
  if (header.crc32c.has_value() && crc != *header.crc32c) {
    return absl::DataLossError(absl::StrCat(chunk, " has a wrong crc32c"));
  }
  received_bytes_ += payload_bytes;
  return absl::OkStatus();
}

}  // namespace ringattn::client
