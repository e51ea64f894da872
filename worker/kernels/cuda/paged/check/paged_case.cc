#include "worker/kernels/cuda/paged/check/paged_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/kernels/cuda/paged/check/parallel_for.h"

namespace ringattn::worker::cuda::paged::check {
namespace {

// Bounds the bytes of K and V, and so the time, of an ordinary case. Every shape may still have
// rows of kFewestEntries.
constexpr int64_t kMostBytes = int64_t{24} << 20;
constexpr int64_t kFewestEntries = 400;

class Draw {
 public:
  explicit Draw(std::mt19937_64& random) : random_(random) {}

  int64_t Uniform(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }
  bool Chance(double p) { return std::uniform_real_distribution<double>()(random_) < p; }
  double Real(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random_);
  }
  // Small numbers as likely as large ones.
  int64_t LogUniform(int64_t low, int64_t high) {
    const double x = std::exp(Real(std::log(low), std::log(high + 1.0)));
    return std::clamp<int64_t>(static_cast<int64_t>(x), low, high);
  }
  template <typename T>
  T OneOf(const std::vector<T>& values) {
    return values[Uniform(0, static_cast<int64_t>(values.size()) - 1)];
  }
  std::mt19937_64& random() { return random_; }

 private:
  std::mt19937_64& random_;
};

void DrawShape(CaseKind kind, Draw& draw, PagedCase& c) {
  CacheShape& shape = c.shape;
  const bool sixteen_bits = draw.Chance(0.87);
  shape.dtype = !sixteen_bits      ? DType::kFloat32
                : draw.Chance(0.5) ? DType::kBFloat16
                                   : DType::kFloat16;
  const bool one_long = kind == CaseKind::kLong || kind == CaseKind::kGrouped;
  const bool light = one_long || kind == CaseKind::kManyRows;
  shape.head_dim = draw.OneOf<int32_t>(light ? std::vector<int32_t>{64, 64, 128}
                                             : std::vector<int32_t>{64, 96, 128, 192, 256});
  shape.head_dim_v = shape.head_dim;
  if (draw.Chance(0.3) && !one_long) {
    shape.head_dim_v = draw.OneOf<int32_t>({64, 96, 128, 192, 256, 8, 40, 72, 136, 248});
    if (draw.Chance(0.3)) shape.head_dim = draw.OneOf<int32_t>({8, 40, 80, 144, 216});
  }
  if (draw.Chance(0.06) && !one_long) {  // the portable kernels alone
    shape.head_dim = static_cast<int32_t>(draw.Uniform(1, 256));
    shape.head_dim_v = static_cast<int32_t>(draw.Uniform(1, 256));
  }
  shape.block_tokens = draw.OneOf<int32_t>({16, 32, 64, 64, 128, 256});
  shape.planes = static_cast<int32_t>(one_long ? 1 : draw.Uniform(1, 3));
  c.plane = static_cast<int32_t>(draw.Uniform(0, shape.planes - 1));
  if (one_long) {
    shape.num_kv_heads = static_cast<int32_t>(draw.Uniform(1, 2));
    int64_t group = draw.Chance(0.4) ? draw.OneOf<int32_t>({8, 32}) : draw.Uniform(1, 2);
    if (kind == CaseKind::kGrouped) group = draw.OneOf<int32_t>({8, 16});
    c.options.num_heads = static_cast<int32_t>(shape.num_kv_heads * group);
  } else {
    shape.num_kv_heads = draw.OneOf<int32_t>({1, 1, 2, 2, 3, 4, 8});
    const int32_t group = draw.OneOf<int32_t>(
        {1, 1, 2, 3, 4, 4, 5, 7, 8, draw.Chance(0.2) ? 71 : 16, draw.Chance(0.2) ? 128 : 6});
    c.options.num_heads = group > 16 ? group : shape.num_kv_heads * group;
    if (group > 16) shape.num_kv_heads = 1;
  }
  if (draw.Chance(0.15)) {  // wider rows than the heads need
    const int64_t gap = draw.Chance(0.8) ? 8 * draw.Uniform(0, 20) : draw.Uniform(0, 40);
    shape.k_row_elements = static_cast<int32_t>(shape.num_kv_heads * shape.head_dim + gap);
    shape.v_row_elements =
        static_cast<int32_t>(shape.num_kv_heads * shape.head_dim_v + 8 * draw.Uniform(0, 20));
  }
}

void DrawOptions(CaseKind kind, Draw& draw, PagedCase& c) {
  AttentionOptions& options = c.options;
  options.softmax_scale = static_cast<float>(draw.Real(0.3, 2.0) / std::sqrt(c.shape.head_dim));
  if (draw.Chance(0.05)) options.softmax_scale = -options.softmax_scale;
  if (draw.Chance(0.05)) options.softmax_scale *= 10.0f;
  if (draw.Chance(0.3)) options.softcap = static_cast<float>(draw.LogUniform(1, 50));
  if (draw.Chance(0.4) && kind != CaseKind::kGrouped) {
    options.window_left =
        static_cast<int32_t>(draw.Chance(0.5) ? draw.Uniform(0, 300) : draw.LogUniform(1, 1000000));
  }
  options.causal = draw.Chance(0.85);
  options.partial = draw.Chance(0.25);
  if (draw.Chance(0.35)) {
    c.shape.position_parts = static_cast<int32_t>(draw.Chance(0.9) ? draw.Uniform(2, 5) : 64);
    c.shape.position_part = static_cast<int32_t>(draw.Uniform(0, c.shape.position_parts - 1));
    options.partial = true;
  }
  if (draw.Chance(0.4)) {
    c.sinks.resize(options.num_heads);
    for (float& sink : c.sinks) {
      sink = draw.Chance(0.1) ? -std::numeric_limits<float>::infinity()
                              : static_cast<float>(draw.Real(-3, 3));
    }
  }
}

// Entries of the cache's part in front of entry `end` of a sequence, block by block.
int32_t OwnEntries(const CacheShape& shape, int64_t end) {
  int64_t count = 0;
  for (int64_t block = shape.position_part; block * shape.block_tokens < end;
       block += shape.position_parts) {
    count += std::min<int64_t>(shape.block_tokens, end - block * shape.block_tokens);
  }
  return static_cast<int32_t>(count);
}

// Entries of one row, in all parts. `most`: of rows of ordinary length.
int32_t DrawLength(CaseKind kind, int64_t most, int32_t parts, Draw& draw) {
  switch (kind) {
    case CaseKind::kLong:
      return static_cast<int32_t>(draw.LogUniform(100000, 1000000));
    case CaseKind::kGrouped:  // so many in each part
      return static_cast<int32_t>(parts * draw.LogUniform(100500, 200000));
    case CaseKind::kManyRows:
      return static_cast<int32_t>(draw.LogUniform(1, 1200));
    case CaseKind::kSmall:  // some with enough tiles for a merge in groups
      return static_cast<int32_t>(draw.Chance(0.2) ? draw.Uniform(2000, 5000)
                                                   : draw.LogUniform(1, 500));
    case CaseKind::kDecode:
    case CaseKind::kPrefill:
      return static_cast<int32_t>(draw.LogUniform(1, most));
  }
  return 1;
}

int32_t DrawQueries(CaseKind kind, Draw& draw) {
  if (kind == CaseKind::kPrefill && draw.Chance(0.7)) {
    return static_cast<int32_t>(draw.LogUniform(65, 900));
  }
  if (kind == CaseKind::kSmall && draw.Chance(0.2)) {
    return static_cast<int32_t>(draw.Uniform(65, 140));
  }
  if (draw.Chance(0.5)) return 1;
  return static_cast<int32_t>(draw.Chance(0.2) ? draw.Uniform(1, 64) : draw.LogUniform(1, 64));
}

void DrawRows(CaseKind kind, Draw& draw, PagedCase& c) {
  int64_t count = draw.Uniform(1, 6);
  if (kind == CaseKind::kManyRows) count = draw.Uniform(30, 300);
  if (kind == CaseKind::kLong) count = draw.Uniform(1, 2);
  if (kind == CaseKind::kSmall) count = draw.Uniform(1, 4);
  if (kind == CaseKind::kGrouped) count = 1;
  if (kind != CaseKind::kLong && kind != CaseKind::kGrouped && draw.Chance(0.02)) count = 0;
  const int64_t entry_bytes = c.shape.num_kv_heads *
                              int64_t{c.shape.head_dim + c.shape.head_dim_v} *
                              ElementBytes(c.shape.dtype);
  const int64_t most = std::clamp<int64_t>(kMostBytes / entry_bytes / std::max<int64_t>(count, 1),
                                           kFewestEntries, 6000);
  for (int64_t r = 0; r < count; ++r) {
    CaseRow row;
    const int32_t length = DrawLength(kind, most, c.shape.position_parts, draw);
    row.queries = kind == CaseKind::kLong && draw.Chance(0.6) ? 1 : DrawQueries(kind, draw);
    if (kind == CaseKind::kLong) row.queries = std::min(row.queries, 8);
    if (kind == CaseKind::kGrouped) row.queries = 1;
    row.append = std::min(row.queries, length);
    if (draw.Chance(0.2)) row.append = static_cast<int32_t>(draw.Uniform(0, std::min(length, 100)));
    row.keep = length - row.append;
    if (kind != CaseKind::kGrouped) {
      if (draw.Chance(0.05)) row.queries = 0;
      if (draw.Chance(0.03)) row.keep = row.append = 0;
    }
    if (draw.Chance(0.2)) row.gap = static_cast<int32_t>(draw.Uniform(0, 5));
    row.sequence_length = row.length();
    row.keep = OwnEntries(c.shape, row.sequence_length - row.append);
    row.append = OwnEntries(c.shape, row.sequence_length) - row.keep;
    c.rows.push_back(row);
  }
}

// Blocks for all rows, in any order of the pool or in ascending runs; some rows share the beginning
// of an earlier one.
void DealBlocks(Draw& draw, PagedCase& c) {
  const int32_t tokens = c.shape.block_tokens;
  int64_t needed = 0;
  for (const CaseRow& row : c.rows) needed += (row.length() + tokens - 1) / tokens;
  c.shape.blocks = std::max<int64_t>(needed, 1) + draw.Uniform(0, 5);
  std::vector<int32_t> order(c.shape.blocks);
  std::iota(order.begin(), order.end(), 0);
  if (draw.Chance(0.75)) std::shuffle(order.begin(), order.end(), draw.random());
  size_t next = 0;
  for (size_t r = 0; r < c.rows.size(); ++r) {
    CaseRow& row = c.rows[r];
    const int32_t blocks = (row.length() + tokens - 1) / tokens;
    row.table.resize(blocks);
    int32_t shared = 0;
    if (r > 0 && draw.Chance(0.2)) {
      const CaseRow& other = c.rows[draw.Uniform(0, static_cast<int64_t>(r) - 1)];
      shared = std::min(other.length() / tokens, row.keep / tokens);
      std::copy_n(other.table.begin(), shared, row.table.begin());
    }
    for (int32_t b = shared; b < blocks; ++b) row.table[b] = order[next++];
  }
}

// Overwrites table elements that the kernels must not use.
void SpoilUnusedElements(Draw& draw, PagedCase& c) {
  const int32_t tokens = c.shape.block_tokens;
  for (CaseRow& row : c.rows) {
    int64_t seen = row.queries > 0 ? 0 : row.length();
    if (row.queries > 0 && c.options.window_left >= 0) {
      seen = OwnEntries(c.shape, int64_t{row.first_position()} - c.options.window_left);
    }
    for (size_t b = 0; b < row.table.size(); ++b) {
      const int64_t end = (static_cast<int64_t>(b) + 1) * tokens;
      if (end > seen || end > row.keep) continue;
      row.table[b] =
          draw.OneOf<int32_t>({std::numeric_limits<int32_t>::max(), -5, 0,
                               static_cast<int32_t>(draw.Uniform(0, c.shape.blocks - 1))});
    }
  }
}

// Random values by place: the same place has the same value in every copy.
class Values {
 public:
  Values(DType dtype, std::mt19937_64& random) : dtype_(dtype), seed_(random()) {
    std::normal_distribution<float> normal;
    std::vector<float> drawn(kCount);
    for (float& x : drawn) x = normal(random);
    bits_.resize(kCount * ElementBytes(dtype));
    values_.resize(kCount);
    ConvertFromFloat(dtype, drawn.data(), bits_.data(), kCount);
    ConvertToFloat(dtype, bits_.data(), values_.data(), kCount);
  }

  // `count` elements, the first of which is element `first` of tensor `tensor`.
  void Write(uint64_t tensor, int64_t first, int64_t count, char* bits, float* values) const {
    const int64_t element = ElementBytes(dtype_);
    for (int64_t i = 0; i < count; ++i) {
      uint64_t x = seed_ + tensor * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(first + i);
      x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
      x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
      const size_t at = (x ^ (x >> 31)) % kCount;
      std::memcpy(bits + i * element, bits_.data() + at * element, element);
      if (values != nullptr) values[i] = values_[at];
    }
  }

 private:
  static constexpr size_t kCount = 65521;
  DType dtype_;
  uint64_t seed_;
  std::vector<char> bits_;
  std::vector<float> values_;
};

// One of K and V of the plane before and after the append, and the appended rows.
void FillPlane(const PagedCase& c, const Values& values, uint64_t tensor, int64_t dim,
               int64_t row_bytes, std::vector<char>& before, std::vector<char>& after,
               std::vector<float>& floats, std::vector<char>& appended) {
  const CacheShape& shape = c.shape;
  const int64_t tokens = shape.block_tokens;
  const int64_t elements = shape.num_kv_heads * dim;
  const int64_t bytes = elements * ElementBytes(shape.dtype);
  const int64_t places = shape.blocks * tokens;
  before.assign(places * row_bytes, static_cast<char>(0xFF));
  floats.assign(places * elements, std::numeric_limits<float>::quiet_NaN());
  const auto place_of = [&](const CaseRow& row, int64_t entry) {
    return row.table[entry / tokens] * tokens + entry % tokens;
  };
  constexpr int64_t kChunk = 512;
  int64_t total_append = 0;
  std::vector<std::pair<const CaseRow*, int64_t>> chunks;
  for (const CaseRow& row : c.rows) {
    total_append += row.append;
    for (int64_t first = 0; first < row.keep; first += kChunk) chunks.emplace_back(&row, first);
  }
  const auto fill = [&](const CaseRow& row, int64_t first) {
    for (int64_t entry = first; entry < std::min<int64_t>(first + kChunk, row.keep); ++entry) {
      const int64_t place = place_of(row, entry);
      values.Write(tensor, place * elements, elements, before.data() + place * row_bytes,
                   floats.data() + place * elements);
    }
  };
  // Rows that share entries must not write them at the same time: row after row.
  for (size_t begin = 0; begin < chunks.size();) {
    size_t end = begin;
    while (end < chunks.size() && chunks[end].first == chunks[begin].first) ++end;
    ParallelFor(static_cast<int64_t>(end - begin),
                [&](int64_t i) { fill(*chunks[begin + i].first, chunks[begin + i].second); });
    begin = end;
  }
  after = before;
  appended.resize(total_append * bytes);
  int64_t next = 0;
  for (const CaseRow& row : c.rows) {
    for (int64_t i = 0; i < row.append; ++i, ++next) {
      const int64_t place = place_of(row, row.keep + i);
      values.Write(tensor + 1, next * elements, elements, appended.data() + next * bytes,
                   floats.data() + place * elements);
      std::memcpy(after.data() + place * row_bytes, appended.data() + next * bytes, bytes);
    }
  }
}

}  // namespace

PagedCase DrawCase(CaseKind kind, std::mt19937_64& random) {
  Draw draw(random);
  PagedCase c;
  c.kind = kind;
  DrawShape(kind, draw, c);
  DrawOptions(kind, draw, c);
  DrawRows(kind, draw, c);
  DealBlocks(draw, c);

  const Values values(c.shape.dtype, random);
  FillPlane(c, values, 0, c.shape.head_dim, c.shape.k_row_bytes(), c.k_before, c.k_after,
            c.k_values, c.new_k);
  FillPlane(c, values, 2, c.shape.head_dim_v, c.shape.v_row_bytes(), c.v_before, c.v_after,
            c.v_values, c.new_v);
  SpoilUnusedElements(draw, c);

  int64_t appended = 0;
  int32_t most_queries = 1, most_append = 0;
  for (const CaseRow& row : c.rows) {
    PagedRow paged;
    c.total_q += row.gap;
    paged.first_q = static_cast<int32_t>(c.total_q);
    paged.q_tokens = row.queries;
    paged.first_append = static_cast<int32_t>(appended);
    paged.append_tokens = row.append;
    paged.keep_length = row.keep;
    // In one part the kernels derive it.
    paged.first_position = c.shape.position_parts > 1
                               ? row.first_position()
                               : static_cast<int32_t>(draw.Uniform(-9, 1000000));
    paged.table = static_cast<int32_t>(c.tables.size());
    c.tables.insert(c.tables.end(), row.table.begin(), row.table.end());
    c.paged_rows.push_back(paged);
    c.total_q += row.queries;
    appended += row.append;
    most_queries = std::max(most_queries, row.queries);
    most_append = std::max(most_append, row.append);
  }
  c.batch.max_rows = static_cast<int32_t>(std::max<size_t>(c.rows.size(), 1) + draw.Uniform(0, 3));
  c.batch.max_q_tokens =
      most_queries + static_cast<int32_t>(draw.Chance(0.5) ? draw.Uniform(0, 9) : 0);
  c.batch.max_total_q =
      static_cast<int32_t>(std::max<int64_t>(c.total_q + draw.Uniform(0, 7), c.batch.max_q_tokens));
  c.batch.max_append_tokens = most_append + static_cast<int32_t>(draw.Uniform(0, 3));
  if (draw.Chance(0.3) && kind != CaseKind::kGrouped) {
    c.batch.splits = static_cast<int32_t>(draw.LogUniform(1, 64));
  }
  const int64_t elements = c.batch.max_total_q * int64_t{c.options.num_heads} * c.shape.head_dim;
  c.q.resize(elements * ElementBytes(c.shape.dtype));
  c.q_values.resize(elements);
  values.Write(9, 0, elements, c.q.data(), c.q_values.data());
  return c;
}

std::string PagedCase::Describe() const {
  std::string text =
      absl::StrCat(DTypeName(shape.dtype), " heads ", options.num_heads, "/", shape.num_kv_heads,
                   " d ", shape.head_dim, "/", shape.head_dim_v, " rows ", shape.k_row_elements,
                   "/", shape.v_row_elements, " blocks of ", shape.block_tokens, " part ",
                   shape.position_part, "/", shape.position_parts, " plane ", plane, "/",
                   shape.planes, " scale ", options.softmax_scale, " softcap ", options.softcap,
                   " window ", options.window_left, options.causal ? " causal" : " full",
                   options.partial ? " partial" : "", sinks.empty() ? "" : " sinks", " splits ",
                   batch.splits, " rows (keep+append:queries/all parts)");
  for (size_t r = 0; r < rows.size() && r < 8; ++r) {
    absl::StrAppend(&text, " ", rows[r].keep, "+", rows[r].append, ":", rows[r].queries, "/",
                    rows[r].sequence_length);
  }
  if (rows.size() > 8) absl::StrAppend(&text, " ... of ", rows.size());
  return text;
}

}  // namespace ringattn::worker::cuda::paged::check
