#include "worker/kernels/naive/naive_kernels.h"

#include <cassert>
#include <cmath>
#include <cstring>
#include <limits>
#include <list>
#include <map>
#include <vector>

#include "common/oracle/numeric.h"
#include "worker/kernels/e4m3.h"
#include "worker/kernels/naive/seen_keys.h"

namespace ringattn::worker {
namespace {

using oracle::Load;
using oracle::Store;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The operands of a forward: the call's own or, in e4m3, copies rounded into fp32.
class ForwardOperands {
 public:
  explicit ForwardOperands(const ForwardCall& call)
      : problem_(*call.problem), q_(call.q), blocks_(call.blocks) {
    if (!float8()) return;
    problem_.dtype = DType::kFloat32;
    const AttentionProblem& p = *call.problem;
    const auto round = [&](const void* data, int64_t rows, int64_t heads, int64_t dim,
                           const std::vector<float>& largest) {
      return Rounded(p, data, rows, heads, dim, largest);
    };
    std::vector<float> q, k, v;
    Include(p, call.q, call.q_rows, call.q_pieces, p.num_heads, p.head_dim, q);
    for (const KvBlock& block : call.blocks) {
      Include(p, block.k, block.rows, block.pieces, p.num_kv_heads, p.head_dim, k);
      Include(p, block.v, block.rows, block.pieces, p.num_kv_heads, p.head_dim_v, v);
    }
    q_ = round(call.q, call.q_rows, p.num_heads, p.head_dim, q);
    for (KvBlock& block : blocks_) {
      block.k = round(block.k, block.rows, p.num_kv_heads, p.head_dim, k);
      block.v = round(block.v, block.rows, p.num_kv_heads, p.head_dim_v, v);
    }
  }

  bool float8() const { return problem_.compute == ComputeDType::kFloat8E4M3; }
  const AttentionProblem& problem() const { return problem_; }  // with the dtype of the operands
  const void* q() const { return q_; }
  const std::vector<KvBlock>& blocks() const { return blocks_; }
  // Returns the weight of a key with this score in the sum of values, relative to `max`. `of_keys`
  // is the largest score of the call's keys, relative to which e4m3 rounds.
  double Weight(double score, double of_keys, double max) const {
    if (!float8()) return std::exp(score - max);
    return RoundProbability(static_cast<float>(std::exp(score - of_keys))) *
           std::exp(of_keys - max);
  }

 private:
  // Updates the largest magnitude of each batch row and K/V head.
  static void Include(const AttentionProblem& p, const void* data, int64_t rows,
                      const std::vector<Piece>& pieces, int64_t heads, int64_t dim,
                      std::vector<float>& largest) {
    largest.resize(p.batch * p.num_kv_heads);
    for (int64_t b = 0; b < p.batch; ++b) {
      for (const Piece& piece : pieces) {
        for (int64_t r = piece.local_begin; r < piece.local_begin + piece.length; ++r) {
          for (int64_t e = 0; e < heads * dim; ++e) {
            const auto x =
                static_cast<float>(Load(p.dtype, data, (b * rows + r) * heads * dim + e));
            float& most = largest[b * p.num_kv_heads + e / dim / (heads / p.num_kv_heads)];
            if (std::isfinite(x)) most = std::max(most, std::abs(x));
          }
        }
      }
    }
  }

  const void* Rounded(const AttentionProblem& p, const void* data, int64_t rows, int64_t heads,
                      int64_t dim, const std::vector<float>& largest) {
    std::vector<float>& copy = copies_.emplace_back(p.batch * rows * heads * dim);
    for (size_t at = 0; at < copy.size(); ++at) {
      const int64_t head = static_cast<int64_t>(at) / dim % heads / (heads / p.num_kv_heads);
      const int64_t batch = static_cast<int64_t>(at) / (rows * heads * dim);
      const int e = ScaleExponent(largest[batch * p.num_kv_heads + head]);
      const double x = std::ldexp(Load(p.dtype, data, static_cast<int64_t>(at)), -e);
      // Rows outside all spans may hold anything.
      copy[at] = std::ldexp(std::abs(x) > kE4m3Max ? 0.0f : RoundToE4m3(static_cast<float>(x)), e);
      if (std::isinf(x)) copy[at] = std::nanf("");
    }
    return copy.data();
  }

  AttentionProblem problem_;
  const void* q_;
  std::vector<KvBlock> blocks_;
  std::list<std::vector<float>> copies_;
};

void ForwardRow(const ForwardCall& call, const ForwardOperands& operands, const SeenKeys& keys,
                int64_t b, int64_t i, int64_t h) {
  const AttentionProblem& p = *call.problem;
  const int64_t kv_head = KvHeadOf(p, h);
  const int64_t out_offset = RowOffset(b, call.q_rows, i, p.num_heads, h, p.head_dim_v);
  float& lse = call.lse[(b * p.num_heads + h) * call.q_rows + i];

  // The previous partial acts as one more key, with score lse and value out.
  double max = call.initial ? -kInfinity : lse;
  const std::vector<SeenKey> seen = keys.Of({b, i, h});
  double of_keys = -kInfinity;
  for (const SeenKey& key : seen) of_keys = std::max(of_keys, key.score);
  max = std::max(max, of_keys);
  double sum = 0.0;
  std::vector<double> out(p.head_dim_v, 0.0);
  if (!call.initial) {
    const double weight = max == -kInfinity ? 0.0 : std::exp(lse - max);
    sum += weight;
    for (int64_t d = 0; d < p.head_dim_v; ++d) out[d] = weight * call.out_acc[out_offset + d];
  }
  for (const SeenKey& key : seen) {
    const double weight = std::exp(key.score - max);
    const KvBlock& block = operands.blocks()[key.block];
    const int64_t v_offset =
        RowOffset(b, block.rows, key.row, p.num_kv_heads, kv_head, p.head_dim_v);
    const double kept = operands.Weight(key.score, of_keys, max) * key.keep;
    sum += weight;
    for (int64_t d = 0; d < p.head_dim_v; ++d) {
      out[d] += kept * Load(operands.problem().dtype, block.v, v_offset + d);
    }
  }
  if (call.sinks != nullptr && call.final) {
    const double sink = call.sinks[h];
    const double higher = std::max(max, sink);
    if (higher > max) {
      const double shrunk = max == -kInfinity ? 0.0 : std::exp(max - higher);
      sum *= shrunk;
      for (double& value : out) value *= shrunk;
      max = higher;
    }
    if (max != -kInfinity) sum += std::exp(sink - max);
  }
  for (double& value : out) value = sum == 0.0 ? 0.0 : value / sum;
  lse = sum == 0.0 ? -kInfinity : static_cast<float>(max + std::log(sum));
  for (int64_t d = 0; d < p.head_dim_v; ++d) {
    if (call.final) {
      Store(p.out_dtype(), call.out, out_offset + d, out[d]);
    } else {
      call.out_acc[out_offset + d] = static_cast<float>(out[d]);
    }
  }
}

int64_t PlaceOf(bool heads_first, int64_t outer, int64_t rows, int64_t heads, int64_t row,
                int64_t head) {
  return heads_first ? (outer * heads + head) * rows + row : (outer * rows + row) * heads + head;
}

// Calls body(part's row, whole's row, part's head, whole's head).
template <typename Body>
void ForEachOfPart(absl::Span<const RowRun> runs, absl::Span<const int32_t> heads,
                   const Body& body) {
  for (const RowRun& run : runs) {
    for (int64_t r = 0; r < run.count; ++r) {
      for (size_t h = 0; h < heads.size(); ++h) {
        body(run.first + r, run.begin + r * run.step, static_cast<int64_t>(h), heads[h]);
      }
    }
  }
}

// One row and head of a scatter.
struct ScatterState {
  std::vector<double> values;
  double lse = -kInfinity;
};

ScatterState BeforeScatter(const ScatterCall& call, int64_t at, int64_t lse_at) {
  ScatterState state;
  for (int64_t i = 0; i < call.width; ++i) {
    state.values.push_back(call.initial ? 0.0 : call.values[at * call.width + i]);
  }
  if (call.merges && !call.initial) state.lse = call.lse[lse_at];
  return state;
}

void JoinScatter(const std::vector<double>& values, double lse, ScatterState& state) {
  if (lse == -kInfinity) return;
  const double max = state.lse > lse || std::isnan(state.lse) ? state.lse : lse;
  const double before = state.lse == -kInfinity ? 0.0 : std::exp(state.lse - max);
  const double with = std::exp(lse - max);
  for (size_t i = 0; i < values.size(); ++i) {
    const double kept = before == 0.0 ? 0.0 : before * state.values[i];
    state.values[i] = (kept + with * values[i]) / (before + with);
  }
  state.lse = max + std::log(before + with);
}

// Computes all rows and heads in fp64, following the contract in attention_kernel.h.
void DoScatter(const ScatterCall& call) {
  std::vector<ScatterState> states;
  for (int64_t o = 0; o < call.outer; ++o) {
    for (int64_t row = 0; row < call.rows; ++row) {
      for (int64_t h = 0; h < call.heads; ++h) {
        states.push_back(BeforeScatter(call,
                                       PlaceOf(call.heads_first, o, call.rows, call.heads, row, h),
                                       PlaceOf(true, o, call.rows, call.heads, row, h)));
      }
    }
  }
  const auto state_of = [&](int64_t o, int64_t row, int64_t h) -> ScatterState& {
    return states[(o * call.rows + row) * call.heads + h];
  };
  for (int64_t o = 0; o < call.outer; ++o) {
    for (const ScatterPart& part : call.parts) {
      const auto heads = static_cast<int64_t>(part.head_of.size());
      ForEachOfPart(
          part.row_runs, part.head_of,
          [&](int64_t part_row, int64_t row, int64_t part_head, int64_t head) {
            const float* const from =
                part.values +
                PlaceOf(call.heads_first, o, part.rows, heads, part_row, part_head) * call.width;
            ScatterState& state = state_of(o, row, head);
            if (!call.merges) {
              // fp32, as attention_kernel.h requires.
              for (int64_t i = 0; i < call.width; ++i) {
                state.values[i] = static_cast<float>(state.values[i]) + from[i];
              }
              return;
            }
            const double lse = part.lse[PlaceOf(true, o, part.rows, heads, part_row, part_head)];
            JoinScatter(std::vector<double>(from, from + call.width), lse, state);
          });
    }
  }
  for (int64_t o = 0; o < call.outer; ++o) {
    for (int64_t row = 0; row < call.rows; ++row) {
      for (int64_t h = 0; h < call.heads; ++h) {
        ScatterState& state = state_of(o, row, h);
        if (call.final && call.sinks != nullptr) {
          JoinScatter(std::vector<double>(call.width, 0.0), call.sinks[h], state);
        }
        const int64_t at = PlaceOf(call.heads_first, o, call.rows, call.heads, row, h);
        for (int64_t i = 0; i < call.width; ++i) {
          if (call.final) {
            Store(call.dtype, call.result, at * call.width + i, state.values[i]);
          } else {
            call.values[at * call.width + i] = static_cast<float>(state.values[i]);
          }
        }
        if (!call.merges) continue;
        call.lse[PlaceOf(true, o, call.rows, call.heads, row, h)] = static_cast<float>(state.lse);
      }
    }
  }
}

void MergeRow(const MergeCall& call, int64_t b, int64_t i, int64_t h) {
  const AttentionProblem& p = *call.problem;
  const int64_t offset = RowOffset(b, call.q_rows, i, p.num_heads, h, p.head_dim_v);
  const int64_t at = (b * p.num_heads + h) * call.q_rows + i;
  const bool has_sink = call.final && call.sinks != nullptr;
  double max = has_sink ? double{call.sinks[h]} : -kInfinity;
  bool is_nan = false;
  for (const MergePart& part : call.parts) {
    is_nan = is_nan || std::isnan(part.lse[at]);
    max = std::max(max, double{part.lse[at]});
  }
  double sum = has_sink && max != -kInfinity ? std::exp(call.sinks[h] - max) : 0.0;
  std::vector<double> out(p.head_dim_v, 0.0);
  for (const MergePart& part : call.parts) {
    if (part.lse[at] == -kInfinity) continue;
    const double weight = std::exp(part.lse[at] - max);
    sum += weight;
    for (int64_t d = 0; d < p.head_dim_v; ++d) out[d] += weight * part.out[offset + d];
  }
  if (is_nan) sum = std::nan("");
  call.lse[at] = sum == 0.0 ? -kInfinity : static_cast<float>(max + std::log(sum));
  for (int64_t d = 0; d < p.head_dim_v; ++d) {
    const double value = sum == 0.0 ? 0.0 : out[d] / sum;
    if (call.final) {
      Store(p.out_dtype(), call.out, offset + d, value);
    } else {
      call.out_acc[offset + d] = static_cast<float>(value);
    }
  }
}

void BackwardRow(const BackwardCall& call, const SeenKeys& keys, int64_t b, int64_t i, int64_t h) {
  const AttentionProblem& p = *call.problem;
  const int64_t kv_head = KvHeadOf(p, h);
  const int64_t q_offset = RowOffset(b, call.q_rows, i, p.num_heads, h, p.head_dim);
  const int64_t dout_offset = RowOffset(b, call.q_rows, i, p.num_heads, h, p.head_dim_v);
  const int64_t statistic = (b * p.num_heads + h) * call.q_rows + i;
  const double lse = call.lse[statistic];
  if (lse == -kInfinity) return;
  for (const SeenKey& key : keys.Of({b, i, h})) {
    const KvBlock& block = call.blocks[key.block];
    const int64_t k_offset = RowOffset(b, block.rows, key.row, p.num_kv_heads, kv_head, p.head_dim);
    const int64_t v_offset =
        RowOffset(b, block.rows, key.row, p.num_kv_heads, kv_head, p.head_dim_v);
    const double probability = std::exp(key.score - lse);
    const double dp = Dot(p.dtype, call.dout, dout_offset, block.v, v_offset, p.head_dim_v);
    const double change = key.keep * dp - call.delta[statistic];
    const double ds = p.softmax_scale * probability * change * key.slope;
    for (int64_t d = 0; d < p.head_dim_v; ++d) {
      block.dv[v_offset + d] +=
          static_cast<float>(probability * key.keep * Load(p.dtype, call.dout, dout_offset + d));
    }
    for (int64_t d = 0; d < p.head_dim; ++d) {
      call.dq_acc[q_offset + d] += static_cast<float>(ds * Load(p.dtype, block.k, k_offset + d));
      block.dk[k_offset + d] += static_cast<float>(ds * Load(p.dtype, call.q, q_offset + d));
    }
  }
}

// The gradient of a bias, summed in fp64. Sums start at 0 for all pairs of the call inside the
// band, including those that other terms hide.
class BiasGradients {
 public:
  explicit BiasGradients(const BiasGradientCall& call)
      : call_(call),
        p_(*call.problem),
        bias_(*p_.terms.bias),
        keys_(p_, call.q_rows, call.q_pieces, call.q, call.blocks, call.terms) {}

  void Run() {
    std::map<int64_t, double> sums;  // by element of dbias
    const int64_t planes = (bias_.per_batch ? p_.batch : 1) * (bias_.per_head ? p_.num_heads : 1);
    for (int64_t plane = 0; plane < planes; ++plane) {
      for (int64_t i = 0; i < call_.q_rows; ++i) {
        for (int64_t at : keys_.PlaneElementsShownTo(i)) sums[FirstOf(plane) + at] = 0;
      }
    }
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t h = 0; h < p_.num_heads; ++h) {
        for (int64_t i = 0; i < call_.q_rows; ++i) AddRow(b, i, h, sums);
      }
    }
    const DType dtype = bias_.float32 ? DType::kFloat32 : p_.dtype;
    for (const auto& [at, sum] : sums) Store(dtype, call_.dbias, at, sum);
  }

 private:
  int64_t FirstOf(int64_t plane) const {
    return plane * p_.terms.PlaneRows(call_.q_rows) * p_.terms.columns;
  }

  void AddRow(int64_t b, int64_t i, int64_t h, std::map<int64_t, double>& sums) const {
    const int64_t statistic = (b * p_.num_heads + h) * call_.q_rows + i;
    const double lse = call_.lse[statistic];
    if (lse == -kInfinity) return;
    const int64_t dout_offset = RowOffset(b, call_.q_rows, i, p_.num_heads, h, p_.head_dim_v);
    const int64_t plane = PlaneOf(bias_, p_.num_heads, b, h);
    for (const SeenKey& key : keys_.Of({b, i, h})) {
      const KvBlock& block = call_.blocks[key.block];
      const int64_t v_offset =
          RowOffset(b, block.rows, key.row, p_.num_kv_heads, KvHeadOf(p_, h), p_.head_dim_v);
      const double dp = Dot(p_.dtype, call_.dout, dout_offset, block.v, v_offset, p_.head_dim_v);
      const double ds = std::exp(key.score - lse) * (key.keep * dp - call_.delta[statistic]);
      sums.at(FirstOf(plane) + keys_.PlaneElementOf(i, key.block, key.row)) +=
          ds * (bias_.before_softcap ? key.slope : 1.0);
    }
  }

  const BiasGradientCall& call_;
  const AttentionProblem& p_;
  const BiasForm& bias_;
  const SeenKeys keys_;
};

template <typename Call, typename RowFunction>
void ForEachRow(const Call& call, RowFunction row) {
  for (int64_t b = 0; b < call.problem->batch; ++b) {
    for (int64_t h = 0; h < call.problem->num_heads; ++h) {
      for (int64_t i = 0; i < call.q_rows; ++i) row(b, i, h);
    }
  }
}

struct Runner {
  void operator()(const ForwardCall& call) const {
    const ForwardOperands operands(call);
    const SeenKeys keys(operands.problem(), call.q_rows, call.q_pieces, operands.q(),
                        operands.blocks(), call.terms);
    ForEachRow(call,
               [&](int64_t b, int64_t i, int64_t h) { ForwardRow(call, operands, keys, b, i, h); });
  }
  void operator()(const BackwardCall& call) const {
    const SeenKeys keys(*call.problem, call.q_rows, call.q_pieces, call.q, call.blocks, call.terms);
    ForEachRow(call, [&](int64_t b, int64_t i, int64_t h) { BackwardRow(call, keys, b, i, h); });
  }
  void operator()(const BiasGradientCall& call) const { BiasGradients(call).Run(); }
  void operator()(const DeltaCall& call) const {
    const AttentionProblem& p = *call.problem;
    if (call.dq_acc != nullptr) std::fill_n(call.dq_acc, DqElements(p, call.q_rows), 0.0f);
    ForEachRow(call, [&](int64_t b, int64_t i, int64_t h) {
      const int64_t offset = RowOffset(b, call.q_rows, i, p.num_heads, h, p.head_dim_v);
      const int64_t at = (b * p.num_heads + h) * call.q_rows + i;
      double delta = 0.0;
      for (int64_t d = offset; d < offset + p.head_dim_v; ++d) {
        delta += double{Load(p.dtype, call.dout, d)} * Load(p.out_dtype(), call.out, d);
      }
      if (call.dlse != nullptr) delta = call.lse[at] == -kInfinity ? 0.0 : delta - call.dlse[at];
      call.delta[at] = static_cast<float>(delta);
    });
  }
  void operator()(const SinkGradientCall& call) const {
    const AttentionProblem& p = *call.problem;
    std::vector<double> sums(p.num_heads, 0.0);
    ForEachRow(call, [&](int64_t b, int64_t i, int64_t h) {
      const int64_t at = (b * p.num_heads + h) * call.q_rows + i;
      if (call.sinks[h] == -kInfinity) return;
      sums[h] -= std::exp(double{call.sinks[h]} - call.lse[at]) * call.delta[at];
    });
    for (int64_t h = 0; h < p.num_heads; ++h) call.dsinks[h] = static_cast<float>(sums[h]);
  }
  void operator()(const ProbabilitiesCall& call) const {
    const AttentionProblem& p = *call.problem;
    assert(!p.terms.by_keys);
    const SeenKeys keys(p, call.q_rows, call.q_pieces, call.q, call.blocks, call.terms);
    for (size_t i = 0; i < call.rows.size(); ++i) {
      const ChosenRow& chosen = call.rows[i];
      for (int64_t h = 0; h < p.num_heads; ++h) {
        float* row = call.target + (static_cast<int64_t>(i) * p.num_heads + h) * call.columns;
        for (int64_t j = 0; call.initial && j < call.columns; ++j) row[j] = -kInfinity;
        for (const SeenKey& key : keys.Of({chosen.batch, chosen.row, h})) {
          row[keys.PositionOf(key)] = static_cast<float>(key.score);
        }
        if (!call.final) continue;
        const double lse = call.lse[(chosen.batch * p.num_heads + h) * call.q_rows + chosen.row];
        for (int64_t j = 0; j < call.columns; ++j) {
          const bool seen = row[j] != -kInfinity && lse != -kInfinity;
          row[j] = seen ? static_cast<float>(std::exp(row[j] - lse)) : 0.0f;
        }
      }
    }
  }
  void operator()(const ZeroCall& call) const {
    if (call.bytes > 0) std::memset(call.target, 0, call.bytes);
  }
  void operator()(const AddCall& call) const {
    for (int64_t i = 0; i < call.count; ++i) call.target[i] += call.source[i];
  }
  void operator()(const ConvertCall& call) const {
    for (int64_t i = 0; i < call.count; ++i) Store(call.dtype, call.target, i, call.source[i]);
  }
  void operator()(const MergeCall& call) const {
    ForEachRow(call, [&](int64_t b, int64_t i, int64_t h) { MergeRow(call, b, i, h); });
  }
  void operator()(const GatherCall& call) const {
    for (int64_t o = 0; o < call.outer; ++o) {
      ForEachOfPart(call.row_runs, call.head_of,
                    [&](int64_t part_row, int64_t row, int64_t part_head, int64_t head) {
                      const int64_t to = PlaceOf(call.heads_first, o, call.part_rows,
                                                 call.part_heads, part_row, part_head);
                      const int64_t from =
                          PlaceOf(call.heads_first, o, call.rows, call.heads, row, head);
                      std::memcpy(static_cast<char*>(call.part) + to * call.inner_bytes,
                                  static_cast<const char*>(call.whole) + from * call.inner_bytes,
                                  call.inner_bytes);
                    });
    }
  }
  void operator()(const ScatterCall& call) const { DoScatter(call); }
  void operator()(const CopyCall& call) const {
    for (int64_t r = 0; r < call.runs; ++r) {
      std::memcpy(static_cast<char*>(call.target) + r * call.target_pitch,
                  static_cast<const char*>(call.source) + r * call.source_pitch, call.run_bytes);
    }
  }
};

}  // namespace

void RunNaively(const KernelCall& call) { std::visit(Runner(), call); }

}  // namespace ringattn::worker
