// Parameters of the sm_90a kernels with score terms, in addition to those of the plain kernels.
// Plain structures; no CUDA headers.
//
// A *pair* is a tile of the plan and one of the tiles that it meets: kKeys keys of a range in the
// forward, kRows queries of one in the backward. Pairs are counted over the plan's ranges.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_PARAMS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_PARAMS_H_

#include <cstdint>

#include "worker/kernels/cuda/plan/keep_bits.h"
#include "worker/kernels/cuda/plan/term_params.h"
#include "worker/kernels/cuda/sm90/backward/backward_params.h"
#include "worker/kernels/cuda/sm90/forward/forward_params.h"

namespace ringattn::worker::cuda::sm90 {

// The class of a pair by segment ids or by a mask, computed before any score: bits of a byte.
inline constexpr uint8_t kPairSeen = 1;     // otherwise all of its pairs are hidden: it is skipped
inline constexpr uint8_t kPairChecked = 2;  // some of its pairs may be hidden

// Filled by the launches of terms_classes.h, before the attention kernel.
struct PairTables {
  const int32_t* pair_begin = nullptr;  // device; first pair of each range
  int32_t pairs = 0;
  int32_t mask_planes = 0;
  uint8_t* id_classes = nullptr;    // [batch, pairs], or null: without segment ids
  uint8_t* mask_classes = nullptr;  // [mask_planes, pairs], or null: without a mask
  // The mask's bits in the order in which threads hold scores, lowest first: for each row of the
  // scores' accumulator (a query, packed heads included; in the backward a key) and q < 4, those of
  // columns 8 n + 2 q + i, at 2 n + i. [mask_planes, pairs, rows, 4] words of columns / 4 bits.
  void* mask_words = nullptr;
};

// The bias as the copy engine reads it: in place, or in a copy (call_bias.h) that has every
// `stride`-th column of a row, one residue after another.
struct BiasMap {
  TensorMap map;              // [planes, plane_rows, columns]; box: 128 bytes of so many rows
  int64_t first = 0;          // column of the bias that is column 0
  int32_t stride = 1;         // between the bias's columns that become consecutive
  int32_t class_columns = 0;  // columns of the bias with the same residue modulo stride
};

// Rows of a box. For a forward's panel they are those of a consumer group; for a backward's chunk
// they are limited by its bytes at 64 keys.
inline constexpr int32_t kForwardBiasRows = 64;
inline constexpr int32_t BackwardBiasBytes(int32_t tile_rows) {
  return tile_rows == 64 ? 8192 : 4096;
}
inline constexpr int32_t BackwardBiasRows(int32_t tile_rows, int32_t element_bytes) {
  return BackwardBiasBytes(tile_rows) / (64 * element_bytes);
}

struct TermForwardKernelParams : ForwardKernelParams {
  TermParams terms;
  PairTables pairs;
  BiasMap bias;
  PhiloxKeys keys;     // of dropout
  int32_t stride = 1;  // of positions, in q and in all blocks; 1 if terms are sharded by keys
  uint32_t zero = 0;   // 0, which the compiler cannot know
};

struct TermBackwardKernelParams : BackwardKernelParams {
  TermParams terms;
  PairTables pairs;
  BiasMap bias;
  PhiloxKeys keys;  // of dropout
  int32_t stride = 1;
  uint32_t zero = 0;  // as in the forward's
  // The bias's gradient, device memory, with the layout of the bias. Every head has a separate
  // plane, in the call's 16-bit type. The columns of keys are multiples of 8 where their tiles
  // begin. Only kernels that store the gradient read this.
  void* dbias = nullptr;
};

// Parameters of an ordered backward (ordered_backward.h).
struct OrderedTermBackwardKernelParams : TermBackwardKernelParams {
  TurnParams turns;
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_PARAMS_H_
