#include "worker/kernels/cuda/check/random_case.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <iterator>
#include <utility>

#include "common/attention/band.h"
#include "common/attention/tensors.h"
#include "common/oracle/generator.h"

namespace ringattn::worker::cuda::check {
namespace {

// Most visible pairs times head_dim, without masks, that the oracle computes: some seconds.
constexpr int64_t kMostWork = int64_t{250} << 20;
// The same with score terms, for which the oracle draws bits for each pair.
constexpr int64_t kMostTermWork = int64_t{40} << 20;

template <typename T>
T Pick(std::mt19937& random, std::initializer_list<T> choices) {
  return *(choices.begin() + random() % choices.size());
}

void PickDocuments(std::mt19937& random, bool small, AttentionShape& shape) {
  const auto length = [&] {
    if (small) return Pick<int64_t>(random, {1, 31, 70, 130});
    return Pick<int64_t>(random, {0, 1, 5, 63, 64, 65, 127, 128, 129, 191, 257, 300, 383});
  };
  const int documents = random() % 3 == 0 ? 1 + random() % 6 : 1;
  shape.cu_seqlens_q = {0};
  shape.cu_seqlens_k = {0};
  const bool same = random() % 2;
  for (int i = 0; i < documents; ++i) {
    const int64_t n = length();
    shape.cu_seqlens_q.push_back(shape.cu_seqlens_q.back() + n);
    shape.cu_seqlens_k.push_back(shape.cu_seqlens_k.back() + (same ? n : length()));
  }
  if (documents == 1 && random() % 6 == 0) {  // decode: few queries, many keys
    shape.cu_seqlens_q = {0, Pick<int64_t>(random, {1, 2, 7, 16})};
    shape.cu_seqlens_k = {0, small ? int64_t{600} : Pick<int64_t>(random, {700, 1000, 2049})};
  }
  shape.seq_len_q = shape.cu_seqlens_q.back();
  shape.seq_len_kv = shape.cu_seqlens_k.back();
}

AttentionOptions PickOptions(std::mt19937& random, int64_t head_dim) {
  AttentionOptions options;
  options.causal = random() % 2;
  if (random() % 3 == 0) options.window_left = Pick<int64_t>(random, {0, 1, 17, 64, 200});
  if (random() % 3 == 0) options.window_right = Pick<int64_t>(random, {0, 3, 50, 128});
  if (random() % 4 == 0) options.softcap = Pick(random, {2.0, 30.0, 50.0});
  double scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
  if (random() % 8 == 0) scale = Pick(random, {0.3, 1.0, -0.1});
  options.softmax_scale = static_cast<float>(scale);  // as kernels get it
  return options;
}

int64_t WorkOf(const AttentionShape& shape) {
  int64_t pairs = 0;
  for (int64_t i = 0; i < shape.num_documents(); ++i) {
    pairs += (shape.cu_seqlens_q[i + 1] - shape.cu_seqlens_q[i]) *
             (shape.cu_seqlens_k[i + 1] - shape.cu_seqlens_k[i]);
  }
  return pairs * shape.batch * shape.num_heads * std::max(shape.head_dim, shape.head_dim_v);
}

// May reduce the batch. Chosen rows of a batch row that no longer exists are dropped.
void LimitWork(int64_t most, AttentionSpec& spec) {
  AttentionShape& shape = spec.shape;
  if (WorkOf(shape) > most) shape.batch = 1;
  if (WorkOf(shape) > most) shape.num_heads = shape.num_kv_heads;
  if (shape.packed) return;  // its rows name documents
  std::erase_if(spec.probability_rows,
                [&shape](const ProbabilityRow& row) { return row.batch >= shape.batch; });
}

// Sets head dims, of which one is above 256.
void Widen(Case& c, int64_t head_dim, int64_t head_dim_v) {
  AttentionShape& shape = c.spec.shape;
  const auto narrow = static_cast<double>(shape.head_dim);
  shape.head_dim = head_dim;
  shape.head_dim_v = head_dim_v;
  const double scale = c.spec.options.softmax_scale;
  c.spec.options.softmax_scale =
      static_cast<float>(scale * std::sqrt(narrow / static_cast<double>(shape.head_dim)));
  LimitWork(kMostWork, c.spec);
}

void AddBias(std::mt19937& random, AttentionOptions& options) {
  options.bias = BiasForm{.per_batch = random() % 2 == 0,
                          .per_head = random() % 2 == 0,
                          .float32 = random() % 2 == 0,
                          .before_softcap = random() % 3 == 0,
                          .gradient = random() % 3 != 0};
}

// Changes a bias so that sm90's backward can store its gradient: one plane per head, in rows of
// whole vectors.
void FitStores(Case& c) {
  AttentionShape& shape = c.spec.shape;
  BiasForm& bias = *c.spec.options.bias;
  bias.per_head = true;
  bias.per_batch = !shape.packed;
  bias.float32 = false;
  if (c.layout == Layout::kStriped) c.layout = Layout::kZigzag;
  // Shards begin at multiples of eight keys. For packed documents, the longest one determines the
  // number of columns.
  const int64_t step = 8 * (shape.packed ? 1 : 2 * c.world);
  if (shape.packed) c.world = 1;
  const int64_t longest = PairColumns(shape);
  int64_t before = 0, end = 0;
  for (int64_t& position : shape.cu_seqlens_k) {
    const int64_t keys = position - before;
    before = position;
    end += keys < longest ? keys : (keys + step - 1) / step * step;
    position = end;
  }
  shape.seq_len_kv = end;
}

void AddDropout(std::mt19937& random, AttentionOptions& options) {
  options.dropout.threshold = Pick<uint32_t>(random, {1, 6554, 32768, 60000});
  options.dropout.seed = (uint64_t{random()} << 32) | random();
  if (random() % 2) return;
  options.dropout.first_batch = random() % 1000;
  options.dropout.first_head = random() % 1000;
  options.dropout.first_query = random() % (1u << 31);
  options.dropout.first_key = random() % (1u << 31);
}

void AddTerms(std::mt19937& random, Case& c) {
  AttentionShape& shape = c.spec.shape;
  AttentionOptions& options = c.spec.options;
  options.deterministic = random() % 3 == 0;
  const uint32_t which = random();  // one bit per term; at least one term, unless the order is
                                    // tested
  if (which % 2) AddBias(random, options);
  if (which / 2 % 2) {
    options.mask = MaskForm{
        .per_batch = random() % 2 == 0, .per_head = random() % 2 == 0, .bits = random() % 2 == 0};
  }
  options.segment_ids = which / 4 % 2;
  if (which / 8 % 2) {
    const int64_t rows = shape.packed ? shape.num_documents() : shape.batch;
    const int64_t count = shape.num_heads * (random() % 2 ? rows : 1);
    for (int64_t i = 0; i < count; ++i) {
      options.alibi_slopes.push_back(Pick(random, {0.5f, 0.0625f, 0.004f, 0.0f, -0.01f}));
    }
  }
  if (which / 16 % 2 || (!HasScoreTerms(options) && !options.deterministic)) {
    AddDropout(random, options);
  }
  // Packed problems have one bias and one mask for all documents; their rows are all tokens.
  if (shape.packed && options.bias.has_value()) options.bias->per_batch = false;
  if (shape.packed && options.mask.has_value()) options.mask->per_batch = false;
  options.sinks = random() % 3 == 0;
  c.hostile = options.segment_ids && !options.sinks && random() % 2 == 0;
}

// Shards the bias and the mask of every second suitable case by keys: its calls have one block of
// keys, and its masks are bytes.
void CutByKeys(Case& c) {
  AttentionOptions& options = c.spec.options;
  c.by_keys = c.seed / 144 % 2 == 0 && !c.spec.shape.packed && c.spec.shape.seq_len_kv > 0 &&
              (options.bias.has_value() || options.mask.has_value()) &&
              (c.world == 1 || !c.one_call);
  if (c.by_keys && options.mask.has_value()) options.mask->bits = false;
}

// Adds a few rows, some twice, in random order, to every second suitable case.
void AddProbabilityRows(std::mt19937& random, AttentionSpec& spec) {
  const AttentionShape& shape = spec.shape;
  if ((shape.num_documents() > 1 && !shape.packed) || random() % 2) return;
  const int64_t batches = shape.packed ? shape.num_documents() : shape.batch;
  for (int count = 1 + random() % (random() % 4 == 0 ? 40 : 5); count > 0; --count) {
    const int64_t batch = random() % batches;
    const int64_t queries =
        shape.packed ? shape.cu_seqlens_q[batch + 1] - shape.cu_seqlens_q[batch] : shape.seq_len_q;
    if (queries == 0) continue;
    spec.probability_rows.push_back({batch, static_cast<int64_t>(random() % queries)});
  }
}

// Fills hidden rows with NaN, which is 0xFF in every type.
void Poison(const std::vector<int32_t>& ids, std::vector<char>& tensor) {
  if (ids.empty()) return;
  const size_t bytes = tensor.size() / ids.size();
  for (size_t t = 0; t < ids.size(); ++t) {
    if (ids[t] < 0) std::fill_n(tensor.begin() + t * bytes, bytes, static_cast<char>(0xff));
  }
}

template <typename T>
std::vector<char> BytesOf(const std::vector<T>& values) {
  const char* first = reinterpret_cast<const char*>(values.data());
  return std::vector<char>(first, first + values.size() * sizeof(T));
}

std::vector<char> RandomTensor(DType dtype, int64_t count, float amplitude, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, amplitude);
  std::vector<float> values(count);
  for (float& x : values) x = normal(random);
  std::vector<char> bits(count * ElementBytes(dtype));
  ConvertFromFloat(dtype, values.data(), bits.data(), count);
  return bits;
}

}  // namespace

std::string Case::ToString() const {
  const AttentionShape& shape = spec.shape;
  const AttentionOptions& options = spec.options;
  char text[512];
  std::snprintf(
      text, sizeof(text),
      "%s b%ld h%ld/%ld d%ld/%ld sq%ld sk%ld docs%ld causal%d window(%ld,%ld) cap%.1f "
      "scale%.4f world%d layout%d %s%s%s%s%s amp%.1f seed%u",
      std::string(DTypeName(spec.dtype)).c_str(), shape.batch, shape.num_heads, shape.num_kv_heads,
      shape.head_dim, shape.head_dim_v, shape.seq_len_q, shape.seq_len_kv, shape.num_documents(),
      options.causal, options.window_left, options.window_right, options.softcap,
      options.softmax_scale, world, static_cast<int>(layout), one_call ? "one-call" : "steps",
      small_device ? " small-device" : "", few_sms ? " few-sms" : "", long_keys ? " long-keys" : "",
      short_shifts ? " short-shifts" : "", amplitude, seed);
  std::string line = text;
  if (key_blocks > 1) line += " keys in " + std::to_string(key_blocks) + " blocks";
  if (!family.empty()) line += " by " + family;
  if (options.deterministic) line += " deterministic";
  if (options.compute_dtype == ComputeDType::kFloat8E4M3) line += " fp8";
  if (options.sinks) line += " sinks";
  if (const auto& bias = options.bias) {
    line += std::string(" bias(") + (bias->per_batch ? "B" : "1") + (bias->per_head ? ",H" : ",1") +
            (bias->float32 ? ",fp32" : "") + (bias->before_softcap ? ",before cap" : "") +
            (!bias->gradient ? ")"
             : apart         ? ",dbias apart)"
                             : ",dbias)");
  }
  if (const auto& mask = options.mask) {
    line += std::string(" mask(") + (mask->per_batch ? "B" : "1") + (mask->per_head ? ",H" : ",1") +
            (mask->bits ? ",bits)" : ")");
  }
  if (by_keys) line += " sharded by keys";
  if (options.segment_ids) line += hostile ? " segment ids (hostile)" : " segment ids";
  if (!options.alibi_slopes.empty()) {
    line += " alibi(" + std::to_string(options.alibi_slopes.size()) + ")";
  }
  if (options.dropout.threshold != 0) {
    line += " dropout(" + std::to_string(options.dropout.threshold) + ")";
  }
  if (!spec.probability_rows.empty()) {
    line += " probabilities(" + std::to_string(spec.probability_rows.size()) + ")";
  }
  return line;
}

Case RandomCase(std::mt19937& random, bool small) {
  Case c;
  AttentionShape& shape = c.spec.shape;
  c.spec.dtype =
      Pick(random, {DType::kBFloat16, DType::kBFloat16, DType::kFloat16, DType::kFloat32});
  shape.head_dim =
      Pick(random, {32, 64, 96, 128, 192, 256, 128, 64, 16, 40, 72, 80, 112, 160, 7, 33, 250});
  shape.head_dim_v =
      random() % 3 == 0 ? Pick(random, {32, 64, 128, 192, 256, 24, 13, 66}) : shape.head_dim;
  shape.num_kv_heads = Pick(random, {1, 2, 3});
  shape.num_heads = shape.num_kv_heads * Pick(random, {1, 1, 2, 4, 5});
  shape.batch = Pick(random, {1, 1, 2});
  PickDocuments(random, small, shape);
  LimitWork(kMostWork, c.spec);
  c.spec.options = PickOptions(random, shape.head_dim);
  c.world = Pick(random, {1, 1, 2, 3, 4});
  c.layout = Pick(random, {Layout::kContiguous, Layout::kZigzag, Layout::kStriped});
  c.one_call = random() % 3 == 0;
  c.small_device = c.spec.dtype != DType::kFloat32 && random() % 10 == 0;
  if (random() % 10 == 0) c.amplitude = 4.0f;
  c.seed = random();
  c.long_keys = c.seed % 3 == 0;
  c.short_shifts = c.seed / 7 % 3 == 0;
  if (c.seed / 5 % 8 == 0) Widen(c, c.seed % 2 == 0 ? 576 : 300, c.seed / 2 % 2 == 0 ? 512 : 64);
  // In small problems, this is the only way for blocks to process whole groups and store dk and dv.
  c.few_sms = c.seed / 3 % (shape.group_size() > 1 ? 2 : 4) == 0;
  c.apart = c.seed / 12 % 4 == 0;
  // Striped keys of several blocks have a different stride from q, which few kernels support.
  if (c.world == 1 && c.layout != Layout::kStriped) c.key_blocks = 1 + c.seed / 48 % 3;
  AddProbabilityRows(random, c.spec);
  return c;
}

Case RandomTermCase(std::mt19937& random, bool small) {
  Case c = RandomCase(random, small);
  c.key_blocks = 1;
  AttentionShape& shape = c.spec.shape;
  shape.num_heads = shape.num_kv_heads * Pick<int64_t>(random, {1, 2, 4, 8});
  shape.packed = shape.num_documents() > 1;
  if (shape.packed) shape.batch = 1;
  LimitWork(kMostTermWork, c.spec);
  c.small_device = false;
  AddTerms(random, c);
  c.spec.probability_rows.clear();  // drawn before its documents were packed
  AddProbabilityRows(random, c.spec);
  CutByKeys(c);
  return c;
}

Case RandomHopperTermCase(std::mt19937& random, bool small) {
  Case c = RandomTermCase(random, small);
  AttentionShape& shape = c.spec.shape;
  AttentionOptions& options = c.spec.options;
  if (c.spec.dtype == DType::kFloat32) c.spec.dtype = DType::kBFloat16;
  const auto served = [](int64_t dim) { return dim <= 128 && dim % 8 == 0; };
  if (!served(shape.head_dim)) shape.head_dim = Pick<int64_t>(random, {64, 128});
  if (!served(shape.head_dim_v)) shape.head_dim_v = shape.head_dim;
  if (std::max(shape.head_dim, shape.head_dim_v) <= 32) shape.head_dim = 64;
  if (random() % 16 == 0) options.softmax_scale = 0;
  options.deterministic = false;
  if (!HasScoreTerms(options)) AddDropout(random, options);
  if (random() % 2) options.softcap = 0;  // another family computes its backward
  if (options.bias.has_value() && options.bias->gradient && random() % 2) FitStores(c);
  CutByKeys(c);
  c.hostile = false;
  c.family = "sm90";
  return c;
}

Case RandomDeterministicCase(std::mt19937& random, bool small) {
  Case c = RandomCase(random, small);
  AttentionShape& shape = c.spec.shape;
  if (c.spec.dtype == DType::kFloat32) c.spec.dtype = DType::kBFloat16;
  const auto served = [](int64_t dim) { return dim <= 256 && dim % 8 == 0; };
  if (!served(shape.head_dim)) shape.head_dim = Pick<int64_t>(random, {64, 128, 192, 256});
  if (!served(shape.head_dim_v)) shape.head_dim_v = shape.head_dim;
  if (std::max(shape.head_dim, shape.head_dim_v) <= 32) shape.head_dim = 96;
  if (!small && random() % 3 == 0) {  // many tiles
    const int64_t n = Pick<int64_t>(random, {640, 901, 1100});
    shape.cu_seqlens_q = shape.cu_seqlens_k = {0, n};
    shape.seq_len_q = shape.seq_len_kv = n;
    c.spec.probability_rows.clear();
  }
  LimitWork(kMostWork, c.spec);
  c.spec.options.deterministic = true;
  c.small_device = false;
  return c;
}

Case RandomDeterministicTermCase(std::mt19937& random, bool small) {
  Case c = RandomHopperTermCase(random, small);
  if (random() % 2) {  // without other terms they leave whole tiles empty
    c.spec.options.mask = {};
    c.spec.options.segment_ids = true;
    CutByKeys(c);
  }
  c.spec.options.softcap = 0;
  c.spec.options.deterministic = true;
  return c;
}

Case RandomWideCase(std::mt19937& random, bool small) {
  Case c = RandomCase(random, small);
  if (c.spec.dtype == DType::kFloat32) c.spec.dtype = DType::kBFloat16;
  constexpr std::pair<int64_t, int64_t> kDims[] = {{512, 512}, {512, 512}, {576, 512}, {264, 64},
                                                   {320, 320}, {264, 440}, {520, 40},  {96, 512}};
  const auto [head_dim, head_dim_v] = kDims[random() % std::size(kDims)];
  Widen(c, head_dim, head_dim_v);
  c.spec.options.sinks = random() % 4 == 0;
  c.small_device = false;
  if (c.layout == Layout::kStriped && c.world == 1) c.layout = Layout::kZigzag;
  return c;
}

Case RandomFloat8Case(std::mt19937& random, bool small) {
  Case c = RandomCase(random, small);
  AttentionShape& shape = c.spec.shape;
  if (c.spec.dtype == DType::kFloat32) c.spec.dtype = DType::kBFloat16;
  const auto served = [](int64_t dim) { return dim <= 128 && dim % 8 == 0; };
  if (!served(shape.head_dim)) shape.head_dim = Pick<int64_t>(random, {64, 128});
  if (!served(shape.head_dim_v)) shape.head_dim_v = shape.head_dim;
  if (random() % 16 == 0) c.spec.options.softmax_scale = 0;
  c.spec.options.compute_dtype = ComputeDType::kFloat8E4M3;
  c.small_device = false;
  return c;
}

AttentionProblem ProblemOf(const AttentionSpec& spec) {
  const AttentionShape& shape = spec.shape;
  AttentionProblem problem;
  problem.dtype = spec.dtype;
  problem.batch = shape.batch;
  problem.num_heads = shape.num_heads;
  problem.num_kv_heads = shape.num_kv_heads;
  problem.head_dim = shape.head_dim;
  problem.head_dim_v = shape.head_dim_v;
  problem.softmax_scale = static_cast<float>(spec.options.softmax_scale);
  problem.softcap = static_cast<float>(spec.options.softcap);
  for (int64_t i = 0; i < shape.num_documents(); ++i) {
    problem.bands.push_back(DocumentBand(spec.options,
                                         shape.cu_seqlens_q[i + 1] - shape.cu_seqlens_q[i],
                                         shape.cu_seqlens_k[i + 1] - shape.cu_seqlens_k[i]));
  }
  problem.deterministic = spec.options.deterministic;
  problem.compute = spec.options.compute_dtype;
  if (!HasScoreTerms(spec.options)) return problem;
  ScoreTerms& terms = problem.terms;
  terms.packed = shape.packed;
  for (int64_t i = 0; i < shape.num_documents(); ++i) {
    terms.shifts.push_back(shape.cu_seqlens_k[i + 1] - shape.cu_seqlens_k[i] -
                           (shape.cu_seqlens_q[i + 1] - shape.cu_seqlens_q[i]));
  }
  terms.alibi_slopes = spec.options.alibi_slopes;
  terms.bias = spec.options.bias;
  terms.mask = spec.options.mask;
  terms.columns = PairColumns(shape);
  terms.segment_ids = spec.options.segment_ids;
  terms.dropout = spec.options.dropout;
  return problem;
}

CaseInputs InputsOf(const Case& c) {
  const AttentionShape& shape = c.spec.shape;
  const int64_t q_rows = shape.batch * shape.seq_len_q * shape.num_heads;
  const int64_t kv_rows = shape.batch * shape.seq_len_kv * shape.num_kv_heads;
  std::mt19937 random(c.seed);
  CaseInputs inputs;
  inputs.q = RandomTensor(c.spec.dtype, q_rows * shape.head_dim, c.amplitude, random);
  inputs.k = RandomTensor(c.spec.dtype, kv_rows * shape.head_dim, c.amplitude, random);
  inputs.v = RandomTensor(c.spec.dtype, kv_rows * shape.head_dim_v, 1.0f, random);
  inputs.dout = RandomTensor(c.spec.dtype, q_rows * shape.head_dim_v, 1.0f, random);
  const AttentionOptions& options = c.spec.options;
  if (options.sinks) {
    std::normal_distribution<float> normal;
    for (int64_t h = 0; h < shape.num_heads; ++h) inputs.sinks.push_back(normal(random));
  }
  if (options.bias.has_value()) {
    const DType dtype = options.bias->float32 ? DType::kFloat32 : c.spec.dtype;
    inputs.bias.resize(LayoutOf(c.spec, TensorId::kBias).bytes());
    oracle::FillBias(dtype, c.seed, 0,
                     static_cast<int64_t>(inputs.bias.size()) / ElementBytes(dtype),
                     inputs.bias.data());
  }
  if (options.mask.has_value()) {
    inputs.mask.resize(LayoutOf(c.spec, TensorId::kMask).bytes());
    oracle::FillMask(c.spec, c.seed, 0, static_cast<int64_t>(inputs.mask.size()),
                     reinterpret_cast<uint8_t*>(inputs.mask.data()));
  }
  if (options.segment_ids) {
    std::vector<int32_t> q_ids(shape.batch * shape.seq_len_q);
    std::vector<int32_t> kv_ids(shape.batch * shape.seq_len_kv);
    oracle::FillSegmentIds(c.seed, shape.batch, shape.seq_len_q, q_ids.data());
    oracle::FillSegmentIds(c.seed, shape.batch, shape.seq_len_kv, kv_ids.data());
    if (c.hostile) {
      for (auto* tensor : {&inputs.q, &inputs.dout}) Poison(q_ids, *tensor);
      for (auto* tensor : {&inputs.k, &inputs.v}) Poison(kv_ids, *tensor);
    }
    inputs.q_segment_ids = BytesOf(q_ids);
    inputs.kv_segment_ids = BytesOf(kv_ids);
  }
  return inputs;
}

oracle::Inputs CaseInputs::view() const {
  oracle::Inputs inputs{q.data(), k.data(), v.data(), dout.data()};
  if (!sinks.empty()) inputs.sinks = sinks.data();
  inputs.bias = bias.data();
  inputs.mask = reinterpret_cast<const uint8_t*>(mask.data());
  inputs.q_segment_ids = reinterpret_cast<const int32_t*>(q_segment_ids.data());
  inputs.kv_segment_ids = reinterpret_cast<const int32_t*>(kv_segment_ids.data());
  return inputs;
}

}  // namespace ringattn::worker::cuda::check
