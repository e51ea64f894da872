// A problem of the kernel check: its options, how it is cut into ring shards, and
// random tensors for it. Host memory.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SHARDED_CASE_CUH_
#define RINGATTN_WORKER_KERNELS_CUDA_SHARDED_CASE_CUH_

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "common/attention/band.h"
#include "common/attention/dtype.h"
#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker::cuda {

enum class Layout { kContiguous, kZigzag, kStriped };

struct Case {
  DType dtype = DType::kBFloat16;
  int batch = 1, heads = 1, kv_heads = 1, d = 64, dv = 64;
  std::vector<int64_t> cu_q, cu_k;
  AttentionOptions options;
  int world = 1;
  Layout layout = Layout::kContiguous;
  bool one_call = false;      // all blocks in one call instead of one per ring step
  bool small_device = false;  // pretend that little shared memory exists
  float amplitude = 1.0f;

  int sq() const { return static_cast<int>(cu_q.back()); }
  int sk() const { return static_cast<int>(cu_k.back()); }
  std::string ToString() const {
    char text[512];
    std::snprintf(text, sizeof(text),
                  "%s b%d h%d/%d d%d/%d sq%d sk%d docs%zu causal%d window(%ld,%ld) cap%.1f "
                  "scale%.4f world%d layout%d %s%s amp%.1f",
                  std::string(DTypeName(dtype)).c_str(), batch, heads, kv_heads, d, dv, sq(), sk(),
                  cu_q.size() - 1, options.causal, static_cast<long>(options.window_left),
                  static_cast<long>(options.window_right), options.softcap, options.softmax_scale,
                  world, static_cast<int>(layout), one_call ? "one-call" : "steps",
                  small_device ? " small-device" : "", amplitude);
    return text;
  }
};

// The global token indices that a rank holds, in its local order.
struct Shard {
  std::vector<int64_t> tokens;
  std::vector<Piece> pieces;
};

inline void AddSpan(Shard& shard, int64_t begin, int64_t end, int64_t stride,
                    const std::vector<int64_t>& cu) {
  int64_t token = begin;
  while (token < end) {
    const int64_t document = std::upper_bound(cu.begin(), cu.end(), token) - cu.begin() - 1;
    Piece piece;
    piece.local_begin = static_cast<int64_t>(shard.tokens.size());
    piece.document = document;
    piece.position = token - cu[document];
    piece.stride = stride;
    for (; token < end && token < cu[document + 1]; token += stride) {
      shard.tokens.push_back(token);
      ++piece.length;
    }
    shard.pieces.push_back(piece);
  }
}

inline std::vector<Shard> Cut(Layout layout, int world, const std::vector<int64_t>& cu) {
  const int64_t n = cu.back();
  std::vector<Shard> shards(world);
  for (int r = 0; r < world; ++r) {
    if (layout == Layout::kContiguous) {
      AddSpan(shards[r], n * r / world, n * (r + 1) / world, 1, cu);
    } else if (layout == Layout::kZigzag) {
      const int other = 2 * world - 1 - r;
      AddSpan(shards[r], n * r / (2 * world), n * (r + 1) / (2 * world), 1, cu);
      AddSpan(shards[r], n * other / (2 * world), n * (other + 1) / (2 * world), 1, cu);
    } else {
      AddSpan(shards[r], r, n, world, cu);
    }
  }
  return shards;
}

// Rows `tokens` of a [batch, total, inner] array of elements.
inline std::vector<char> Gather(const std::vector<char>& source, int batch, int64_t total,
                                int64_t inner, const std::vector<int64_t>& tokens) {
  std::vector<char> result(batch * tokens.size() * inner);
  for (int b = 0; b < batch; ++b) {
    for (size_t t = 0; t < tokens.size(); ++t) {
      std::memcpy(&result[(b * tokens.size() + t) * inner],
                  &source[(b * total + tokens[t]) * inner], inner);
    }
  }
  return result;
}

struct Tensor {
  std::vector<char> bits;      // dtype
  std::vector<double> values;  // the same, exactly
};

inline Tensor RandomTensor(DType dtype, int64_t count, float amplitude, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, amplitude);
  std::vector<float> values(count);
  for (float& x : values) x = normal(random);
  Tensor tensor;
  tensor.bits.resize(count * ElementBytes(dtype));
  ConvertFromFloat(dtype, values.data(), tensor.bits.data(), count);
  ConvertToFloat(dtype, tensor.bits.data(), values.data(), count);
  tensor.values.assign(values.begin(), values.end());
  return tensor;
}

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SHARDED_CASE_CUH_
