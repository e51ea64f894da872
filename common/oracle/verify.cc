#include "common/oracle/verify.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "common/oracle/numeric.h"
#include "common/oracle/pair_math.h"
#include "common/oracle/verify_scan.h"

namespace ringattn::oracle {
namespace {

int64_t CostOf(const AttentionShape& shape) {
  // In double: a problem of 10^6 tokens must not overflow into a cheap one.
  double pairs = 0.0;
  for (size_t d = 0; d + 1 < shape.cu_seqlens_q.size(); ++d) {
    pairs += static_cast<double>(shape.cu_seqlens_q[d + 1] - shape.cu_seqlens_q[d]) *
             static_cast<double>(shape.cu_seqlens_k[d + 1] - shape.cu_seqlens_k[d]);
  }
  pairs *= static_cast<double>(shape.batch * shape.num_heads);
  return static_cast<int64_t>(
      std::min(pairs * static_cast<double>(shape.head_dim + shape.head_dim_v), 9e18));
}

// The inputs of EvaluateKeyRows for every query row.
struct Statistics {
  std::vector<float> computed_lse;
  const float* lse = nullptr;
  Delta delta;
};

Statistics GivenStatistics(const AttentionSpec& spec, const Inputs& inputs,
                           const ForwardTensors& forward) {
  Statistics statistics;
  statistics.lse = forward.lse;
  statistics.delta = DeltaOf(spec, forward.out, inputs.dout, inputs.dlse);
  return statistics;
}

Statistics ComputedStatistics(const AttentionSpec& spec, const Inputs& inputs) {
  const AttentionShape& shape = spec.shape;
  Inputs forward = inputs;
  forward.dout = nullptr;
  const Result result = EvaluateAll(spec, forward);
  Statistics statistics;
  const size_t rows = result.out.rows.size();
  statistics.computed_lse.resize(rows);
  statistics.delta.value.resize(rows);
  statistics.delta.magnitude.resize(rows);
  statistics.delta.rounding.resize(rows);
  statistics.delta.floor.resize(rows);
  for (size_t at = 0; at < rows; ++at) {
    const RowId& row = result.out.rows[at];
    const int64_t index = (row.batch * shape.num_heads + row.head) * shape.seq_len_q + row.token;
    statistics.computed_lse[index] = static_cast<float>(result.lse.exact[at]);
    double squares = 0.0;
    for (int64_t d = 0; d < shape.head_dim_v; ++d) {
      const int64_t element = static_cast<int64_t>(at) * shape.head_dim_v + d;
      const double dout = Load(spec.dtype, inputs.dout, element);
      statistics.delta.value[index] += dout * result.out.exact[element];
      const double magnitude = std::abs(dout) * result.out.magnitude[element];
      statistics.delta.magnitude[index] += magnitude;
      squares += magnitude * magnitude;
      statistics.delta.floor[index] += std::abs(dout) * result.out.floor[element];
    }
    statistics.delta.rounding[index] = DeltaRounding(squares);
    if (inputs.dlse == nullptr) continue;
    statistics.delta.value[index] -= inputs.dlse[index];
    statistics.delta.magnitude[index] += std::abs(double{inputs.dlse[index]});
  }
  statistics.lse = statistics.computed_lse.data();
  return statistics;
}

// Returns the samples and the scan's suspects, each once, in ascending order.
std::vector<RowId> WithSuspects(std::vector<RowId> rows,
                                const std::map<TensorId, Suspects>& suspects,
                                std::initializer_list<TensorId> tensors) {
  for (const TensorId tensor : tensors) {
    const auto found = suspects.find(tensor);
    if (found == suspects.end()) continue;
    rows.insert(rows.end(), found->second.rows.begin(), found->second.rows.end());
  }
  const auto place = [](const RowId& row) { return std::tie(row.batch, row.token, row.head); };
  std::sort(rows.begin(), rows.end(),
            [&](const RowId& a, const RowId& b) { return place(a) < place(b); });
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

}  // namespace

Report Verify(const AttentionSpec& spec, const Inputs& inputs, const Outputs& actual,
              const ForwardTensors& given, const VerifyOptions& options) {
  Outputs judged = actual;
  if (judged.out == nullptr) judged.out = given.out;
  if (judged.lse == nullptr) judged.lse = given.lse;
  std::vector<Unjudged> unjudged;
  const auto give_up = [&unjudged](TensorId tensor, auto& data, const char* reason) {
    if (data == nullptr) return;
    unjudged.push_back({tensor, reason});
    data = nullptr;
  };
  if (inputs.dout == nullptr) {
    constexpr char kReason[] = "gradients need dout in addition to q, k and v";
    give_up(TensorId::kDq, judged.dq, kReason);
    give_up(TensorId::kDk, judged.dk, kReason);
    give_up(TensorId::kDv, judged.dv, kReason);
    give_up(TensorId::kDsinks, judged.dsinks, kReason);
    give_up(TensorId::kDbias, judged.dbias, kReason);
  }
  const int64_t cost = CostOf(spec.shape);
  const bool has_forward = judged.out != nullptr && judged.lse != nullptr;
  const bool whole = cost <= options.whole_cost;
  if (!whole && !has_forward && cost > options.statistics_cost) {
    constexpr char kReason[] = "too large without out and lse of the forward pass";
    give_up(TensorId::kDk, judged.dk, kReason);
    give_up(TensorId::kDv, judged.dv, kReason);
    give_up(TensorId::kDsinks, judged.dsinks, kReason);
  }
  // Whether a tensor needs the statistics of every query row.
  const bool wants_key_rows =
      judged.dk != nullptr || judged.dv != nullptr || judged.dsinks != nullptr;

  Inputs needed = inputs;
  Result expected;
  std::map<TensorId, Suspects> suspects;
  if (whole) {
    if (judged.dq == nullptr && !wants_key_rows && judged.dbias == nullptr) {
      needed.dout = nullptr;
    }
    expected = EvaluateAll(spec, needed);
  } else {
    suspects = Scan(spec, inputs, judged, options.rows);
    if (judged.dq == nullptr) needed.dout = nullptr;
    expected =
        EvaluateQueryRows(spec, needed,
                          WithSuspects(SampleQueryRows(spec, options.rows, options.seed), suspects,
                                       {TensorId::kOut, TensorId::kLse, TensorId::kDq}));
    if (judged.dbias != nullptr) {
      expected.dbias =
          EvaluateBiasRows(spec, inputs, SampleBiasRows(spec, options.rows, options.seed + 2));
    }
    if (judged.probabilities != nullptr) {
      expected.probabilities = EvaluateProbabilities(
          spec, inputs, SampleChosenRows(spec, options.rows, options.seed + 3));
    }
    if (wants_key_rows) {
      const Statistics statistics = has_forward
                                        ? GivenStatistics(spec, inputs, {judged.out, judged.lse})
                                        : ComputedStatistics(spec, inputs);
      Result keys =
          EvaluateKeyRows(spec, inputs,
                          WithSuspects(SampleKeyRows(spec, options.rows, options.seed + 1),
                                       suspects, {TensorId::kDk, TensorId::kDv}),
                          statistics.lse, statistics.delta);
      expected.dk = std::move(keys.dk);
      expected.dv = std::move(keys.dv);
      if (judged.dsinks != nullptr) {
        expected.dsinks =
            EvaluateSinkGradients(spec, inputs.sinks, statistics.lse, statistics.delta);
      }
    }
  }
  Report report = Compare(spec, expected, judged);
  report.unjudged = std::move(unjudged);
  for (TensorReport& tensor : report.tensors) {
    const auto found = suspects.find(tensor.tensor);
    if (found != suspects.end()) tensor.suspects = found->second.found;
  }
  return report;
}

}  // namespace ringattn::oracle
