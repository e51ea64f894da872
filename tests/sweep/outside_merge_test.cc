// Requests for parts of one problem, merged outside as in merge.h and differentiated through that
// merge, equal the whole problem. The backward of each part gets its share of dout and, as dlse,
// the gradient of its weight in the merge.
#include <cmath>
#include <limits>

#include "common/attention/merge.h"
#include "gtest/gtest.h"
#include "tests/sweep/solve.h"

namespace ringattn::tests {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

AttentionSpec DenseSpec(int64_t sq, int64_t sk) {
  AttentionSpec spec;
  spec.shape = {.batch = 2,
                .seq_len_q = sq,
                .seq_len_kv = sk,
                .num_heads = 4,
                .num_kv_heads = 2,
                .head_dim = 16,
                .head_dim_v = 24,
                .cu_seqlens_q = {0, sq},
                .cu_seqlens_k = {0, sk}};
  spec.options.softmax_scale = 0.25;
  spec.has_dlse = true;
  return spec;
}

// One request for a part: its inputs except dout and dlse.
struct Part {
  AttentionSpec spec;
  TensorMap inputs;
  Placement placement;
};

TensorMap Run(const Part& part, Direction direction, bool recompute_forward,
              const TensorMap& inputs) {
  auto outputs = RunProblem(part.spec, part.placement, direction, recompute_forward, inputs,
                            Engine::kExecutor, KernelSet::kCpu);
  EXPECT_TRUE(outputs.ok()) << outputs.status();
  return outputs.ok() ? *std::move(outputs) : TensorMap{};
}

// A forward's results, or their gradients: [batch, tokens, heads, dim] and [batch, heads, tokens].
struct Partial {
  std::vector<float> out, lse;
};

// body(a row of out, its place in lse)
template <typename Body>
void ForRows(const AttentionShape& shape, const Body& body) {
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t i = 0; i < shape.seq_len_q; ++i) {
      for (int64_t h = 0; h < shape.num_heads; ++h) {
        body((b * shape.seq_len_q + i) * shape.num_heads + h,
             (b * shape.num_heads + h) * shape.seq_len_q + i);
      }
    }
  }
}

void MergeInto(const AttentionShape& shape, const Partial& part, Partial& merged) {
  const int64_t dim = shape.head_dim_v;
  ForRows(shape, [&](int64_t row, int64_t statistic) {
    const MergeWeights weights = MergeLse(merged.lse[statistic], part.lse[statistic]);
    merged.lse[statistic] = weights.lse;
    for (int64_t e = row * dim; e < (row + 1) * dim; ++e) {
      merged.out[e] = weights.first * merged.out[e] + weights.second * part.out[e];
    }
  });
}

// The gradients of a part's out and lse by those of the merged ones. With w = exp(part's lse -
// merged lse) out is the sum of w times the parts' outs, and a part's lse moves its own w by
// w (1 - w), the others' by -w times theirs.
Partial ShareOf(const AttentionShape& shape, const Partial& part, const Partial& merged,
                const Partial& gradient) {
  const int64_t dim = shape.head_dim_v;
  Partial share = gradient;
  ForRows(shape, [&](int64_t row, int64_t statistic) {
    const bool seen = merged.lse[statistic] != -kInfinity;
    const double weight =
        seen ? std::exp(double{part.lse[statistic]} - double{merged.lse[statistic]}) : 0.0;
    double along = gradient.lse[statistic];
    for (int64_t e = row * dim; e < (row + 1) * dim; ++e) {
      along += double{gradient.out[e]} * (double{part.out[e]} - double{merged.out[e]});
      share.out[e] = static_cast<float>(weight * gradient.out[e]);
    }
    share.lse[statistic] = static_cast<float>(weight * along);
  });
  return share;
}

struct Merged {
  Partial forward;
  std::vector<TensorMap> gradients;  // of each part
};

// `inputs` has dout and dlse, the merged result's gradients.
Merged Solve(const std::vector<Part>& parts, const TensorMap& inputs) {
  const AttentionShape& shape = parts.front().spec.shape;
  std::vector<Partial> forwards;
  Merged merged;
  for (const Part& part : parts) {
    const TensorMap outputs = Run(part, Direction::kForward, false, part.inputs);
    forwards.push_back({Floats(outputs.at(TensorId::kOut)), Floats(outputs.at(TensorId::kLse))});
    if (forwards.size() == 1) {
      merged.forward = forwards.back();
    } else {
      MergeInto(shape, forwards.back(), merged.forward);
    }
  }
  const Partial gradient = {Floats(inputs.at(TensorId::kDout)), Floats(inputs.at(TensorId::kDlse))};
  for (size_t n = 0; n < parts.size(); ++n) {
    const Partial share = ShareOf(shape, forwards[n], merged.forward, gradient);
    TensorMap given = parts[n].inputs;
    given[TensorId::kDout] = Bytes(share.out);
    given[TensorId::kDlse] = Bytes(share.lse);
    given[TensorId::kOut] = Bytes(forwards[n].out);
    given[TensorId::kLse] = Bytes(forwards[n].lse);
    merged.gradients.push_back(Run(parts[n], Direction::kBackward, false, given));
  }
  return merged;
}

// The whole problem in one request: out, lse and gradients.
TensorMap Whole(const AttentionSpec& spec, const TensorMap& inputs) {
  const Part whole = {spec, inputs, {Layout::kContiguous, 1, 1, ScheduleKind::kSingle}};
  TensorMap all = Run(whole, Direction::kForward, false, inputs);
  all.merge(Run(whole, Direction::kBackward, true, inputs));
  return all;
}

void ExpectNear(const std::vector<float>& a, const std::vector<float>& b, TensorId id) {
  ASSERT_EQ(a.size(), b.size()) << TensorName(id);
  for (size_t e = 0; e < a.size(); ++e) {
    if (a[e] == b[e]) continue;  // equal infinities too
    ASSERT_LE(std::abs(a[e] - b[e]), 2e-5f * (1.0f + std::abs(b[e])))
        << TensorName(id) << " element " << e << ": " << a[e] << " and " << b[e];
  }
}

void ExpectForward(const Merged& merged, const TensorMap& whole) {
  ExpectNear(merged.forward.out, Floats(whole.at(TensorId::kOut)), TensorId::kOut);
  ExpectNear(merged.forward.lse, Floats(whole.at(TensorId::kLse)), TensorId::kLse);
}

// A tensor that all parts add to; a part without sinks, say, has no gradient of them.
void ExpectSum(const Merged& merged, const TensorMap& whole, TensorId id) {
  const std::vector<float> expected = Floats(whole.at(id));
  std::vector<float> sum(expected.size(), 0.0f);
  for (const TensorMap& gradients : merged.gradients) {
    const auto found = gradients.find(id);
    if (found == gradients.end()) continue;
    const std::vector<float> part = Floats(found->second);
    ASSERT_EQ(part.size(), sum.size()) << TensorName(id);
    for (size_t e = 0; e < sum.size(); ++e) sum[e] += part[e];
  }
  ExpectNear(sum, expected, id);
}

// --- Keys ---------------------------------------------------------------------

// Returns the elements [begin, end) of the axis in [outer, axis, ...].
std::vector<uint8_t> Slice(const std::vector<uint8_t>& bytes, int64_t outer, int64_t axis,
                           int64_t begin, int64_t end) {
  const int64_t inner = static_cast<int64_t>(bytes.size()) / (outer * axis);
  std::vector<uint8_t> slice;
  for (int64_t o = 0; o < outer; ++o) {
    const auto first = bytes.begin() + o * axis * inner;
    slice.insert(slice.end(), first + begin * inner, first + end * inner);
  }
  return slice;
}

// In how many pieces a tensor's keys lie; 0: it has no axis of keys.
int64_t KeyPieces(const AttentionSpec& spec, TensorId id) {
  switch (id) {
    case TensorId::kK:
    case TensorId::kV:
    case TensorId::kDk:
    case TensorId::kDv:
    case TensorId::kKvSegmentIds:
      return spec.shape.batch;
    case TensorId::kBias:
    case TensorId::kDbias:
      return spec.shape.num_heads * spec.shape.seq_len_q;  // a plane per head, for all batch rows
    case TensorId::kMask:
      return spec.shape.seq_len_q;  // one plane
    default:
      return 0;
  }
}

// The request for keys [begin, end). A causal mask is aligned with the last key. For the first keys
// it therefore becomes a window that reaches as far as there are missing keys after them.
Part KeysOf(const AttentionSpec& spec, const TensorMap& inputs, int64_t begin, int64_t end,
            const Placement& placement) {
  const int64_t keys = spec.shape.seq_len_kv;
  Part part = {spec, inputs, placement};
  part.spec.shape.seq_len_kv = end - begin;
  part.spec.shape.cu_seqlens_k = {0, end - begin};
  AttentionOptions& options = part.spec.options;
  if (options.causal && end < keys) {
    options.causal = false;
    options.window_right = keys - end;
  }
  options.dropout.first_key += static_cast<uint32_t>(begin);
  if (begin > 0) options.sinks = false;  // they count once
  for (auto& [id, bytes] : part.inputs) {
    const int64_t pieces = KeyPieces(spec, id);
    if (pieces != 0) bytes = Slice(bytes, pieces, keys, begin, end);
  }
  if (!options.sinks) part.inputs.erase(TensorId::kSinks);
  return part;
}

std::vector<AttentionSpec> KeySpecs() {
  std::vector<AttentionSpec> specs;
  specs.push_back(DenseSpec(40, 90));
  specs.push_back(DenseSpec(60, 50));  // ten rows see no key, others none of the last ones
  specs.back().options.causal = true;
  specs.back().options.softcap = 3.0;
  specs.push_back(DenseSpec(50, 70));
  AttentionOptions& options = specs.back().options;
  options.causal = true;
  options.softcap = 4.0;
  options.sinks = true;
  options.segment_ids = true;
  options.bias = BiasForm{.per_head = true, .gradient = true};
  options.mask = MaskForm{};
  options.dropout = {.threshold = 9000, .seed = 7, .first_key = 11};
  return specs;
}

TEST(OutsideMerge, KeysOfTwoRequestsAreThoseOfOne) {
  for (const AttentionSpec& spec : KeySpecs()) {
    const TensorMap inputs = NormalInputs(spec, 31);
    const TensorMap whole = Whole(spec, inputs);
    const int64_t keys = spec.shape.seq_len_kv;
    for (const int64_t cut : {int64_t{1}, int64_t{33}, keys - 1}) {
      SCOPED_TRACE(testing::Message() << keys << " keys cut at " << cut);
      const std::vector<Part> parts = {
          KeysOf(spec, inputs, 0, cut, {Layout::kZigzag, 3, 1}),
          KeysOf(spec, inputs, cut, keys, {Layout::kStriped, 2, 1}),
      };
      const Merged merged = Solve(parts, inputs);
      ExpectForward(merged, whole);
      for (const auto& [id, expected] : whole) {
        if (id == TensorId::kOut || id == TensorId::kLse) continue;
        const int64_t pieces = KeyPieces(spec, id);
        if (pieces == 0) {
          ExpectSum(merged, whole, id);
          continue;
        }
        ExpectNear(Floats(merged.gradients[0].at(id)),
                   Floats(Slice(expected, pieces, keys, 0, cut)), id);
        ExpectNear(Floats(merged.gradients[1].at(id)),
                   Floats(Slice(expected, pieces, keys, cut, keys)), id);
      }
    }
  }
}

// --- Dilated levels -----------------------------------------------------------

std::vector<AttentionSpec> LevelSpecs() {
  std::vector<AttentionSpec> specs;
  specs.push_back(DenseSpec(60, 60));
  specs.back().options.dilation_levels = {{20, 1, {}, 0, 4}, {60, 3, {}, 0, 4}, {30, 5, 2, 1, 4}};
  specs.push_back(DenseSpec(60, 60));  // rows that no level selects
  specs.back().options.dilation_levels = {{60, 4, {}, 0, 4}, {16, 3, 0, 0, 3}};
  specs.push_back(specs.front());
  AttentionOptions& options = specs.back().options;
  options.causal = true;
  options.softcap = 4.0;
  options.sinks = true;
  options.segment_ids = true;
  options.alibi_slopes = {0.5f, 0.1f, 0.02f, 0.003f};
  options.bias = BiasForm{.per_batch = true, .per_head = true, .gradient = true};
  options.mask = MaskForm{.per_head = true};
  options.dropout = {.threshold = 9000, .seed = 7};
  return specs;
}

// The levels' weights have gradients too: the dlse of the shares carries them.
TEST(OutsideMerge, LevelsOfOneRequestEachAreThoseOfOne) {
  for (const AttentionSpec& spec : LevelSpecs()) {
    const TensorMap inputs = NormalInputs(spec, 32);
    const TensorMap whole = Whole(spec, inputs);
    std::vector<Part> parts;
    for (const DilationLevel& level : spec.options.dilation_levels) {
      parts.push_back({spec, inputs, {Layout::kZigzag, static_cast<int>(2 + parts.size()), 1}});
      Part& part = parts.back();
      part.spec.options.dilation_levels = {level};
      if (parts.size() == 1) continue;
      part.spec.options.sinks = false;  // they count once
      part.inputs.erase(TensorId::kSinks);
    }
    const Merged merged = Solve(parts, inputs);
    ExpectForward(merged, whole);
    for (const auto& [id, expected] : whole) {
      if (id != TensorId::kOut && id != TensorId::kLse) ExpectSum(merged, whole, id);
    }
  }
}

}  // namespace
}  // namespace ringattn::tests
