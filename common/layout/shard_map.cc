// Maps between the bytes of a tensor and the ranks' shards.
#include <algorithm>
#include <cassert>

#include "common/layout/shard_plan.h"

namespace ringattn {

void AppendRun(std::vector<ByteRun>& runs, const ByteRun& run) {
  if (!runs.empty()) {
    ByteRun& last = runs.back();
    if (last.rank == run.rank && last.part == run.part &&
        last.global_offset + last.bytes == run.global_offset &&
        last.local_offset + last.bytes == run.local_offset) {
      last.bytes += run.bytes;
      return;
    }
  }
  runs.push_back(run);
}

ShardMap::ShardMap(const TensorLayout& layout, const std::vector<Shard>& shards) : layout_(layout) {
  for (size_t rank = 0; rank < shards.size(); ++rank) {
    by_rank_.emplace_back();
    int64_t local_begin = 0;
    for (const Span& span : shards[rank]) {
      const OwnedSpan owned{static_cast<int>(rank), local_begin, span};
      by_rank_.back().push_back(owned);
      if (!replicated()) by_token_.push_back(owned);
      local_begin += span.length;
      period_ = std::max(period_, span.stride);
    }
    rows_.push_back(local_begin);
  }
  std::sort(by_token_.begin(), by_token_.end(),
            [](const OwnedSpan& a, const OwnedSpan& b) { return a.span.begin < b.span.begin; });
  // Strided spans interleave. A search by begin finds the owner only because all spans have the
  // same period and each begins inside the first period.
  for (const OwnedSpan& owned : by_token_) {
    assert(owned.span.stride == period_ && (period_ == 1 || owned.span.begin < period_));
    (void)owned;
  }
}

ShardMap::ShardMap(const AttentionSpec& spec, const ShardPlan& plan, TensorId tensor)
    : ShardMap(LayoutOf(spec, plan, tensor), ShardsOf(plan, LayoutOf(spec, plan, tensor))) {}

const ShardMap::OwnedSpan& ShardMap::OwnerOf(int64_t token) const {
  const int64_t key = period_ == 1 ? token : token % period_;
  const auto next = std::partition_point(by_token_.begin(), by_token_.end(),
                                         [&](const OwnedSpan& o) { return o.span.begin <= key; });
  assert(next != by_token_.begin());
  return *(next - 1);
}

std::vector<ByteRun> ShardMap::FromGlobal(int64_t offset, int64_t bytes) const {
  assert(!replicated());
  assert(offset >= 0 && bytes >= 0 && bytes <= global_bytes() - offset);
  const int64_t end = offset + bytes;
  std::vector<ByteRun> runs;
  while (offset < end) {
    const ByteRun run = RunAt(offset, end - offset);
    AppendRun(runs, run);
    offset += run.bytes;
  }
  return runs;
}

ByteRun ShardMap::RunAt(int64_t offset, int64_t bytes) const {
  const int64_t inner = layout_.inner_bytes;
  const int64_t outer = offset / inner / layout_.rows;
  const int64_t token = offset / inner % layout_.rows;
  const int64_t inside = offset % inner;
  const OwnedSpan& owner = OwnerOf(token);
  const int64_t row = (token - owner.span.begin) / owner.span.stride;
  const int64_t rows = period_ == 1 ? owner.span.length - row : 1;
  const int64_t local_row = outer * rows_[owner.rank] + owner.local_begin + row;
  return {owner.rank, offset, local_row * inner + inside, std::min(bytes, rows * inner - inside)};
}

int64_t ShardMap::LocalRowsBefore(int rank, int64_t token) const {
  const std::vector<OwnedSpan>& spans = by_rank_[rank];
  const auto next = std::partition_point(spans.begin(), spans.end(),
                                         [&](const OwnedSpan& o) { return o.span.begin < token; });
  if (next == spans.begin()) return 0;
  const OwnedSpan& last = *(next - 1);
  const int64_t rows = (token - last.span.begin + last.span.stride - 1) / last.span.stride;
  return last.local_begin + std::min(rows, last.span.length);
}

std::vector<ByteRun> ShardMap::FromLocal(int rank, int64_t offset, int64_t bytes) const {
  assert(offset >= 0 && bytes >= 0 && bytes <= local_bytes(rank) - offset);
  const int64_t inner = layout_.inner_bytes;
  const int64_t end = offset + bytes;
  const std::vector<OwnedSpan>& spans = by_rank_[rank];
  std::vector<ByteRun> runs;
  while (offset < end) {
    const int64_t outer = offset / inner / rows_[rank];
    const int64_t local_row = offset / inner % rows_[rank];
    const int64_t inside = offset % inner;
    const auto next = std::partition_point(
        spans.begin(), spans.end(), [&](const OwnedSpan& o) { return o.local_begin <= local_row; });
    const OwnedSpan& owner = *(next - 1);
    const int64_t row = local_row - owner.local_begin;
    const int64_t token = owner.span.begin + row * owner.span.stride;
    const int64_t rows = owner.span.stride == 1 ? owner.span.length - row : 1;
    const int64_t length = std::min(end - offset, rows * inner - inside);
    AppendRun(runs, {rank, (outer * layout_.rows + token) * inner + inside, offset, length});
    offset += length;
  }
  return runs;
}

int64_t ShardMap::local_bytes(int rank) const { return layout_.ShardBytes(rows_[rank]); }

}  // namespace ringattn
