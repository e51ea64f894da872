#include "common/oracle/verify_scan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "common/oracle/in_parallel.h"
#include "common/oracle/numeric.h"
#include "common/oracle/pair_math.h"

namespace ringattn::oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kSlack = 1.01;
// Pieces over all heads of all documents, an upper bound of the threads.
constexpr int64_t kPieces = 256;
// Cost of an element, in multiplications.
constexpr double kCostOfElement = 4.0;
// e4m3: the relative rounding errors of v and p are 2^-4 each.
constexpr double kFloat8Slack = 1.15;

// Positions [begin, end).
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
  bool empty() const { return begin >= end; }
  int64_t size() const { return std::max<int64_t>(0, end - begin); }
};

// Returns the keys that query i sees, consistent with Sees.
Interval KeysOf(const Document& document, int64_t i) {
  const int64_t aligned = i + document.k_length - document.q_length;
  Interval keys{0, document.k_length};
  if (document.rule.causal) keys.end = std::min(keys.end, aligned + 1);
  if (document.rule.window_left >= 0)
    keys.begin = std::max(keys.begin, aligned - document.rule.window_left);
  if (document.rule.window_right >= 0)
    keys.end = std::min(keys.end, aligned + document.rule.window_right + 1);
  return keys;
}

// Returns the queries that see key j.
Interval QueriesOf(const Document& document, int64_t j) {
  const int64_t aligned = j - document.k_length + document.q_length;
  Interval queries{0, document.q_length};
  if (document.rule.causal) queries.begin = std::max(queries.begin, aligned);
  if (document.rule.window_left >= 0) {
    queries.end = std::min(queries.end, aligned + document.rule.window_left + 1);
  }
  if (document.rule.window_right >= 0) {
    queries.begin = std::max(queries.begin, aligned - document.rule.window_right);
  }
  return queries;
}

// Smallest and largest value of each column over any interval of tokens, in whole blocks.
class Extremes {
 public:
  Extremes(int64_t tokens, int64_t dim) : dim_(dim) {
    const int64_t blocks = (tokens + kScanBlock - 1) / kScanBlock;
    levels_.emplace_back(blocks, dim);
  }

  void Add(int64_t token, const double* row) { levels_[0].Include(token / kScanBlock, row, row); }

  // REQUIRES: every token has been added.
  void Finish() {
    for (int64_t span = 1; 2 * span <= levels_[0].blocks; span *= 2) {
      const int64_t blocks = levels_[0].blocks - 2 * span + 1;
      Level level(blocks, dim_);
      const Level& below = levels_.back();
      for (int64_t block = 0; block < blocks; ++block) {
        for (const int64_t half : {block, block + span}) {
          level.Include(block, &below.low[half * dim_], &below.high[half * dim_]);
        }
      }
      levels_.push_back(std::move(level));
    }
  }

  // REQUIRES: not empty.
  void Over(const Interval& tokens, double* low, double* high) const {
    const int64_t first = tokens.begin / kScanBlock;
    const int64_t last = (tokens.end - 1) / kScanBlock;
    int level = 0;
    while (int64_t{2} << level <= last - first + 1) ++level;
    const Level& table = levels_[level];
    const int64_t second = last + 1 - (int64_t{1} << level);
    for (int64_t d = 0; d < dim_; ++d) {
      low[d] = std::min(table.low[first * dim_ + d], table.low[second * dim_ + d]);
      high[d] = std::max(table.high[first * dim_ + d], table.high[second * dim_ + d]);
    }
  }

  double LargestOver(const Interval& tokens) const {
    double low, high;
    Over(tokens, &low, &high);
    return high;
  }

 private:
  struct Level {
    Level(int64_t count, int64_t dim)
        : blocks(count), dim(dim), low(count * dim, kInfinity), high(count * dim, -kInfinity) {}
    void Include(int64_t block, const double* other_low, const double* other_high) {
      for (int64_t d = 0; d < dim; ++d) {
        low[block * dim + d] = std::min(low[block * dim + d], other_low[d]);
        high[block * dim + d] = std::max(high[block * dim + d], other_high[d]);
      }
    }
    int64_t blocks, dim;
    std::vector<double> low, high;
  };

  int64_t dim_;
  std::vector<Level> levels_;  // of 1, 2, 4, ... blocks
};

double Norm(const double* row, int64_t dim) {
  double squares = 0.0;
  for (int64_t d = 0; d < dim; ++d) squares += row[d] * row[d];
  return std::sqrt(squares);
}

bool AllZero(const double* row, int64_t dim) {
  return std::all_of(row, row + dim, [](double value) { return value == 0.0; });
}

bool AllFinite(const double* row, int64_t dim) {
  return std::all_of(row, row + dim, [](double value) { return std::isfinite(value); });
}

// Keeps every 2^n-th suspect, so that the kept rows are spread over all suspects.
class Collector {
 public:
  explicit Collector(int64_t limit) : limit_(std::max<int64_t>(limit, 1)) {}

  void Add(const RowId& row) {
    if (suspects_.found++ % stride_ != 0) return;
    suspects_.rows.push_back(row);
    if (static_cast<int64_t>(suspects_.rows.size()) < 2 * limit_) return;
    for (int64_t i = 0; i < limit_; ++i) suspects_.rows[i] = suspects_.rows[2 * i];
    suspects_.rows.resize(limit_);
    stride_ *= 2;
  }

  void Append(const Collector& other) {
    for (const RowId& row : other.suspects_.rows) Add(row);
    suspects_.found += other.suspects_.found - static_cast<int64_t>(other.suspects_.rows.size());
  }

  Suspects Take() {
    Suspects taken = std::move(suspects_);
    if (static_cast<int64_t>(taken.rows.size()) > limit_) taken.rows.resize(limit_);
    return taken;
  }

 private:
  const int64_t limit_;
  int64_t stride_ = 1;
  Suspects suspects_;
};

// Returns whether no right result could have this gradient row.
//   most         the bound of its norm; 0: the row must be zero
//   may_vanish   the row may be zero although `most` is not 0
bool GradientIsSuspect(const double* row, int64_t dim, double most, bool may_vanish) {
  if (!AllFinite(row, dim)) return true;
  if (AllZero(row, dim)) return most > 0.0 && !may_vanish;
  // Written so that a NaN bound makes the row suspect.
  return !(Norm(row, dim) <= kSlack * most);
}

// One k/v head of one document.
struct Head {
  int64_t batch;
  Document document;
  int64_t kv_head;
};

std::vector<Head> HeadsOf(const AttentionSpec& spec) {
  std::vector<Head> heads;
  for (int64_t batch = 0; batch < spec.shape.batch; ++batch) {
    for (const Document& document : DocumentsOf(spec)) {
      for (int64_t head = 0; head < spec.shape.num_kv_heads; ++head) {
        heads.push_back({batch, document, head});
      }
    }
  }
  return heads;
}

class Scanner {
 public:
  Scanner(const AttentionSpec& spec, const Inputs& inputs, const Outputs& actual, int64_t limit)
      : spec_(spec),
        shape_(spec.shape),
        inputs_(inputs),
        actual_(actual),
        slack_(IsFloat8(spec) ? kFloat8Slack : kSlack),
        has_terms_(HasScoreTerms(spec.options) || !spec.options.dilation_levels.empty()) {
    const auto add = [&](TensorId tensor, const void* data) {
      if (data != nullptr) collectors_.emplace(tensor, limit);
    };
    add(TensorId::kOut, actual.out);
    add(TensorId::kLse, actual.lse);
    if (inputs.dout == nullptr) return;
    add(TensorId::kDq, actual.dq);
    add(TensorId::kDk, actual.dk);
    add(TensorId::kDv, actual.dv);
  }

  void ScanHead(const Head& head) {
    const Keys keys = KeysOfHead(head);
    QuerySums sums;
    sums.dout.assign(head.document.q_length + 1, 0.0);
    sums.dout_q = sums.several = sums.dout;
    for (int64_t h = head.kv_head * shape_.group_size();
         h < (head.kv_head + 1) * shape_.group_size(); ++h) {
      ScanQueries(head, keys, h, &sums);
    }
    for (int64_t i = 0; i < head.document.q_length; ++i) {
      sums.dout[i + 1] += sums.dout[i];
      sums.dout_q[i + 1] += sums.dout_q[i];
      sums.several[i + 1] += sums.several[i];
    }
    ScanKeys(head, keys, sums);
  }

  // Appends the suspects of a scanner of later heads.
  void Append(const Scanner& other) {
    for (auto& [tensor, collector] : collectors_) collector.Append(other.collectors_.at(tensor));
  }

  std::map<TensorId, Suspects> Take() {
    std::map<TensorId, Suspects> suspects;
    for (auto& [tensor, collector] : collectors_) suspects.emplace(tensor, collector.Take());
    return suspects;
  }

 private:
  // Bounds from the keys of a head.
  struct Keys {
    Extremes v, k_norm, v_norm;
  };
  // Prefix sums over the queries of all heads of the group.
  struct QuerySums {
    std::vector<double> dout, dout_q;
    std::vector<double> several;  // queries that see more than one key
    static double Over(const std::vector<double>& sums, const Interval& queries) {
      return queries.empty() ? 0.0 : sums[queries.end] - sums[queries.begin];
    }
  };

  HeadRows RowsOf(const Head& head, TensorId tensor, const void* data, int64_t at_head,
                  int64_t dim) const {
    const Document& document = head.document;
    const bool kv = InfoOf(tensor).axis == Axis::kKv;
    return HeadRows(DTypeOf(spec_, tensor), data, kv ? shape_.seq_len_kv : shape_.seq_len_q,
                    kv ? shape_.num_kv_heads : shape_.num_heads, dim, head.batch, at_head,
                    kv ? document.k_begin : document.q_begin,
                    kv ? document.k_length : document.q_length, /*decode_all=*/false);
  }

  bool Wanted(TensorId tensor) const { return collectors_.count(tensor) != 0; }
  bool WantsGradients() const {
    return Wanted(TensorId::kDq) || Wanted(TensorId::kDk) || Wanted(TensorId::kDv);
  }

  Keys KeysOfHead(const Head& head) const {
    const int64_t length = head.document.k_length;
    Keys keys{Extremes(length, shape_.head_dim_v), Extremes(length, 1), Extremes(length, 1)};
    HeadRows k = RowsOf(head, TensorId::kK, inputs_.k, head.kv_head, shape_.head_dim);
    HeadRows v = RowsOf(head, TensorId::kV, inputs_.v, head.kv_head, shape_.head_dim_v);
    for (int64_t j = 0; j < length; ++j) {
      const double* row = v.Row(j);
      keys.v.Add(j, row);
      const double v_norm = Norm(row, shape_.head_dim_v);
      keys.v_norm.Add(j, &v_norm);
      const double k_norm = Norm(k.Row(j), shape_.head_dim);
      keys.k_norm.Add(j, &k_norm);
    }
    for (Extremes* extremes : {&keys.v, &keys.k_norm, &keys.v_norm}) extremes->Finish();
    return keys;
  }

  // Scans out, lse and dq of query head h and adds to the sums.
  void ScanQueries(const Head& head, const Keys& keys, int64_t h, QuerySums* sums) {
    const bool gradients = WantsGradients();
    const int64_t dim = shape_.head_dim, dim_v = shape_.head_dim_v;
    HeadRows q = RowsOf(head, TensorId::kQ, inputs_.q, h, dim);
    HeadRows out = RowsOf(head, TensorId::kOut, actual_.out, h, dim_v);
    HeadRows dq = RowsOf(head, TensorId::kDq, actual_.dq, h, dim);
    HeadRows dout = RowsOf(head, TensorId::kDout, inputs_.dout, h, dim_v);
    for (int64_t i = 0; i < head.document.q_length; ++i) {
      const RowId row{head.batch, head.document.q_begin + i, h};
      const Interval seen = KeysOf(head.document, i);
      const double q_norm = Norm(q.Row(i), dim);
      const double k_norm = seen.empty() ? 0.0 : keys.k_norm.LargestOver(seen);
      if (Wanted(TensorId::kOut) && OutIsSuspect(keys, seen, out.Row(i))) {
        collectors_.at(TensorId::kOut).Add(row);
      }
      if (Wanted(TensorId::kLse) && LseIsSuspect(row, seen, q_norm * k_norm)) {
        collectors_.at(TensorId::kLse).Add(row);
      }
      if (!gradients) continue;
      const double dout_norm = Norm(dout.Row(i), dim_v);
      sums->dout[i + 1] += seen.empty() ? 0.0 : dout_norm;
      sums->dout_q[i + 1] += seen.empty() ? 0.0 : dout_norm * q_norm;
      sums->several[i + 1] += seen.size() > 1 ? 1.0 : 0.0;
      if (!Wanted(TensorId::kDq)) continue;
      const double v_norm = seen.empty() ? 0.0 : keys.v_norm.LargestOver(seen);
      const double most = 2 * std::abs(spec_.options.softmax_scale) * dout_norm * v_norm * k_norm;
      // With one key p is 1 for any score.
      if (IsSuspect(dq.Row(i), dim, most, /*may_vanish=*/seen.size() == 1)) {
        collectors_.at(TensorId::kDq).Add(row);
      }
    }
  }

  // GradientIsSuspect if its bounds apply.
  bool IsSuspect(const double* row, int64_t dim, double most, bool may_vanish) const {
    return has_terms_ ? !AllFinite(row, dim) : GradientIsSuspect(row, dim, most, may_vanish);
  }

  bool OutIsSuspect(const Keys& keys, const Interval& seen, const double* out) {
    const int64_t dim = shape_.head_dim_v;
    if (has_terms_) return !AllFinite(out, dim);
    if (seen.empty()) return !AllZero(out, dim);
    low_.resize(dim);
    high_.resize(dim);
    keys.v.Over(seen, low_.data(), high_.data());
    bool all_zero = true, nothing_there = true;
    for (int64_t d = 0; d < dim; ++d) {
      const double size = std::max(std::abs(low_[d]), std::abs(high_[d]));
      const double grant = (slack_ - 1) * size;
      if (!(low_[d] - grant <= out[d] && out[d] <= high_[d] + grant)) return true;
      all_zero = all_zero && out[d] == 0.0;
      nothing_there = nothing_there && size == 0.0;
    }
    return all_zero && !nothing_there;
  }

  // score_norms: |q| max|k|.
  bool LseIsSuspect(const RowId& row, const Interval& seen, double score_norms) const {
    const int64_t at = (row.batch * shape_.num_heads + row.head) * shape_.seq_len_q + row.token;
    const double lse = actual_.lse[at];
    if (has_terms_) return std::isnan(lse);
    if (seen.empty()) return lse != -kInfinity;
    const double size = std::abs(spec_.options.softmax_scale) * score_norms;
    const double softcap = spec_.options.softcap;
    const double most = softcap > 0 ? std::min(size, softcap) : size;
    // The last term is fp32's rounding.
    const double grant = slack_ * most + 1e-5 * (1.0 + size);
    return !(std::abs(lse - std::log(static_cast<double>(seen.size()))) <= grant);
  }

  void ScanKeys(const Head& head, const Keys& keys, const QuerySums& sums) {
    if (!Wanted(TensorId::kDk) && !Wanted(TensorId::kDv)) return;
    const int64_t dim = shape_.head_dim, dim_v = shape_.head_dim_v;
    const int64_t length = head.document.k_length;
    HeadRows dk = RowsOf(head, TensorId::kDk, actual_.dk, head.kv_head, dim);
    HeadRows dv = RowsOf(head, TensorId::kDv, actual_.dv, head.kv_head, dim_v);
    const double v_norm = length == 0 ? 0.0 : keys.v_norm.LargestOver({0, length});
    const double scale = 2 * std::abs(spec_.options.softmax_scale) * v_norm;
    for (int64_t j = 0; j < length; ++j) {
      const RowId row{head.batch, head.document.k_begin + j, head.kv_head};
      const Interval queries = QueriesOf(head.document, j);
      // A query that sees only this key adds nothing to dk.
      const bool alone = QuerySums::Over(sums.several, queries) == 0.0;
      if (Wanted(TensorId::kDk) &&
          IsSuspect(dk.Row(j), dim, scale * QuerySums::Over(sums.dout_q, queries), alone)) {
        collectors_.at(TensorId::kDk).Add(row);
      }
      if (Wanted(TensorId::kDv) &&
          IsSuspect(dv.Row(j), dim_v, QuerySums::Over(sums.dout, queries), false)) {
        collectors_.at(TensorId::kDv).Add(row);
      }
    }
  }

  const AttentionSpec& spec_;
  const AttentionShape& shape_;
  const Inputs& inputs_;
  const Outputs& actual_;
  const double slack_;
  const bool has_terms_;
  std::map<TensorId, Collector> collectors_;
  std::vector<double> low_, high_;  // scratch of OutIsSuspect
};

}  // namespace

std::map<TensorId, Suspects> Scan(const AttentionSpec& spec, const Inputs& inputs,
                                  const Outputs& actual, int64_t limit) {
  const std::vector<Head> heads = HeadsOf(spec);
  // Consecutive heads share a scanner. Results are joined in head order, so they do not depend on
  // timing.
  const auto count = static_cast<int64_t>(heads.size());
  const int64_t pieces = std::min(count, kPieces);
  const AttentionShape& shape = spec.shape;
  const double elements = static_cast<double>(shape.batch) *
                          static_cast<double>(shape.head_dim + shape.head_dim_v) *
                          static_cast<double>(shape.seq_len_q * shape.num_heads +
                                              shape.seq_len_kv * shape.num_kv_heads);
  std::vector<Scanner> scanners(pieces, Scanner(spec, inputs, actual, limit));
  InParallel(pieces, kCostOfElement * elements / static_cast<double>(std::max<int64_t>(pieces, 1)),
             [&](int64_t piece) {
               for (int64_t i = piece * count / pieces; i < (piece + 1) * count / pieces; ++i) {
                 scanners[piece].ScanHead(heads[i]);
               }
             });
  Scanner all(spec, inputs, actual, limit);
  for (const Scanner& scanner : scanners) all.Append(scanner);
  return all.Take();
}

}  // namespace ringattn::oracle
