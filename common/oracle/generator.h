// Seeded inputs: the same bits on every platform, any part of a tensor without
// the rest of it (element i depends on (seed, stream, i) only), about a
// nanosecond or two per element.
#ifndef RINGATTN_COMMON_ORACLE_GENERATOR_H_
#define RINGATTN_COMMON_ORACLE_GENERATOR_H_

#include <cstdint>
#include <vector>

#include "common/attention/tensors.h"
#include "common/oracle/oracle.h"

namespace ringattn::oracle {

// Writes elements [first, first + count) of the stream to target[0, count):
// near-normal (a sum of four uniforms, |value| <= 3.47 * deviation), mean 0,
// rounded to `dtype`. Streams of one seed are independent of one another.
void FillNormal(DType dtype, uint64_t seed, uint64_t stream, int64_t first, int64_t count,
                double deviation, void* target);

// 64 well mixed bits for (seed, stream, index).
uint64_t RandomBits(uint64_t seed, uint64_t stream, uint64_t index);

enum class DataKind : uint8_t {
  kNormal = 0,
  kHugeScores = 1,  // q and k such that scores spread to about ±1e4
  // Scores of 1e6 to 1e30, by the seed; to what its elements reach in fp16. Not a level of
  // the sweep's data factor: a sweep of its own.
  kVastScores = 2,
};
const char* DataKindName(DataKind kind);

// Owned host memory for the inputs of a problem, in the layouts of
// common/attention/attention_spec.h.
struct InputTensors {
  std::vector<uint8_t> q;
  std::vector<uint8_t> k;
  std::vector<uint8_t> v;
  std::vector<uint8_t> dout;
  bool has_dout = false;
  std::vector<float> sinks;  // where the spec has them: one in five is -inf, no sink
  std::vector<float> dlse;   // with dout, where the spec has it
  // Where the spec has them. One bias in 16 is -inf; a mask hides a third of the pairs, a row in
  // eight wholly; ids come in runs, one in nine negative, or are shuffled, by the seed.
  std::vector<uint8_t> bias;
  std::vector<uint8_t> mask;
  std::vector<int32_t> q_segment_ids;
  std::vector<int32_t> kv_segment_ids;

  Inputs view() const;
};

// The deviation of q's and k's elements that `kind` asks for; v's and dout's is 1. Only
// kVastScores depends on the seed.
double QueryKeyDeviation(const AttentionSpec& spec, DataKind kind, uint64_t seed = 0);

// Elements [first, first + count) of a bias, a byte mask or segment ids of `tokens` tokens per
// batch row, as InputTensors says.
void FillBias(DType dtype, uint64_t seed, int64_t first, int64_t count, void* target);
void FillMask(const AttentionSpec& spec, uint64_t seed, int64_t first_byte, int64_t count,
              uint8_t* target);
void FillSegmentIds(uint64_t seed, int64_t batch, int64_t tokens, int32_t* target);

// Streams are the TensorId of each tensor.
InputTensors GenerateInputs(const AttentionSpec& spec, DataKind kind, uint64_t seed,
                            bool with_dout);

// cu_seqlens of `documents` documents of uneven lengths that add up to `total`;
// with `allow_empty` about a third of them are empty. Deterministic.
// REQUIRES: documents >= 1; total >= documents unless allow_empty.
std::vector<int64_t> SplitDocuments(int64_t total, int64_t documents, bool allow_empty,
                                    uint64_t seed);

}  // namespace ringattn::oracle

#endif  // RINGATTN_COMMON_ORACLE_GENERATOR_H_
