// A small attention problem with its data, and its exact solution with bounds. For the
// tests of this folder.
#ifndef RINGATTN_WORKER_KERNELS_CPU_TESTING_NAIVE_REFERENCE_H_
#define RINGATTN_WORKER_KERNELS_CPU_TESTING_NAIVE_REFERENCE_H_

#include <cstdint>
#include <random>
#include <vector>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/naive/seen_keys.h"

namespace ringattn::worker {

// Shapes and masks of a test. Every kv block has its own pieces.
struct TestShape {
  DType dtype = DType::kFloat32;
  int64_t batch = 1;
  int64_t heads = 1;
  int64_t kv_heads = 1;
  int64_t head_dim = 16;
  int64_t head_dim_v = 16;
  float scale = 0.25f;
  float softcap = 0.0f;
  std::vector<Band> bands = {Band{}};
  int64_t q_rows = 0;
  std::vector<Piece> q_pieces;
  std::vector<int64_t> kv_rows;
  std::vector<std::vector<Piece>> kv_pieces;
};

// One document, whole: sq queries and sk keys in one block.
TestShape DenseShape(int64_t sq, int64_t sk, bool causal);

// A tensor in its dtype.
struct TestTensor {
  DType dtype = DType::kFloat32;
  std::vector<char> bytes;
  int64_t count = 0;

  float At(int64_t i) const;
  void Set(int64_t i, float value);
  void* data() { return bytes.data(); }
  const void* data() const { return bytes.data(); }
};
TestTensor MakeTensor(DType dtype, int64_t count);
void FillRandom(TestTensor& tensor, std::mt19937& random, float magnitude);

// A sum and the sum of its terms' absolute values, by which errors are judged.
struct Exact {
  std::vector<double> value;
  std::vector<double> magnitude;

  explicit Exact(int64_t count = 0) : value(count), magnitude(count) {}
  void Add(int64_t i, double term) {
    value[i] += term;
    magnitude[i] += term < 0 ? -term : term;
  }
};

struct TestData {
  explicit TestData(const TestShape& shape, uint32_t seed = 1, float magnitude = 1.0f);

  AttentionProblem problem;
  TestShape shape;
  TestTensor q, dout;
  std::vector<TestTensor> k, v;  // per block

  // Blocks with the addresses of k, v and, if given, of gradients.
  std::vector<KvBlock> Blocks(std::vector<std::vector<float>>* dk = nullptr,
                              std::vector<std::vector<float>>* dv = nullptr) const;
};

// The sums over the naive twin's scores (naive/seen_keys.h), with the magnitudes that its
// outputs lack.
struct Reference {
  explicit Reference(const TestData& data);

  Exact out;                      // like q with head_dim_v; magnitude as in the contract
  std::vector<double> lse;        // [batch, heads, q_rows]
  std::vector<double> lse_bound;  // largest error allowed
  std::vector<float> delta;       // [batch, heads, q_rows]
  Exact dq;  // magnitude: scale * sum p (sum |dout v| + sum |dout out|) |k|; dk alike
  std::vector<Exact> dk, dv;  // per block

 private:
  void AddForward(const TestData& data, const QueryHead& query, const std::vector<SeenKey>& seen);
  void AddBackward(const TestData& data, const QueryHead& query, const std::vector<SeenKey>& seen);
};

// Checks |actual - exact| <= 8 u A + 1e-6 max A per element (u by dtype), rows of
// `row` elements; NaN only where the exact value is NaN. Reports to gtest.
void ExpectClose(const char* what, DType dtype, const std::vector<float>& actual,
                 const Exact& exact, int64_t row);
void ExpectLseClose(const std::vector<float>& actual, const Reference& reference);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_CPU_TESTING_NAIVE_REFERENCE_H_
