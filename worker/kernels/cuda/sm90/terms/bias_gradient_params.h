// Parameters of the sm_90a kernels for a bias's gradient. Plain structures; no CUDA headers.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_BIAS_GRADIENT_PARAMS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_BIAS_GRADIENT_PARAMS_H_

#include <cstdint>

#include "worker/kernels/cuda/sm90/terms/terms_params.h"

namespace ringattn::worker::cuda::sm90 {

// Uses the tables, maps (of tiles of 64 keys) and terms of a forward's parameters; head_pack is 1.
// A thread block is identified by a q tile, a part of its key tiles, and a plane of the bias, in
// this order.
struct BiasGradientKernelParams : TermForwardKernelParams {
  TensorMap dout_map;  // as q_map
  const float* lse = nullptr;
  const float* delta = nullptr;
  void* dbias = nullptr;
  int32_t planes = 1;  // of the bias
  int32_t parts = 1;
  int32_t vectors = 0;  // 16-byte stores are allowed at elements that are multiples of 8
};

// The kernels by head-dim class, max(head_dim, head_dim_v) rounded up.
ForwardKernel BiasGradientKernel_d64();
ForwardKernel BiasGradientKernel_d128();

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_BIAS_GRADIENT_PARAMS_H_
