#include "common/oracle/comparator.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "common/oracle/float8.h"
#include "common/oracle/numeric.h"

namespace ringattn::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// |actual - expected|. Equal infinities have no error, and neither has a NaN where NaN is expected;
// any other non-finite value has an infinite error.
double ErrorOf(double actual, double expected) {
  if (actual == expected || (std::isnan(actual) && std::isnan(expected))) return 0.0;
  const double error = std::abs(actual - expected);
  return std::isfinite(error) ? error : kInfinity;
}

// Returns the error of an element and its bound. Where NaN is expected, its size is NaN too, and
// only NaN passes.
Judged JudgeElement(double actual, double expected, double bound) {
  return {ErrorOf(actual, expected), std::isnan(expected) ? 0.0 : bound};
}

// The u of the element rule.
double UnitOf(const AttentionSpec& spec) {
  return IsFloat8(spec) ? kFloat8Unit : ToleranceUnit(spec.dtype);
}

// Sums of squares over a group of rows.
struct Norms {
  double error = 0.0;
  double twin = 0.0;
  double exact = 0.0;
  double floor = 0.0;
  double magnitude = 0.0;
  double squared_row_magnitudes = 0.0;  // of each row's sum of squares

  Judged Judge(const AttentionSpec& spec, TensorId tensor) const {
    // The number of rows of equal weight with the same variance. (Fourth powers of tiny values
    // underflow; a row's weight is then undefined.)
    const double rows =
        squared_row_magnitudes > 0x1p-1000 ? magnitude / squared_row_magnitudes * magnitude : 1.0;
    const double small_sample =
        (tensor == TensorId::kDsinks ? 8.0 : 4.0 / rows) * UnitOf(spec) * std::sqrt(magnitude);
    // In e4m3 the twin's error dominates all other terms. The smaller factor separates it from the
    // error of a result computed without rounding q, k and v.
    const double twins = IsFloat8(spec) ? 1.5 : 2.0;
    return {std::sqrt(error),
            twins * std::sqrt(twin) + 1e-5 * std::sqrt(exact) + std::sqrt(floor) + small_sample};
  }
};

// The rows of a tensor.
struct RowAxes {
  int64_t batch;
  int64_t tokens;
  int64_t heads;
  bool heads_first = false;  // [batch][head][token] in memory

  int64_t IndexOf(const RowId& row) const {
    return heads_first ? (row.batch * heads + row.head) * tokens + row.token
                       : (row.batch * tokens + row.token) * heads + row.head;
  }
};

RowAxes AxesOf(const AttentionSpec& spec, TensorId tensor) {
  const AttentionShape& shape = spec.shape;
  if (tensor == TensorId::kDsinks) return {1, 1, shape.num_heads};
  if (tensor == TensorId::kDbias) {
    const BiasForm& bias = *spec.options.bias;
    return {bias.per_batch ? shape.batch : 1, shape.seq_len_q, bias.per_head ? shape.num_heads : 1,
            /*heads_first=*/true};
  }
  if (tensor == TensorId::kProbabilities) {
    return {1, static_cast<int64_t>(spec.probability_rows.size()), shape.num_heads};
  }
  const bool kv = tensor == TensorId::kDk || tensor == TensorId::kDv;
  return kv ? RowAxes{shape.batch, shape.seq_len_kv, shape.num_kv_heads}
            : RowAxes{shape.batch, shape.seq_len_q, shape.num_heads};
}

void NoteElement(const Judged& judged, const RowId& row, int64_t column, double expected,
                 double actual, TensorReport& report) {
  if (!judged.passed()) ++report.failed_elements;
  const bool first = report.element.error == 0.0 && report.element.bound == 0.0;
  if (!first && judged.ratio() <= report.element.ratio()) return;
  report.element = judged;
  report.element_row = row;
  report.element_column = column;
  report.expected = expected;
  report.actual = actual;
}

TensorReport CompareLse(const AttentionSpec& spec, const RowSet& expected, const void* actual) {
  TensorReport report;
  report.tensor = TensorId::kLse;
  report.rows = static_cast<int64_t>(expected.rows.size());
  const AttentionShape& shape = spec.shape;
  report.total_rows = shape.batch * shape.seq_len_q * shape.num_heads;
  for (size_t at = 0; at < expected.rows.size(); ++at) {
    const RowId& row = expected.rows[at];
    const int64_t index = (row.batch * shape.num_heads + row.head) * shape.seq_len_q + row.token;
    const double value = Load(DType::kFloat32, actual, index);
    const double bound = 4e-6 * std::max(1.0, expected.magnitude[at]) + expected.floor[at];
    NoteElement(JudgeElement(value, expected.exact[at], bound), row, 0, expected.exact[at], value,
                report);
  }
  report.passed = report.failed_elements == 0;
  return report;
}

}  // namespace

double Judged::ratio() const {
  if (error == 0.0) return 0.0;
  const double ratio = error / bound;
  return std::isnan(ratio) ? kInfinity : ratio;
}

TensorReport CompareTensor(const AttentionSpec& spec, TensorId tensor, const RowSet& expected,
                           const void* actual) {
  if (tensor == TensorId::kLse) return CompareLse(spec, expected, actual);
  TensorReport report;
  report.tensor = tensor;
  report.rows = static_cast<int64_t>(expected.rows.size());
  const RowAxes axes = AxesOf(spec, tensor);
  const DType dtype = DTypeOf(spec, tensor);
  report.total_rows = axes.batch * axes.tokens * axes.heads;
  const double unit = UnitOf(spec);
  Norms whole;
  std::vector<Norms> by_head(axes.heads);
  for (size_t at = 0; at < expected.rows.size(); ++at) {
    const RowId& row = expected.rows[at];
    const int64_t base = static_cast<int64_t>(at) * expected.dim;
    const int64_t first = axes.IndexOf(row) * expected.dim;
    double max_magnitude = 0.0;
    for (int64_t d = 0; d < expected.dim; ++d) {
      max_magnitude = std::max(max_magnitude, expected.magnitude[base + d]);
    }
    Norms sums;
    for (int64_t d = 0; d < expected.dim; ++d) {
      // A result beyond the dtype's range is an infinity.
      const double stored = RoundTo(dtype, expected.exact[base + d]);
      const double exact = std::isinf(stored) ? stored : expected.exact[base + d];
      const double value = Load(dtype, actual, first + d);
      const double magnitude = expected.magnitude[base + d];
      const double floor = expected.floor[base + d];
      const double bound = 8.0 * unit * magnitude + 1e-6 * max_magnitude + floor;
      const Judged judged = JudgeElement(value, exact, bound);
      NoteElement(judged, row, d, exact, value, report);
      if (!std::isfinite(exact)) continue;
      const double error = judged.error;
      const double twin = ErrorOf(expected.twin[base + d], exact);
      sums.error += error * error;
      // Ignore a twin that has overflowed.
      sums.twin += std::isfinite(twin) ? twin * twin : 0.0;
      sums.exact += exact * exact;
      sums.floor += floor * floor;
      sums.magnitude += magnitude * magnitude;
    }
    for (Norms* norms : {&whole, &by_head[row.head]}) {
      norms->error += sums.error;
      norms->twin += sums.twin;
      norms->exact += sums.exact;
      norms->floor += sums.floor;
      norms->magnitude += sums.magnitude;
      norms->squared_row_magnitudes += sums.magnitude * sums.magnitude;
    }
  }
  report.norm = whole.Judge(spec, tensor);
  report.passed = report.failed_elements == 0 && report.norm.passed();
  for (size_t head = 0; head < by_head.size(); ++head) {
    const Judged judged = by_head[head].Judge(spec, tensor);
    report.passed = report.passed && judged.passed();
    if (judged.ratio() > report.norm.ratio()) {
      report.norm = judged;
      report.norm_head = static_cast<int64_t>(head);
    }
  }
  return report;
}

bool Report::mismatch() const {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const TensorReport& tensor) { return !tensor.passed; });
}

std::string ToString(const TensorReport& report) {
  char line[512];
  std::string text;
  std::snprintf(line, sizeof(line), "%-3s %s  rows %lld of %lld", TensorName(report.tensor),
                report.passed ? "ok  " : "FAIL", static_cast<long long>(report.rows),
                static_cast<long long>(report.total_rows));
  text += line;
  if (report.suspects.has_value()) {
    text += " (all scanned, " + std::to_string(*report.suspects) + " suspect)";
  }
  if (report.tensor != TensorId::kLse) {
    std::snprintf(line, sizeof(line), "  norm error %.3g (bound %.3g", report.norm.error,
                  report.norm.bound);
    text += line;
    if (report.norm_head >= 0) text += ", head " + std::to_string(report.norm_head);
    text += ")";
  }
  std::snprintf(line, sizeof(line),
                "  worst element error %.3g (bound %.3g) at batch %lld token %lld head %lld "
                "column %lld: %.9g, expected %.9g",
                report.element.error, report.element.bound,
                static_cast<long long>(report.element_row.batch),
                static_cast<long long>(report.element_row.token),
                static_cast<long long>(report.element_row.head),
                static_cast<long long>(report.element_column), report.actual, report.expected);
  if (report.rows > 0) text += line;
  if (report.failed_elements > 0) {
    text += "  failed elements " + std::to_string(report.failed_elements);
  }
  return text;
}

std::string Report::ToString() const {
  std::string text;
  for (const TensorReport& tensor : tensors) text += oracle::ToString(tensor) + "\n";
  for (const Unjudged& missing : unjudged) {
    text += std::string(TensorName(missing.tensor)) + "  not judged: " + missing.reason + "\n";
  }
  return text;
}

Report Compare(const AttentionSpec& spec, const Result& expected, const Outputs& actual) {
  Report report;
  const auto judge = [&](TensorId tensor, const RowSet& rows, const void* data) {
    if (data == nullptr) return;
    if (rows.empty() && LayoutOf(spec, tensor).bytes() != 0) return;
    report.tensors.push_back(CompareTensor(spec, tensor, rows, data));
  };
  judge(TensorId::kOut, expected.out, actual.out);
  judge(TensorId::kLse, expected.lse, actual.lse);
  judge(TensorId::kDq, expected.dq, actual.dq);
  judge(TensorId::kDk, expected.dk, actual.dk);
  judge(TensorId::kDv, expected.dv, actual.dv);
  judge(TensorId::kDsinks, expected.dsinks, actual.dsinks);
  judge(TensorId::kDbias, expected.dbias, actual.dbias);
  judge(TensorId::kProbabilities, expected.probabilities, actual.probabilities);
  return report;
}

}  // namespace ringattn::oracle
