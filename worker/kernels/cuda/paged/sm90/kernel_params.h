// Parameters of the paged sm_90a kernels. Plain structures; no CUDA headers.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_KERNEL_PARAMS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_KERNEL_PARAMS_H_

#include <cstdint>

#include "worker/kernels/cuda/paged/step_params.h"
#include "worker/kernels/cuda/sm90/forward/forward_params.h"

namespace ringattn::worker::cuda::paged {

// K and V of all planes: [planes, plane_tokens, num_kv_heads, dim], where planes lie
// CacheShape::plane_bytes() apart. A box is 64 columns of one head by 2^box_shift tokens of one
// block. Tokens from plane_tokens on read as zero.
struct BlockMaps {
  cuda::sm90::TensorMap k;
  cuda::sm90::TensorMap v;
  int32_t box_shift = 0;
};

// q_map: of q [1, max_total_q, num_heads, head_dim], a box of 64 columns, head_pack heads and the
// queries of a unit.
struct DecodeParams : cuda::sm90::ForwardKernelParams {
  BlockMaps blocks;
  StepParams step;
  SplitParams split;
  DoneSignal done;
  bool step_is_fetched = false;  // by the kernel in front of this one
};

// Items are tiles of queries of one head. `counters` deals them out.
struct PrefillParams : cuda::sm90::ForwardKernelParams {
  BlockMaps blocks;
  StepParams step;
  MaskRule mask;
  int32_t min_q = 0;          // rows of at least so many queries are this launch's work
  int64_t section_bytes = 0;  // of K and V that the heads computed at one time share
};

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_KERNEL_PARAMS_H_
