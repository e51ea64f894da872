// The sm_90a kernels with score terms, by head-dim class: max(head_dim, head_dim_v) rounded up.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_KERNELS_H_

#include "worker/kernels/cuda/sm90/terms/terms_params.h"

namespace ringattn::worker::cuda::sm90 {

// Kernels for ALiBi, segment ids and a mask, launched with TermForwardKernelParams.
ForwardKernel ForwardKernel_pairs_d64();
ForwardKernel ForwardKernel_pairs_d128();

// The same with ALiBi as a part of the product: faster, for problems that AlibiInProduct accepts.
ForwardKernel ForwardKernel_alibi_d64();
ForwardKernel ForwardKernel_alibi_d128();

// Kernels that support dropout in addition.
ForwardKernel ForwardKernel_drops_d64();
ForwardKernel ForwardKernel_drops_d128();

// Kernels for all terms.
ForwardKernel ForwardKernel_terms_d64();
ForwardKernel ForwardKernel_terms_d128();

// The backward kernels, launched with TermBackwardKernelParams; none has a softcap.
BackwardKernel BackwardKernel_pairs_d64();
BackwardKernel BackwardKernel_pairs_d128();
BackwardKernel BackwardKernel_drops_d64();
BackwardKernel BackwardKernel_drops_d128();
BackwardKernel BackwardKernel_terms_d64();
BackwardKernel BackwardKernel_terms_d128();

// Kernels for all terms that also store the gradient of the bias.
BackwardKernel BackwardKernel_stores_d64();
BackwardKernel BackwardKernel_stores_d128();

// The same with a fixed order of sums, launched with OrderedTermBackwardKernelParams.
BackwardKernel BackwardKernel_ordered_pairs_d64();
BackwardKernel BackwardKernel_ordered_pairs_d128();
BackwardKernel BackwardKernel_ordered_terms_d64();
BackwardKernel BackwardKernel_ordered_terms_d128();
BackwardKernel BackwardKernel_ordered_stores_d64();
BackwardKernel BackwardKernel_ordered_stores_d128();

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_TERMS_TERMS_KERNELS_H_
