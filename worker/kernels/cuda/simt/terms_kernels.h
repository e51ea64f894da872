// The kernels that compute every score term, by head-dim class (head_dim_classes.h); each takes
// tensors of any type.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SIMT_TERMS_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SIMT_TERMS_KERNELS_H_

#include "worker/kernels/cuda/plan/tile_kernel.h"

namespace ringattn::worker::cuda::simt {

struct TermKernels {
  TileKernel forward;         // TermForwardParams
  TileKernel key_gradient;    // TermKeyGradientParams: dk and dv
  TileKernel query_gradient;  // TermQueryGradientParams: dq
  TileKernel bias_gradient;   // TermQueryGradientParams: dbias
};

TermKernels TermKernelsOf(int head_dim_class);

}  // namespace ringattn::worker::cuda::simt

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SIMT_TERMS_KERNELS_H_
