#include "worker/kernels/cpu/score_pass.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "worker/kernels/cpu/simd/term_ops.h"

namespace ringattn::worker::cpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
// Keys in a word of dropout's bits.
constexpr int64_t kWordKeys = 32;
// Words of the longest tile, and one more at each end.
constexpr int kMaxWords = 1024 / kWordKeys + 3;

}  // namespace

TermKeys TermKeys::At(int column) const {
  TermKeys key;
  key.count = 1;
  key.first_position = PositionOf(column);
  key.first_plane_column = PlaneColumnOf(column);
  if (segment_ids != nullptr) key.segment_ids = segment_ids + column;
  return key;
}

ScorePass::ScorePass(const AttentionProblem& problem, int64_t q_rows, const TermOperands& operands)
    : problem_(problem),
      terms_(problem.terms),
      q_rows_(q_rows),
      operands_(operands),
      bias_dtype_(terms_.bias.has_value() && terms_.bias->float32 ? DType::kFloat32
                                                                  : problem.dtype) {}

bool ScorePass::SameForHeads() const {
  return !(terms_.bias.has_value() && terms_.bias->per_head) &&
         !(terms_.mask.has_value() && terms_.mask->per_head);
}

TermKeys ScorePass::KeysOf(const TokenRuns& kv, const TokenRun& run, const KvBlock& block,
                           int64_t batch, int64_t begin, int count, int64_t* positions) const {
  TermKeys keys;
  keys.count = count;
  keys.first_position = kv.PositionOf(run, begin);
  if (kv.PositionOf(run, begin + count - 1) - keys.first_position != count - 1) {
    for (int c = 0; c < count; ++c) positions[c] = kv.PositionOf(run, begin + c);
    keys.positions = positions;
  }
  keys.first_plane_column = keys.first_position;
  keys.plane_columns = keys.positions;
  if (terms_.by_keys) {
    keys.first_plane_column = run.local_begin + begin;
    keys.plane_columns = nullptr;
  }
  if (terms_.segment_ids) {
    keys.segment_ids = block.segment_ids + batch * block.rows + run.local_begin + begin;
  }
  return keys;
}

const char* ScorePass::BiasRow(const TermRow& row) const {
  const int64_t plane = PlaneOf(*terms_.bias, problem_.num_heads, row.batch, row.head);
  return static_cast<const char*>(operands_.bias) +
         PlaneRow(plane, row) * terms_.columns * ElementBytes(bias_dtype_);
}

const uint8_t* ScorePass::MaskRow(const TermRow& row) const {
  const int64_t plane = PlaneOf(*terms_.mask, problem_.num_heads, row.batch, row.head);
  return operands_.mask + PlaneRow(plane, row) * terms_.mask_row_bytes();
}

float ScorePass::SlopeOf(const TermRow& row) const {
  const bool one_per_head = static_cast<int64_t>(terms_.alibi_slopes.size()) == problem_.num_heads;
  const int64_t first =
      one_per_head ? 0 : terms_.BatchRow(row.batch, row.document) * problem_.num_heads;
  return terms_.alibi_slopes[first + row.head];
}

PhiloxRow ScorePass::StreamOf(const TermRow& row) const {
  const DropoutForm& dropout = terms_.dropout;
  return {static_cast<uint32_t>(dropout.seed), static_cast<uint32_t>(dropout.seed >> 32),
          static_cast<uint32_t>(row.position + dropout.first_query),
          static_cast<uint32_t>(dropout.first_head + row.head * dropout.head_step),
          static_cast<uint32_t>(terms_.BatchRow(row.batch, row.document) + dropout.first_batch)};
}

void ScorePass::AddBias(const TermRow& row, const TermKeys& keys, int begin, int count, float* add,
                        float* inside) const {
  const char* source = BiasRow(row);
  const int64_t bytes = ElementBytes(bias_dtype_);
  float* target = has_inside() ? inside : add;
  if (keys.plane_columns == nullptr) {
    LoadBias(bias_dtype_, source + (keys.first_plane_column + begin) * bytes, count, target);
  } else {
    for (int c = 0; c < count; ++c) {
      ConvertToFloat(bias_dtype_, source + keys.plane_columns[begin + c] * bytes, target + c, 1);
    }
  }
  if (!has_inside()) return;
  for (int c = 0; c < count; ++c) add[c] = inside[c] == kMinusInfinity ? kMinusInfinity : 0.0f;
}

void ScorePass::SubtractDistances(const TermRow& row, const TermKeys& keys, int begin, int end,
                                  float* scores) const {
  const float slope = SlopeOf(row);
  const int64_t aligned = Aligned(row);
  for (int c = begin; c < std::min(end, keys.count); ++c) {
    const auto distance = static_cast<float>(std::abs(aligned - keys.positions[c]));
    scores[c] = std::fma(-slope, distance, scores[c]);
  }
}

void ScorePass::HideByMask(const TermRow& row, const TermKeys& keys, int begin, int count,
                           float* add) const {
  const uint8_t* mask = MaskRow(row);
  if (keys.plane_columns == nullptr) {
    const int64_t first = keys.first_plane_column + begin;
    return terms_.mask->bits ? MaskByBits(mask, first, count, add)
                             : MaskByBytes(mask + first, count, add);
  }
  for (int c = 0; c < count; ++c) {
    const int64_t j = keys.plane_columns[begin + c];
    const bool visible = terms_.mask->bits ? (mask[j / 8] >> (j % 8) & 1) != 0 : mask[j] != 0;
    if (!visible) add[c] = kMinusInfinity;
  }
}

void ScorePass::Addends(const TermRow& row, const TermKeys& keys, int32_t* begin, int32_t* end,
                        float* add, float* inside) const {
  const int count = *end - *begin;
  if (count <= 0 || !has_addends()) return;
  float* own = add + *begin;
  if (terms_.bias.has_value()) {
    AddBias(row, keys, *begin, count, own, inside == nullptr ? nullptr : inside + *begin);
  } else {
    std::fill_n(own, count, 0.0f);
  }
  if (terms_.mask.has_value()) HideByMask(row, keys, *begin, count, own);
  if (terms_.segment_ids) MaskByIds(SegmentIdOf(row), keys.segment_ids + *begin, count, own);
  while (*begin < *end && add[*begin] == kMinusInfinity) ++*begin;
  while (*begin < *end && add[*end - 1] == kMinusInfinity) --*end;
}

void ScorePass::Finish(const TermRow& row, const TermKeys& keys, const float* add,
                       const float* inside, int begin, int end, float* scores,
                       float* slopes) const {
  const bool has_distances = !terms_.alibi_slopes.empty();
  FinishArgs args;
  args.count = end - begin;
  args.scale = std::abs(problem_.softmax_scale);
  args.cap = problem_.softcap;
  if (has_distances && keys.positions == nullptr) {
    args.slope = SlopeOf(row);
    args.distance = Aligned(row) - keys.first_position - begin;
  }
  args.add = has_addends() ? add + begin : nullptr;
  args.inside = inside == nullptr ? nullptr : inside + begin;
  args.scores = scores + begin;
  args.slopes = slopes == nullptr ? nullptr : slopes + begin;
  FinishScores(args);
  if (has_distances && keys.positions != nullptr) SubtractDistances(row, keys, begin, end, scores);
}

void ScorePass::Keeps(const TermRow& row, const TermKeys& keys, int begin, int end,
                      float* factors) const {
  const uint32_t threshold = terms_.dropout.threshold;
  const float scale = terms_.keep_scale();
  const PhiloxRow stream = StreamOf(row);
  const int64_t origin = terms_.dropout.first_key;
  uint32_t words[kMaxWords];
  if (keys.positions == nullptr) {
    const int64_t first = keys.first_position + begin + origin;
    const int64_t last = keys.first_position + end - 1 + origin;
    const int count = static_cast<int>(last / kWordKeys - first / kWordKeys) + 1;
    KeepWords(stream, static_cast<uint32_t>(first / kWordKeys), threshold, count, words);
    words[count] = 0;
    ExpandKeepBits(words, static_cast<int>(first % kWordKeys), scale, end - begin, factors + begin);
    return;
  }
  int64_t word = -1;
  uint32_t bits = 0;
  for (int c = begin; c < end; ++c) {
    const int64_t key = keys.positions[c] + origin;
    if (key / kWordKeys != word) {
      word = key / kWordKeys;
      KeepWords(stream, static_cast<uint32_t>(word), threshold, 1, words);
      bits = words[0];
    }
    factors[c] = (bits >> (key % kWordKeys) & 1) != 0 ? scale : 0.0f;
  }
}

PairTerm ScorePass::TermOf(const TermRow& row, const TermKeys& key) const {
  float add = 0.0f, inside = 0.0f;
  int32_t begin = 0, end = 1;
  Addends(row, key, &begin, &end, &add, &inside);
  PairTerm term;
  term.visible = begin < end && add != kMinusInfinity;
  term.after_softcap = add;
  if (!terms_.alibi_slopes.empty()) {
    term.after_softcap -=
        double{SlopeOf(row)} * static_cast<double>(std::abs(Aligned(row) - key.first_position));
  }
  if (has_inside()) term.before_softcap = inside;
  if (drops()) Keeps(row, key, 0, 1, &term.keep);
  return term;
}

double ScorePass::ScoreOf(const PairTerm& term, double product, double* slope) const {
  const double score = problem_.softmax_scale * product + term.before_softcap;
  *slope = 1.0;
  if (problem_.softcap == 0) return score + term.after_softcap;
  const double t = std::tanh(score / problem_.softcap);
  *slope = 1.0 - t * t;
  return problem_.softcap * t + term.after_softcap;
}

}  // namespace ringattn::worker::cpu
