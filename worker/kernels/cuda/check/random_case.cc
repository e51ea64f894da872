#include "worker/kernels/cuda/check/random_case.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>

#include "common/attention/band.h"

namespace ringattn::worker::cuda::check {
namespace {

// Visible pairs times head_dim that the oracle is asked for, without masks: some seconds.
constexpr int64_t kMostWork = int64_t{250} << 20;

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
  options.softmax_scale = static_cast<float>(scale);  // what kernels get
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
  std::snprintf(text, sizeof(text),
                "%s b%ld h%ld/%ld d%ld/%ld sq%ld sk%ld docs%ld causal%d window(%ld,%ld) cap%.1f "
                "scale%.4f world%d layout%d %s%s%s%s amp%.1f seed%u",
                std::string(DTypeName(spec.dtype)).c_str(), shape.batch, shape.num_heads,
                shape.num_kv_heads, shape.head_dim, shape.head_dim_v, shape.seq_len_q,
                shape.seq_len_kv, shape.num_documents(), options.causal, options.window_left,
                options.window_right, options.softcap, options.softmax_scale, world,
                static_cast<int>(layout), one_call ? "one-call" : "steps",
                small_device ? " small-device" : "", few_sms ? " few-sms" : "",
                long_keys ? " long-keys" : "", amplitude, seed);
  return text;
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
  if (WorkOf(shape) > kMostWork) shape.batch = 1;
  if (WorkOf(shape) > kMostWork) shape.num_heads = shape.num_kv_heads;
  c.spec.options = PickOptions(random, shape.head_dim);
  c.world = Pick(random, {1, 1, 2, 3, 4});
  c.layout = Pick(random, {Layout::kContiguous, Layout::kZigzag, Layout::kStriped});
  c.one_call = random() % 3 == 0;
  c.small_device = c.spec.dtype != DType::kFloat32 && random() % 10 == 0;
  if (random() % 10 == 0) c.amplitude = 4.0f;
  c.seed = random();
  c.long_keys = c.seed % 3 == 0;
  c.few_sms = c.seed / 3 % 4 == 0;
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
  return inputs;
}

}  // namespace ringattn::worker::cuda::check
