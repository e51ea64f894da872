#include "common/oracle/generator.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/oracle/in_parallel.h"
#include "common/oracle/numeric.h"

namespace ringattn::oracle {
namespace {

// A bijection of 64 bits whose outputs look random for consecutive inputs (Stafford's variant 13 of
// the murmur3 finaliser).
uint64_t Mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

constexpr uint64_t kWeyl = 0x9E3779B97F4A7C15u;

uint64_t StreamKey(uint64_t seed, uint64_t stream) {
  return Mix(Mix(seed + kWeyl) + (stream + 1) * kWeyl);
}

// Returns the sum of the four 16-bit lanes of `bits`, mean 131070.
int64_t LaneSum(uint64_t bits) {
  return static_cast<int64_t>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) +
                              (bits >> 48));
}

// FillNormal of a whole stream, in independent pieces.
constexpr int64_t kElementsPerPiece = int64_t{1} << 22;
// Cost of an element, in multiplications.
constexpr double kCostOfElement = 4.0;

void FillNormalInParallel(DType dtype, uint64_t seed, uint64_t stream, int64_t count,
                          double deviation, uint8_t* target) {
  const int64_t pieces = (count + kElementsPerPiece - 1) / kElementsPerPiece;
  const double cost = kCostOfElement * static_cast<double>(std::min(count, kElementsPerPiece));
  InParallel(pieces, cost, [&](int64_t piece) {
    const int64_t first = piece * kElementsPerPiece;
    FillNormal(dtype, seed, stream, first, std::min(kElementsPerPiece, count - first), deviation,
               target + first * BytesOf(dtype));
  });
}

constexpr double kLaneSumMean = 131070.0;
// The variance of a lane is (2^32 - 1) / 12.
constexpr double kLaneSumDeviation = 37837.2;

}  // namespace

uint64_t RandomBits(uint64_t seed, uint64_t stream, uint64_t index) {
  return Mix(StreamKey(seed, stream) + (index + 1) * kWeyl);
}

void FillNormal(DType dtype, uint64_t seed, uint64_t stream, int64_t first, int64_t count,
                double deviation, void* target) {
  const uint64_t key = StreamKey(seed, stream);
  const double scale = deviation / kLaneSumDeviation;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t bits = Mix(key + (static_cast<uint64_t>(first + i) + 1) * kWeyl);
    Store(dtype, target, i, scale * (static_cast<double>(LaneSum(bits)) - kLaneSumMean));
  }
}

const char* DataKindName(DataKind kind) {
  switch (kind) {
    case DataKind::kNormal:
      return "normal";
    case DataKind::kHugeScores:
      return "huge";
    case DataKind::kVastScores:
      return "vast";
  }
  return "unknown";
}

Inputs InputTensors::view() const {
  // Without queries dout has no bytes, yet gradients may be requested.
  static constexpr uint8_t kNoBytes = 0;
  return {.q = q.data(),
          .k = k.data(),
          .v = v.data(),
          .dout = !has_dout      ? nullptr
                  : dout.empty() ? &kNoBytes
                                 : dout.data(),
          .sinks = sinks.empty() ? nullptr : sinks.data(),
          .dlse = dlse.empty() ? nullptr : dlse.data(),
          .bias = bias.data(),
          .mask = mask.data(),
          .q_segment_ids = q_segment_ids.data(),
          .kv_segment_ids = kv_segment_ids.data()};
}

double QueryKeyDeviation(const AttentionSpec& spec, DataKind kind, uint64_t seed) {
  if (kind == DataKind::kNormal) return 1.0;
  // Scores have the deviation |scale| sqrt(head_dim) a^2; 3,500 puts the largest of a few hundred
  // near 1e4. Limited to values that fp16 can square and sum.
  const double per_square =
      std::abs(spec.options.softmax_scale) * std::sqrt(static_cast<double>(spec.shape.head_dim));
  if (kind == DataKind::kVastScores) {
    // Products q.k stay within fp32, and gradients multiplied by k within fp16.
    const double largest = spec.dtype == DType::kFloat16 ? 4e3 : 1e17;
    const double scores = std::pow(10.0, 6.0 + static_cast<double>(seed % 9) * 3.0);
    return std::min(per_square == 0.0 ? largest : std::sqrt(scores / per_square), largest);
  }
  if (per_square == 0.0) return 60.0;
  return std::min(std::sqrt(3500.0 / per_square), 1000.0);
}

void FillBias(DType dtype, uint64_t seed, int64_t first, int64_t count, void* target) {
  constexpr auto kStream = static_cast<uint64_t>(TensorId::kBias);
  FillNormal(dtype, seed, kStream, first, count, 1.0, target);
  for (int64_t i = 0; i < count; ++i) {
    if (RandomBits(seed, kStream + 1000, first + i) % 16 != 0) continue;
    Store(dtype, target, i, -std::numeric_limits<double>::infinity());
  }
}

void FillMask(const AttentionSpec& spec, uint64_t seed, int64_t first_byte, int64_t count,
              uint8_t* target) {
  constexpr auto kStream = static_cast<uint64_t>(TensorId::kMask);
  const bool bits = spec.options.mask->bits;
  const int64_t columns = PairColumns(spec.shape);
  const int64_t row_bytes = bits ? (columns + 7) / 8 : columns;
  const auto allows = [&](int64_t row, int64_t column) {
    if (RandomBits(seed, kStream + 1000, row) % 8 == 0) return false;
    return RandomBits(seed, kStream, row * columns + column) % 3 != 0;
  };
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = (first_byte + i) / row_bytes, byte = (first_byte + i) % row_bytes;
    target[i] = 0;
    if (!bits) {
      target[i] = allows(row, byte);
      continue;
    }
    for (int64_t j = 8 * byte; j < std::min(columns, 8 * byte + 8); ++j) {
      target[i] |= static_cast<uint8_t>(allows(row, j)) << (j - 8 * byte);
    }
  }
}

void FillSegmentIds(uint64_t seed, int64_t batch, int64_t tokens, int32_t* target) {
  // One stream for queries and keys, so that equal positions have equal ids.
  constexpr auto kStream = static_cast<uint64_t>(TensorId::kQSegmentIds);
  const bool shuffled = seed % 2 == 0;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t run = 1 + static_cast<int64_t>(RandomBits(seed, kStream, b) % 40);
    for (int64_t t = 0; t < tokens; ++t) {
      const uint64_t drawn = RandomBits(seed, kStream + 1000, b * tokens + t);
      const int64_t id = shuffled ? static_cast<int64_t>(drawn % 3) : t / run;
      target[b * tokens + t] = drawn / 3 % 9 == 0 ? -1 : static_cast<int32_t>(id);
    }
  }
}

InputTensors GenerateInputs(const AttentionSpec& spec, DataKind kind, uint64_t seed,
                            bool with_dout) {
  const AttentionShape& shape = spec.shape;
  const int64_t q_rows = shape.batch * shape.seq_len_q * shape.num_heads;
  const int64_t kv_rows = shape.batch * shape.seq_len_kv * shape.num_kv_heads;
  const auto fill = [&](TensorId id, int64_t elements, double deviation) {
    std::vector<uint8_t> data(elements * BytesOf(spec.dtype));
    FillNormalInParallel(spec.dtype, seed, static_cast<uint64_t>(id), elements, deviation,
                         data.data());
    return data;
  };
  const double deviation = QueryKeyDeviation(spec, kind, seed);
  InputTensors inputs;
  inputs.q = fill(TensorId::kQ, q_rows * shape.head_dim, deviation);
  inputs.k = fill(TensorId::kK, kv_rows * shape.head_dim, deviation);
  inputs.v = fill(TensorId::kV, kv_rows * shape.head_dim_v, 1.0);
  inputs.has_dout = with_dout;
  if (with_dout) inputs.dout = fill(TensorId::kDout, q_rows * shape.head_dim_v, 1.0);
  if (spec.options.sinks) {
    // Near the scores' size, so that neither keys nor sinks are negligible.
    inputs.sinks.resize(shape.num_heads);
    FillNormal(DType::kFloat32, seed, static_cast<uint64_t>(TensorId::kSinks), 0, shape.num_heads,
               2.0, inputs.sinks.data());
    for (int64_t h = 0; h < shape.num_heads; ++h) {
      const uint64_t bits = RandomBits(seed, static_cast<uint64_t>(TensorId::kSinks) + 1000, h);
      if (bits % 5 == 0) inputs.sinks[h] = -std::numeric_limits<float>::infinity();
    }
  }
  if (spec.has_dlse && with_dout) {
    inputs.dlse.resize(q_rows);
    FillNormal(DType::kFloat32, seed, static_cast<uint64_t>(TensorId::kDlse), 0, q_rows, 1.0,
               inputs.dlse.data());
  }
  if (spec.options.bias.has_value()) {
    const int64_t bytes = BytesOf(spec, TensorId::kBias);
    const DType dtype = DTypeOf(spec, TensorId::kBias);
    inputs.bias.resize(bytes);
    FillBias(dtype, seed, 0, bytes / BytesOf(dtype), inputs.bias.data());
  }
  if (spec.options.mask.has_value()) {
    inputs.mask.resize(BytesOf(spec, TensorId::kMask));
    FillMask(spec, seed, 0, static_cast<int64_t>(inputs.mask.size()), inputs.mask.data());
  }
  if (spec.options.segment_ids) {
    inputs.q_segment_ids.resize(shape.batch * shape.seq_len_q);
    inputs.kv_segment_ids.resize(shape.batch * shape.seq_len_kv);
    FillSegmentIds(seed, shape.batch, shape.seq_len_q, inputs.q_segment_ids.data());
    FillSegmentIds(seed, shape.batch, shape.seq_len_kv, inputs.kv_segment_ids.data());
  }
  return inputs;
}

std::vector<int64_t> SplitDocuments(int64_t total, int64_t documents, bool allow_empty,
                                    uint64_t seed) {
  // Every document gets its minimum; random boundaries divide the rest.
  std::vector<bool> empty(documents, false);
  int64_t filled = documents;
  for (int64_t d = 0; d < documents && allow_empty; ++d) {
    // At least one document stays non-empty unless there are no tokens.
    const bool may = filled > (total > 0 ? 1 : 0);
    empty[d] = may && (total < filled || RandomBits(seed, 0, d) % 3 == 0);
    filled -= empty[d] ? 1 : 0;
  }
  const int64_t spare = std::max<int64_t>(total - filled, 0);
  std::vector<int64_t> cuts = {0, spare};
  for (int64_t c = 1; c < filled; ++c) {
    cuts.push_back(static_cast<int64_t>(RandomBits(seed, 1, c) % static_cast<uint64_t>(spare + 1)));
  }
  std::sort(cuts.begin(), cuts.end());
  std::vector<int64_t> cu_seqlens = {0};
  int64_t next = 0;
  for (int64_t d = 0; d < documents; ++d) {
    int64_t length = 0;
    if (!empty[d]) {
      length = 1 + cuts[next + 1] - cuts[next];
      ++next;
    }
    cu_seqlens.push_back(cu_seqlens.back() + length);
  }
  return cu_seqlens;
}

}  // namespace ringattn::oracle
