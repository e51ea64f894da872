#include "tests/sweep/reference_parts.h"

#include <algorithm>
#include <map>
#include <utility>

#include "common/attention/band.h"

namespace ringattn::tests {
namespace {

using worker::AttentionProblem;

// Documents of a part, numbered as their first tokens come in the whole sequence.
using Segments = std::map<std::pair<int64_t, int64_t>, int64_t>;  // (document, segment)

struct Offset {
  const DilationLevel& level;
  int64_t value;
};

struct Place {
  int64_t document;
  int64_t position;
};

Place PlaceOf(const AttentionShape& shape, int64_t token) {
  int64_t document = 0;
  while (shape.cu_seqlens_q[document + 1] <= token) ++document;
  return {document, token - shape.cu_seqlens_q[document]};
}

bool Selects(const Offset& offset, const Place& place) {
  return place.position % offset.level.segment_length % offset.level.dilation_rate == offset.value;
}

PartShard ShardOf(const AttentionShape& shape, const Shard& whole, const Offset& offset,
                  const Segments& segments) {
  PartShard part;
  const std::vector<int64_t> tokens = TokensOf(whole);
  for (size_t row = 0; row < tokens.size(); ++row) {
    const Place place = PlaceOf(shape, tokens[row]);
    if (!Selects(offset, place)) continue;
    const int64_t segment =
        segments.at({place.document, place.position / offset.level.segment_length});
    part.pieces.push_back({static_cast<int64_t>(part.rows.size()), 1, segment, place.position, 1});
    part.rows.push_back(static_cast<int64_t>(row));
  }
  return part;
}

// As many query heads for each key head, where they are even; else a key head for each.
void DealOutHeads(const AttentionShape& whole, ReferencePart& part) {
  std::map<int64_t, int64_t> counts;
  for (int64_t head : part.q_heads) ++counts[head / whole.group_size()];
  const bool even = std::all_of(counts.begin(), counts.end(), [&](const auto& entry) {
    return entry.second == counts.begin()->second;
  });
  for (int64_t head : part.q_heads) {
    const int64_t kv_head = head / whole.group_size();
    if (!even || part.kv_heads.empty() || part.kv_heads.back() != kv_head) {
      part.kv_heads.push_back(kv_head);
    }
  }
}

void SetProblem(const AttentionProblem& whole, const Segments& segments, ReferencePart& part) {
  AttentionProblem& problem = part.problem;
  problem = whole;
  problem.fp32_results = true;
  problem.num_heads = static_cast<int64_t>(part.q_heads.size());
  problem.num_kv_heads = static_cast<int64_t>(part.kv_heads.size());
  problem.bands.assign(segments.size(), {});
  worker::ScoreTerms& terms = problem.terms;
  terms.shifts.assign(segments.size(), 0);
  terms.owners.assign(segments.size(), 0);
  for (const auto& [segment, number] : segments) {
    problem.bands[number] = whole.bands[segment.first];
    terms.owners[number] = segment.first;
  }
  terms.alibi_slopes.clear();
  for (size_t row = 0; row < whole.terms.alibi_slopes.size(); row += whole.num_heads) {
    for (int64_t head : part.q_heads) {
      terms.alibi_slopes.push_back(whole.terms.alibi_slopes[row + head]);
    }
  }
  DropoutForm& dropout = terms.dropout;
  dropout.first_head += static_cast<uint32_t>(part.q_heads[0]);
  dropout.head_step =
      part.q_heads.size() < 2 ? 1 : static_cast<uint32_t>(part.q_heads[1] - part.q_heads[0]);
}

}  // namespace

std::vector<int64_t> TokensOf(const Shard& shard) {
  std::vector<int64_t> tokens;
  for (const Span& span : shard) {
    for (int64_t r = 0; r < span.length; ++r) tokens.push_back(span.begin + r * span.stride);
  }
  return tokens;
}

std::vector<Piece> RowPieces(const std::vector<int64_t>& tokens,
                             const std::vector<int64_t>& cu_seqlens) {
  std::vector<Piece> pieces;
  for (size_t row = 0; row < tokens.size(); ++row) {
    int64_t document = 0;
    while (cu_seqlens[document + 1] <= tokens[row]) ++document;
    const int64_t position = tokens[row] - cu_seqlens[document];
    pieces.push_back({static_cast<int64_t>(row), 1, document, position, 1});
  }
  return pieces;
}

AttentionProblem ReferenceProblemOf(const AttentionSpec& spec) {
  AttentionProblem problem;
  const AttentionShape& shape = spec.shape;
  problem.dtype = spec.dtype;
  problem.fp32_results = spec.fp32_results;
  problem.batch = shape.batch;
  problem.num_heads = shape.num_heads;
  problem.num_kv_heads = shape.num_kv_heads;
  problem.head_dim = shape.head_dim;
  problem.head_dim_v = shape.head_dim_v;
  problem.softmax_scale = static_cast<float>(spec.options.softmax_scale);
  problem.softcap = static_cast<float>(spec.options.softcap);
  problem.compute = spec.options.compute_dtype;
  problem.bands = DocumentBands(spec);
  worker::ScoreTerms& terms = problem.terms;
  terms.packed = shape.packed;
  terms.columns = 0;
  for (int64_t d = 0; d < shape.num_documents(); ++d) {
    const int64_t queries = shape.cu_seqlens_q[d + 1] - shape.cu_seqlens_q[d];
    const int64_t keys = shape.cu_seqlens_k[d + 1] - shape.cu_seqlens_k[d];
    terms.shifts.push_back(keys - queries);
    terms.columns = std::max(terms.columns, keys);
  }
  terms.alibi_slopes = spec.options.alibi_slopes;
  terms.bias = spec.options.bias;
  terms.mask = spec.options.mask;
  terms.segment_ids = spec.options.segment_ids;
  terms.dropout = spec.options.dropout;
  return problem;
}

std::vector<ReferencePart> ReferencePartsOf(const AttentionSpec& spec, const ShardPlan& plan,
                                            const AttentionProblem& whole) {
  std::vector<ReferencePart> parts;
  const AttentionShape& shape = spec.shape;
  for (const DilationLevel& level : spec.options.dilation_levels) {
    std::map<int64_t, std::vector<int64_t>> heads;  // by offset
    for (int64_t head = level.head_begin; head < level.head_end; ++head) {
      heads[level.offset.value_or(head % level.dilation_rate)].push_back(head);
    }
    for (const auto& [value, q_heads] : heads) {
      const Offset offset{level, value};
      Segments segments;
      for (int64_t token = 0; token < shape.seq_len_q; ++token) {
        const Place place = PlaceOf(shape, token);
        if (!Selects(offset, place)) continue;
        segments.try_emplace({place.document, place.position / level.segment_length},
                             static_cast<int64_t>(segments.size()));
      }
      if (segments.empty()) continue;
      ReferencePart& part = parts.emplace_back();
      part.q_heads = q_heads;
      DealOutHeads(shape, part);
      for (int rank = 0; rank < plan.world_size; ++rank) {
        part.q.push_back(ShardOf(shape, plan.q[rank], offset, segments));
        part.kv.push_back(ShardOf(shape, plan.kv[rank], offset, segments));
      }
      SetProblem(whole, segments, part);
      part.spec = spec;
      part.spec.shape.num_heads = part.problem.num_heads;
      part.spec.shape.num_kv_heads = part.problem.num_kv_heads;
      part.spec.options.sinks = false;
      part.spec.has_dlse = false;
      part.spec.fp32_results = true;
    }
  }
  return parts;
}

}  // namespace ringattn::tests
