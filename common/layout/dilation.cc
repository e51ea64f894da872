#include "common/layout/dilation.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/attention/tensors.h"

namespace ringattn {
namespace {

// Heads begin, begin + step, ... of the whole problem.
struct PartHeads {
  int64_t begin = 0;
  int64_t step = 1;
  int64_t count = 0;
};

// A level's heads that share one offset.
struct Selection {
  const DilationLevel* level = nullptr;
  int64_t offset = 0;
  PartHeads heads;
};

int64_t Heads(const DilationLevel& level) { return level.head_end - level.head_begin; }

// Returns an upper bound of the offsets that have heads.
int64_t OffsetCount(const DilationLevel& level) {
  return level.offset.has_value() ? 1 : std::min(level.dilation_rate, Heads(level));
}

// Returns the segments of a document of `tokens` tokens.
int64_t SegmentsOf(int64_t tokens, const DilationLevel& level) {
  return tokens / level.segment_length + (tokens % level.segment_length != 0 ? 1 : 0);
}

std::vector<Selection> SelectionsOf(const DilationLevel& level) {
  if (level.offset.has_value()) {
    return {{&level, *level.offset, {level.head_begin, 1, Heads(level)}}};
  }
  const int64_t rate = level.dilation_rate;
  std::vector<Selection> selections;
  for (int64_t i = 0; i < std::min(rate, Heads(level)); ++i) {
    const int64_t first = level.head_begin + i;
    selections.push_back(
        {&level, first % rate, {first, rate, (level.head_end - first - 1) / rate + 1}});
  }
  std::sort(selections.begin(), selections.end(),
            [](const Selection& a, const Selection& b) { return a.offset < b.offset; });
  return selections;
}

// Returns x with a * x = 1 (mod m). REQUIRES: m >= 1, gcd(a, m) = 1.
int64_t Inverse(int64_t a, int64_t m) {
  int64_t r0 = m, r1 = a % m, s0 = 0, s1 = 1;
  while (r1 != 0) {
    const int64_t q = r0 / r1;
    r0 = std::exchange(r1, r0 - q * r1);
    s0 = std::exchange(s1, s0 - q * s1);
  }
  return (s0 % m + m) % m;
}

// The segments of one selection and the positions of its tokens.
class SelectedTokens {
 public:
  SelectedTokens(const AttentionShape& shape, const Selection& selection)
      : rate_(selection.level->dilation_rate), offset_(selection.offset) {
    const int64_t length = selection.level->segment_length;
    for (int64_t d = 0; d < shape.num_documents(); ++d) {
      const int64_t begin = shape.cu_seqlens_q[d], end = shape.cu_seqlens_q[d + 1];
      for (int64_t at = begin; at < end; at += std::min(length, end - at)) {
        const int64_t tokens = std::min(length, end - at);
        segments_.push_back(at);
        compact_.push_back(total_);
        if (offset_ >= tokens) continue;
        total_ += (tokens - offset_ - 1) / rate_ + 1;
        cu_seqlens_.push_back(total_);
        places_.push_back({d, at - begin + offset_, rate_});
      }
    }
    segments_.push_back(shape.cu_seqlens_q.back());
  }

  int64_t total() const { return total_; }
  std::vector<int64_t>& cu_seqlens() { return cu_seqlens_; }
  std::vector<DocumentPosition>& places() { return places_; }

  // Computes the selected tokens of a shard, as a shard of the selection's tokens, and their rows
  // in the whole's shard.
  void Cut(const Shard& whole, Shard& part, std::vector<RowRun>& rows) const {
    int64_t row = 0, first = 0;
    for (const Span& span : whole) {
      const size_t spans_before = part.size();
      auto segment = std::upper_bound(segments_.begin(), segments_.end(), span.begin) - 1;
      for (int64_t done = 0; done < span.length;) {
        const int64_t token = span.begin + done * span.stride;
        while (*(segment + 1) <= token) ++segment;
        const int64_t in_segment =
            std::min(span.length - done, (*(segment + 1) - token - 1) / span.stride + 1);
        const int64_t position = token - *segment;
        Select({position, in_segment, span.stride}, row + done,
               compact_[segment - segments_.begin()], spans_before, part, rows, first);
        done += in_segment;
      }
      row += span.length;
    }
  }

 private:
  // `span` holds positions in a segment whose selected tokens are numbered from `compact` on.
  void Select(const Span& span, int64_t row, int64_t compact, size_t joins_from, Shard& part,
              std::vector<RowRun>& rows, int64_t& first) const {
    const int64_t common = std::gcd(span.stride, rate_);
    const int64_t gap = ((offset_ - span.begin) % rate_ + rate_) % rate_;
    if (gap % common != 0) return;
    const int64_t step = rate_ / common;
    const int64_t skip = gap / common * Inverse(span.stride / common, step) % step;
    if (skip >= span.length) return;
    const int64_t count = (span.length - skip - 1) / step + 1;
    const int64_t begin = compact + (span.begin + skip * span.stride - offset_) / rate_;
    const Span selected{begin, count, span.stride / common};
    Span* last = part.size() > joins_from ? &part.back() : nullptr;
    if (last != nullptr && last->stride == 1 && selected.stride == 1 &&
        last->begin + last->length == begin) {
      last->length += count;
    } else {
      part.push_back(selected);
    }
    RowRun* run = rows.empty() ? nullptr : &rows.back();
    if (run != nullptr && run->step == step && run->begin + run->count * step == row + skip) {
      run->count += count;
    } else {
      rows.push_back({row + skip, step, count, first});
    }
    first += count;
  }

  const int64_t rate_;
  const int64_t offset_;
  std::vector<int64_t> segments_;  // first token of each segment, then the total
  std::vector<int64_t> compact_;   // by segment: selected tokens before it
  int64_t total_ = 0;
  std::vector<int64_t> cu_seqlens_ = {0};  // of segments with at least one selected token
  std::vector<DocumentPosition> places_;
};

// Sets the part's key heads: those that its query heads share evenly, or else one per query head.
void SetHeads(const AttentionShape& whole, const PartHeads& heads, DilatedPart& part) {
  std::vector<int32_t> of_each;
  for (int64_t i = 0; i < heads.count; ++i) {
    const int64_t head = heads.begin + i * heads.step;
    part.q_heads.push_back(static_cast<int32_t>(head));
    of_each.push_back(static_cast<int32_t>(head / whole.group_size()));
  }
  const auto group = static_cast<size_t>(
      std::upper_bound(of_each.begin(), of_each.end(), of_each.front()) - of_each.begin());
  bool even = of_each.size() % group == 0;
  for (size_t i = 0; even && i < of_each.size(); ++i) {
    const bool begins = i % group == 0;
    even = begins ? i == 0 || of_each[i] != of_each[i - 1] : of_each[i] == of_each[i - 1];
  }
  for (size_t i = 0; i < of_each.size(); i += even ? group : 1) part.kv_heads.push_back(of_each[i]);
  part.spec.shape.num_heads = heads.count;
  part.spec.shape.num_kv_heads = static_cast<int64_t>(part.kv_heads.size());
}

void SetOptions(const AttentionSpec& whole, const PartHeads& heads, AttentionOptions& options) {
  options.dilation_levels.clear();
  options.sinks = false;
  options.alibi_slopes.clear();
  const std::vector<float>& slopes = whole.options.alibi_slopes;
  for (size_t row = 0; row < slopes.size(); row += whole.shape.num_heads) {
    for (int64_t i = 0; i < heads.count; ++i) {
      options.alibi_slopes.push_back(slopes[row + heads.begin + i * heads.step]);
    }
  }
  options.dropout.first_head += options.dropout.head_step * static_cast<uint32_t>(heads.begin);
  options.dropout.head_step *= static_cast<uint32_t>(heads.step);
}

DilatedPart MakePart(const AttentionSpec& spec, const ShardPlan& plan, const Selection& selection,
                     SelectedTokens tokens) {
  DilatedPart part;
  part.spec = spec;
  part.spec.has_dlse = false;
  part.spec.fp32_results = spec.dtype != DType::kFloat32;
  part.spec.lse_per_document = false;
  part.spec.probability_rows.clear();
  SetOptions(spec, selection.heads, part.spec.options);
  SetHeads(spec.shape, selection.heads, part);
  part.plan.layout = plan.layout;
  part.plan.world_size = plan.world_size;
  part.plan.stripe = plan.stripe;
  part.plan.chosen.resize(plan.world_size);
  for (int rank = 0; rank < plan.world_size; ++rank) {
    tokens.Cut(plan.q[rank], part.plan.q.emplace_back(), part.q_rows.emplace_back());
    tokens.Cut(plan.kv[rank], part.plan.kv.emplace_back(), part.kv_rows.emplace_back());
  }
  AttentionShape& shape = part.spec.shape;
  shape.packing = Packing::kNone;
  shape.pair_columns = PairColumns(spec.shape);
  shape.seq_len_q = shape.seq_len_kv = tokens.total();
  shape.cu_seqlens_q = shape.cu_seqlens_k = std::move(tokens.cu_seqlens());
  shape.places = std::move(tokens.places());
  if (!spec.shape.document_rules.empty()) {
    shape.document_rules.clear();
    for (const DocumentPosition& place : shape.places) {
      shape.document_rules.push_back(spec.shape.document_rules[place.document]);
    }
  }
  return part;
}

}  // namespace

std::vector<DilatedPart> DilatedPartsOf(const AttentionSpec& spec, const ShardPlan& plan) {
  std::vector<DilatedPart> parts;
  for (const DilationLevel& level : spec.options.dilation_levels) {
    for (const Selection& selection : SelectionsOf(level)) {
      SelectedTokens tokens(spec.shape, selection);
      if (tokens.total() == 0) continue;
      parts.push_back(MakePart(spec, plan, selection, std::move(tokens)));
      parts.back().level = static_cast<int>(&level - spec.options.dilation_levels.data());
    }
  }
  return parts;
}

int64_t DilatedPartCount(const AttentionOptions& options) {
  int64_t count = 0;
  for (const DilationLevel& level : options.dilation_levels) count += OffsetCount(level);
  return count;
}

int64_t SegmentCount(const AttentionShape& shape, const DilationLevel& level) {
  int64_t count = 0;
  for (int64_t d = 0; d < shape.num_documents(); ++d) {
    count += SegmentsOf(shape.cu_seqlens_q[d + 1] - shape.cu_seqlens_q[d], level);
  }
  return count;
}

// A shape's tokens times its heads cannot overflow.
int64_t PlannedDocuments(const AttentionSpec& spec) {
  const std::vector<DilationLevel>& levels = spec.options.dilation_levels;
  const AttentionShape& shape = spec.shape;
  if (levels.empty()) return shape.num_documents();
  int64_t count = 0;
  // Skips empty documents before the division. The limit on segments does not bound their number.
  for (int64_t d = 0; d < shape.num_documents(); ++d) {
    const int64_t tokens = shape.cu_seqlens_q[d + 1] - shape.cu_seqlens_q[d];
    if (tokens == 0) continue;
    for (const DilationLevel& level : levels) {
      count += SegmentsOf(tokens, level) * OffsetCount(level);
    }
  }
  return count;
}

}  // namespace ringattn
