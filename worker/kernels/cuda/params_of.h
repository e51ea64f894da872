// What the kernels' parameters take from a problem, for the Prepare functions of every family.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PARAMS_OF_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PARAMS_OF_H_

#include <cstdint>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/attention_params.h"

namespace ringattn::worker::cuda {

inline bool Aligned16(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// Everything but the stop word and what depends on the tensors' addresses.
inline CommonParams CommonOf(const AttentionProblem& problem, int64_t q_rows) {
  constexpr float kLog2E = 1.4426950408889634f;
  CommonParams common;
  common.q_rows = q_rows;
  common.batch = static_cast<int32_t>(problem.batch);
  common.num_heads = static_cast<int32_t>(problem.num_heads);
  common.num_kv_heads = static_cast<int32_t>(problem.num_kv_heads);
  common.group_size = static_cast<int32_t>(problem.num_heads / problem.num_kv_heads);
  common.head_dim = static_cast<int32_t>(problem.head_dim);
  common.head_dim_v = static_cast<int32_t>(problem.head_dim_v);
  common.softmax_scale = problem.softmax_scale;
  common.scale_log2 = problem.softmax_scale * kLog2E;
  common.softcap = problem.softcap;
  return common;
}

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PARAMS_OF_H_
