// Converts a problem to the parameters of kernels, for the Prepare functions of every family.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_PARAMS_OF_H_
#define RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_PARAMS_OF_H_

#include <algorithm>
#include <cstdint>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/plan/attention_params.h"

namespace ringattn::worker::cuda {

inline bool Aligned16(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// All common parameters except the stop word and those that depend on the tensors' addresses.
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

// Decides on 16-byte accesses (CommonParams) from the call's dims and addresses: those of its
// blocks, of a tensor over head_dim (q), and of one over head_dim_v. A null address counts as
// aligned.
template <typename Call>
void AllowVectors(const Call& call, const void* over_qk, const void* over_v, CommonParams& common) {
  bool aligned_qk = common.head_dim % 8 == 0 && Aligned16(over_qk);
  bool aligned_v = common.head_dim_v % 8 == 0 && Aligned16(over_v);
  for (const KvBlock& block : call.blocks) {
    aligned_qk = aligned_qk && Aligned16(block.k);
    aligned_v = aligned_v && Aligned16(block.v);
  }
  common.vector_qk = aligned_qk;
  common.vector_v = aligned_v;
}

// Returns how many heads of a group share a tile. For short queries all heads of a group share it,
// so that K/V are read once.
inline int32_t HeadPack(const ForwardCall& call, int32_t tile_rows) {
  int64_t longest_piece = 0;
  for (const Piece& piece : call.q_pieces) longest_piece = std::max(longest_piece, piece.length);
  const int64_t group_size = call.problem->num_heads / call.problem->num_kv_heads;
  return longest_piece * group_size <= tile_rows ? static_cast<int32_t>(group_size) : 1;
}

// Sets the destination of a forward's rows. Results that stay fp32 are written as partials are,
// including the last ones: nothing is rounded, and a sink is merged in each call that has one.
inline void SetResult(const ForwardCall& call, ForwardParams& params) {
  const bool rounds = call.problem->out_dtype() == call.problem->dtype;
  params.initial = call.initial;
  params.final = call.final && rounds;
  params.out = rounds ? call.out : nullptr;
  params.out_acc = call.final && !rounds ? static_cast<float*>(call.out) : call.out_acc;
}

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_PARAMS_OF_H_
