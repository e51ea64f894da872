#include "common/layout/writer_rows.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn {
namespace {

// Rows are mapped one window at a time: with runs of four bytes, a list for a whole shard would be
// larger than the shard.
constexpr int64_t kWindowBytes = int64_t{1} << 20;

const Shard* TokensOf(const WriterRows& rows, TensorId id) {
  switch (InfoOf(id).axis) {
    case Axis::kQ:
      return &rows.q;
    case Axis::kKv:
      return &rows.kv;
    case Axis::kReplicated:
    case Axis::kRankZero:
    case Axis::kChosenRows:
      return nullptr;
  }
  return nullptr;
}

// Returns the index of the token axis in the tensor's shape.
size_t TokenAxis(TensorId id, size_t dimensions) {
  switch (InfoOf(id).form) {
    case TensorForm::kRows:
      return dimensions - 3;
    case TensorForm::kPairs:
      return dimensions - 2;
    default:
      return dimensions - 1;
  }
}

}  // namespace

std::string CheckCover(const std::vector<Shard>& shards, int64_t rows, absl::string_view owner) {
  struct Owned {
    Span span;
    size_t shard;
  };
  std::vector<Owned> spans;
  int64_t stride = 1;
  for (size_t shard = 0; shard < shards.size(); ++shard) {
    for (const Span& span : shards[shard]) {
      spans.push_back({span, shard});
      stride = std::max(stride, span.stride);
    }
  }
  std::sort(spans.begin(), spans.end(),
            [](const Owned& a, const Owned& b) { return a.span.begin < b.span.begin; });
  int64_t next = 0;  // the first token, or the first token of a period, that no span has
  for (const Owned& owned : spans) {
    const Span& span = owned.span;
    if (span.stride != stride) {
      return absl::StrCat("the span of ", owner, " ", owned.shard, " at token ", span.begin,
                          " has stride ", span.stride, ", others have ", stride);
    }
    if (span.begin > next) return absl::StrCat("no ", owner, " has token ", next);
    if (span.begin < next) {
      return absl::StrCat(owner, " ", owned.shard, " has token ", span.begin,
                          ", which another span has too");
    }
    if (stride == 1) {
      if (span.length > rows - span.begin) {
        return absl::StrCat(owner, " ", owned.shard, " has token ", span.begin + span.length - 1,
                            ", but the axis has ", rows, " tokens");
      }
      next += span.length;
      continue;
    }
    if (span.begin >= stride) {
      return absl::StrCat("the span of ", owner, " ", owned.shard, " with stride ", stride,
                          " begins at token ", span.begin, ", not below its stride");
    }
    const int64_t length = (rows - span.begin + stride - 1) / stride;
    if (span.length != length) {
      return absl::StrCat("the span of ", owner, " ", owned.shard, " at token ", span.begin,
                          " with stride ", stride, " has ", span.length, " tokens; of ", rows,
                          " it must have ", length);
    }
    ++next;
  }
  if (next < (stride == 1 ? rows : std::min(stride, rows))) {
    return absl::StrCat("no ", owner, " has token ", next);
  }
  return "";
}

std::vector<std::pair<const char*, std::string>> CheckWriters(
    const std::vector<WriterRows>& writers, int64_t seq_len_q, int64_t seq_len_kv) {
  std::vector<Shard> q, kv;
  for (const WriterRows& rows : writers) {
    q.push_back(rows.q);
    kv.push_back(rows.kv);
  }
  std::vector<std::pair<const char*, std::string>> faults;
  for (const auto& [axis, shards, tokens] :
       {std::tuple("q", &q, seq_len_q), std::tuple("kv", &kv, seq_len_kv)}) {
    std::string why = CheckCover(*shards, tokens, "writer");
    if (!why.empty()) faults.emplace_back(axis, std::move(why));
  }
  return faults;
}

bool IsSplitByWriters(TensorId id) { return TokensOf(WriterRows(), id) != nullptr; }

int64_t BytesOf(const AttentionSpec& spec, const WriterRows& rows, TensorId id) {
  const Shard* const tokens = TokensOf(rows, id);
  if (tokens == nullptr) return BytesOf(spec, id);
  return LayoutOf(spec, id).ShardBytes(RowsIn(*tokens));
}

std::vector<int64_t> DimensionsOf(const AttentionSpec& spec, const WriterRows& rows, TensorId id) {
  std::vector<int64_t> dimensions = DimensionsOf(spec, id);
  if (const Shard* const tokens = TokensOf(rows, id); tokens != nullptr) {
    dimensions[TokenAxis(id, dimensions.size())] = RowsIn(*tokens);
  }
  return dimensions;
}

ShardMap MapToWriters(const AttentionSpec& spec, const std::vector<WriterRows>& writers,
                      TensorId id) {
  std::vector<Shard> shards;
  shards.reserve(writers.size());
  for (const WriterRows& rows : writers) shards.push_back(*TokensOf(rows, id));
  return ShardMap(LayoutOf(spec, id), shards);
}

namespace {

// RangesOfWriter for the first `bytes` bytes of the shard.
std::vector<WriterRange> RangesIn(int64_t bytes, const ShardMap& shards, int rank,
                                  const ShardMap& writers, int writer, int64_t gap_bytes) {
  std::vector<WriterRange> ranges;
  for (int64_t offset = 0; offset < bytes; offset += kWindowBytes) {
    for (const ByteRun& run :
         shards.FromLocal(rank, offset, std::min(kWindowBytes, bytes - offset))) {
      for (const ByteRun& held : writers.FromGlobal(run.global_offset, run.bytes)) {
        if (held.rank != writer) continue;
        const int64_t begin = run.local_offset + held.global_offset - run.global_offset;
        if (!ranges.empty() && begin - ranges.back().end <= gap_bytes) {
          ranges.back().end = begin + held.bytes;
        } else {
          ranges.push_back({begin, begin + held.bytes});
        }
      }
    }
  }
  return ranges;
}

}  // namespace

std::vector<WriterRange> RangesOfWriter(const ShardMap& shards, int rank, const ShardMap& writers,
                                        int writer, int64_t gap_bytes) {
  const TensorLayout& layout = shards.layout();
  const bool alike = layout.outer == writers.layout().outer;
  if (!alike || layout.outer <= 1) {
    return RangesIn(shards.local_bytes(rank), shards, rank, writers, writer, gap_bytes);
  }
  // Every index of the outer axis has the same ranges.
  const int64_t stride = shards.local_rows(rank) * layout.inner_bytes;
  const std::vector<WriterRange> first = RangesIn(stride, shards, rank, writers, writer, gap_bytes);
  std::vector<WriterRange> ranges;
  for (int64_t outer = 0; outer < layout.outer; ++outer) {
    for (const WriterRange& range : first) {
      const int64_t begin = outer * stride + range.begin;
      const int64_t end = outer * stride + range.end;
      if (!ranges.empty() && begin - ranges.back().end <= gap_bytes) {
        ranges.back().end = end;
      } else {
        ranges.push_back({begin, end});
      }
    }
  }
  return ranges;
}

Shard RestOf(const Shard& shard, int64_t rows) {
  Shard ascending = shard;
  std::sort(ascending.begin(), ascending.end(),
            [](const Span& a, const Span& b) { return a.begin < b.begin; });
  int64_t stride = 1;
  for (const Span& span : ascending) stride = std::max(stride, span.stride);
  Shard rest;
  int64_t next = 0;
  const auto add_until = [&](int64_t token) {
    if (stride == 1) {
      if (token > next) rest.push_back({next, token - next});
      return;
    }
    for (; next < token; ++next) {
      rest.push_back({next, (rows - next + stride - 1) / stride, stride});
    }
  };
  for (const Span& span : ascending) {
    add_until(span.begin);
    next = stride == 1 ? span.begin + span.length : span.begin + 1;
  }
  add_until(stride == 1 ? rows : std::min(stride, rows));
  return rest;
}

}  // namespace ringattn
