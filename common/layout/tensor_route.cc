#include "common/layout/tensor_route.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace ringattn {

bool IsCutAsOne(const ShardPlan& plan, TensorId tensor) {
  bool has_q = false, has_kv = false;
  for (TensorId part : PartsOf(tensor)) {
    (InfoOf(part).axis == Axis::kQ ? has_q : has_kv) = true;
  }
  return !has_q || !has_kv || plan.q == plan.kv;
}

TensorRoute TensorRoute::ForUpload(const AttentionSpec& spec, const ShardPlan& plan,
                                   TensorId tensor) {
  return TensorRoute(spec, plan, tensor,
                     IsCutAsOne(plan, tensor) ? std::vector{tensor} : PartsOf(tensor));
}

TensorRoute::TensorRoute(const AttentionSpec& spec, const ShardPlan& plan, TensorId tensor)
    : TensorRoute(spec, plan, tensor, PartsOf(tensor)) {}

TensorRoute::TensorRoute(const AttentionSpec& spec, const ShardPlan& plan, TensorId tensor,
                         std::vector<TensorId> parts)
    : parts_(std::move(parts)),
      global_bytes_(BytesOf(spec, tensor)),
      per_document_(IsPerDocument(spec, tensor)) {
  for (TensorId part : parts_) maps_.emplace_back(spec, plan, part);
  if (!per_document_) return;
  documents_ = spec.shape.cu_seqlens_q;
  heads_ = spec.shape.num_heads;
  longest_ = LongestQueries(spec.shape);
  element_bytes_ = LayoutOf(spec, tensor).inner_bytes;
}

std::vector<ByteRun> TensorRoute::FromGlobal(int64_t offset, int64_t bytes) const {
  if (per_document_) return DocumentRuns(offset, bytes);
  if (parts_.size() > 1) return PackedRuns(offset, bytes);
  return maps_[0].FromGlobal(offset, bytes);
}

std::vector<ByteRun> TensorRoute::PackedRuns(int64_t offset, int64_t bytes) const {
  // The parts of a token have equal sizes.
  const int64_t part_bytes = maps_[0].layout().inner_bytes;
  const auto parts = static_cast<int64_t>(parts_.size());
  const int64_t end = offset + bytes;
  std::vector<ByteRun> runs;
  while (offset < end) {
    const int64_t piece = offset / part_bytes;
    const int64_t inside = offset % part_bytes;
    const auto part = static_cast<size_t>(piece % parts);
    ByteRun run = maps_[part].RunAt(piece / parts * part_bytes + inside,
                                    std::min(end - offset, part_bytes - inside));
    run.global_offset = offset;
    run.part = part;
    runs.push_back(run);
    offset += run.bytes;
  }
  return runs;
}

std::vector<ByteRun> TensorRoute::DocumentRuns(int64_t offset, int64_t bytes) const {
  const int64_t row_bytes = longest_ * element_bytes_;
  const int64_t end = offset + bytes;
  std::vector<ByteRun> runs;
  while (offset < end) {
    const int64_t row = offset / row_bytes;
    const int64_t inside = offset % row_bytes;
    const int64_t document = row / heads_;
    const int64_t begin = documents_[document];
    const int64_t used = (documents_[document + 1] - begin) * element_bytes_;
    if (inside >= used) {
      const int64_t hole = std::min(end - offset, row_bytes - inside);
      AppendRun(runs, {kNoRank, offset, offset, hole});
      offset += hole;
      continue;
    }
    const int64_t flat = (row % heads_ * documents_.back() + begin) * element_bytes_ + inside;
    for (ByteRun run : maps_[0].FromGlobal(flat, std::min(end - offset, used - inside))) {
      run.global_offset = offset;
      AppendRun(runs, run);
      offset += run.bytes;
    }
  }
  return runs;
}

std::vector<ByteRun> TensorRoute::FromLocal(size_t part, int rank, int64_t offset,
                                            int64_t bytes) const {
  std::vector<ByteRun> flat = maps_[part].FromLocal(rank, offset, bytes);
  if (!per_document_ && parts_.size() == 1) return flat;
  std::vector<ByteRun> runs;
  for (const ByteRun& run : flat) ToGlobal(part, run.global_offset, run.bytes, run, runs);
  return runs;
}

void TensorRoute::ToGlobal(size_t part, int64_t offset, int64_t bytes, const ByteRun& run,
                           std::vector<ByteRun>& runs) const {
  const int64_t end = offset + bytes;
  int64_t local = run.local_offset;
  while (offset < end) {
    int64_t global, length;
    if (per_document_) {
      const int64_t element = offset / element_bytes_;
      const int64_t head = element / documents_.back();
      const int64_t token = element % documents_.back();
      const auto next = std::upper_bound(documents_.begin(), documents_.end(), token);
      const int64_t document = next - documents_.begin() - 1;
      global =
          ((document * heads_ + head) * longest_ + token - documents_[document]) * element_bytes_ +
          offset % element_bytes_;
      length = (*next - token) * element_bytes_ - offset % element_bytes_;
    } else {
      const int64_t part_bytes = maps_[part].layout().inner_bytes;
      const auto parts = static_cast<int64_t>(parts_.size());
      const int64_t inside = offset % part_bytes;
      global = (offset / part_bytes * parts + static_cast<int64_t>(part)) * part_bytes + inside;
      length = part_bytes - inside;
    }
    length = std::min(length, end - offset);
    AppendRun(runs, {run.rank, global, local, length, part});
    offset += length;
    local += length;
  }
}

std::vector<LocalRange> TensorRoute::StreamOrder(int rank) const {
  if (per_document_) return DocumentOrder(rank);
  std::vector<LocalRange> order;
  if (parts_.size() == 1) {
    if (maps_[0].local_bytes(rank) > 0) order.push_back({0, 0, maps_[0].local_bytes(rank)});
    return order;
  }
  // The parts are rows of the same tokens. If they use both axes, both are sharded alike.
  const int64_t part_bytes = maps_[0].layout().inner_bytes;
  const int64_t block = std::max<int64_t>(kStreamBlockBytes / part_bytes, 1) * part_bytes;
  for (int64_t at = 0; at < maps_[0].local_bytes(rank); at += block) {
    for (size_t part = 0; part < parts_.size(); ++part) {
      assert(maps_[part].local_bytes(rank) == maps_[0].local_bytes(rank));
      order.push_back({part, at, std::min(block, maps_[0].local_bytes(rank) - at)});
    }
  }
  return order;
}

// Orders documents in groups. Within a long document both client and rank store head after head.
// For short documents the client stores each document with all heads; the rank stores each head
// with all documents.
std::vector<LocalRange> TensorRoute::DocumentOrder(int rank) const {
  const int64_t most_tokens =
      std::max(kStreamGroupTokens, kStreamBlockBytes / (heads_ * element_bytes_));
  const ShardMap& map = maps_[0];
  std::vector<LocalRange> order;
  const auto documents = documents_.size() - 1;
  for (size_t first = 0; first < documents;) {
    size_t end = first + 1;
    while (end < documents && documents_[end + 1] - documents_[first] <= most_tokens) ++end;
    const int64_t begin_row = map.LocalRowsBefore(rank, documents_[first]);
    const int64_t rows = map.LocalRowsBefore(rank, documents_[end]) - begin_row;
    for (int64_t h = 0; h < heads_ && rows > 0; ++h) {
      order.push_back(
          {0, (h * map.local_rows(rank) + begin_row) * element_bytes_, rows * element_bytes_});
    }
    first = end;
  }
  return order;
}

}  // namespace ringattn
