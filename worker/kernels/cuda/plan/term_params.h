// Parameters of kernels with score terms, in addition to attention_params.h: tables and parameters
// that calls without terms do not have. No CUDA headers.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PLAN_TERM_PARAMS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PLAN_TERM_PARAMS_H_

#include <cstdint>

#include "common/attention/dtype.h"
#include "worker/kernels/cuda/plan/attention_params.h"

namespace ringattn::worker::cuda {

// The position of a range in its document, for terms that depend on positions. Row r of the tile or
// range is query q_position + q_stride r, and column c is key k_position + k_stride c (BandLimits
// holds the strides). The table has one entry per KvRange or QRange, in the same order.
struct TermRange {
  int64_t q_position = 0;
  int64_t k_position = 0;
  int64_t shift = 0;                     // query i is aligned with key i + shift
  const int32_t* segment_ids = nullptr;  // of the block's keys, device: [batch, block_rows]
  int32_t document = 0;                  // index in the whole problem, if packed
  int32_t unused = 0;
  // The pair's element in a plane of a bias or a mask (ScoreTerms::PairRow and PairColumn). Sharded
  // by queries: row plane_row + r, column plane_column + k_stride c. Sharded by keys: row plane_row
  // + q_stride r, column plane_column + c.
  int64_t plane_row = 0;
  int64_t plane_column = 0;
};

// A problem's score terms and a call's operands of them (score_terms.h), in device memory. A
// pointer is null if the problem does not have its term.
struct TermParams {
  const TermRange* ranges = nullptr;
  const float* slopes = nullptr;  // [num_heads], or one set for each batch row (document)
  const void* bias = nullptr;
  const uint8_t* mask = nullptr;
  const int32_t* q_segment_ids = nullptr;
  int64_t columns = 0;                 // of the bias
  int64_t mask_row_bytes = 0;          // of the mask
  DType dtype = DType::kFloat32;       // of the call's tensors
  DType bias_dtype = DType::kFloat32;  // and of dbias
  bool packed = false;
  bool slopes_per_batch = false;
  bool bias_per_batch = false;
  bool bias_per_head = false;
  bool bias_before_softcap = false;
  bool mask_per_batch = false;
  bool mask_per_head = false;
  bool mask_bits = false;
  // Dropout; threshold 0 is none.
  uint32_t threshold = 0;
  float keep_scale = 1.0f;
  uint32_t key0 = 0, key1 = 0;
  uint32_t first_batch = 0, first_head = 0, first_query = 0, first_key = 0;
  uint32_t head_step = 1;
  // How a bias and a mask are sharded, and how many rows their planes have. The fields are placed
  // last because two of sm90's backwards spill registers if they stand among the others: the
  // compiler loads more adjacent fields at once.
  bool by_keys = false;
  int64_t plane_rows = 0;
};

struct TermForwardParams : ForwardParams {
  TermParams terms;
};

// dk and dv.
struct TermKeyGradientParams : BackwardParams {
  TermParams terms;
};

// Parameters of gradients that are summed over keys: dq, or the gradient of a bias.
struct TermQueryGradientParams {
  CommonParams common;
  const ForwardTile* tiles = nullptr;  // device; [grid.x]
  const KvRange* ranges = nullptr;     // device
  const void* q = nullptr;
  const void* dout = nullptr;
  const float* lse = nullptr;
  const float* delta = nullptr;
  float* dq_acc = nullptr;
  void* dbias = nullptr;
  TermParams terms;
};

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PLAN_TERM_PARAMS_H_
