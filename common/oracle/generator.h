// Seeded inputs with the same bits on every platform. Any range of a tensor can be generated
// separately, because element i depends only on (seed, stream, i). Takes one or two nanoseconds per
// element.
#ifndef RINGATTN_COMMON_ORACLE_GENERATOR_H_
#define RINGATTN_COMMON_ORACLE_GENERATOR_H_

#include <cstdint>
#include <vector>

#include "common/attention/tensors.h"
#include "common/oracle/oracle.h"

namespace ringattn::oracle {

// Writes elements [first, first + count) of the stream to target[0, count): near-normal (a sum of
// four uniforms, |value| <= 3.47 * deviation), mean 0, rounded to `dtype`. Streams of one seed are
// independent.
void FillNormal(DType dtype, uint64_t seed, uint64_t stream, int64_t first, int64_t count,
                double deviation, void* target);

// Returns 64 well mixed bits for (seed, stream, index).
uint64_t RandomBits(uint64_t seed, uint64_t stream, uint64_t index);

enum class DataKind : uint8_t {
  kNormal = 0,
  kHugeScores = 1,  // scores range to about ±1e4
  // Scores of 1e6 to 1e30, depending on the seed; in fp16 up to the range of its elements. Has a
  // sweep of its own instead of a level of the standard sweep's data factor.
  kVastScores = 2,
};
const char* DataKindName(DataKind kind);

// Inputs of a problem in owned host memory, in the layouts of common/attention/attention_spec.h.
struct InputTensors {
  std::vector<uint8_t> q;
  std::vector<uint8_t> k;
  std::vector<uint8_t> v;
  std::vector<uint8_t> dout;
  bool has_dout = false;
  std::vector<float> sinks;  // if the spec has them: one in five is -inf, no sink
  std::vector<float> dlse;   // with dout, if the spec has it
  // Set if the spec has them. One bias in 16 is -inf. A mask hides a third of the pairs, and all
  // pairs of one row in eight. Ids form runs, of which one in nine is negative, or are shuffled,
  // depending on the seed.
  std::vector<uint8_t> bias;
  std::vector<uint8_t> mask;
  std::vector<int32_t> q_segment_ids;
  std::vector<int32_t> kv_segment_ids;

  Inputs view() const;
};

// Returns the deviation of q's and k's elements for `kind`; that of v and dout is 1. Only
// kVastScores depends on the seed.
double QueryKeyDeviation(const AttentionSpec& spec, DataKind kind, uint64_t seed = 0);

// Write elements [first, first + count) of a bias, bytes of a mask, or segment ids of `tokens`
// tokens per batch row, distributed as in InputTensors.
void FillBias(DType dtype, uint64_t seed, int64_t first, int64_t count, void* target);
void FillMask(const AttentionSpec& spec, uint64_t seed, int64_t first_byte, int64_t count,
              uint8_t* target);
void FillSegmentIds(uint64_t seed, int64_t batch, int64_t tokens, int32_t* target);

// Each tensor's stream is its TensorId.
InputTensors GenerateInputs(const AttentionSpec& spec, DataKind kind, uint64_t seed,
                            bool with_dout);

// Returns cu_seqlens of `documents` documents of uneven lengths that add up to `total`; with
// `allow_empty` about a third of them are empty. Deterministic.
// REQUIRES: documents >= 1; total >= documents unless allow_empty.
std::vector<int64_t> SplitDocuments(int64_t total, int64_t documents, bool allow_empty,
                                    uint64_t seed);

}  // namespace ringattn::oracle

#endif  // RINGATTN_COMMON_ORACLE_GENERATOR_H_
