// The paged sm_90a kernels by head-dim class. ForwardKernel has the entries of both dtypes and the
// numbers of the tile.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_KERNELS_H_

#include "worker/kernels/cuda/paged/sm90/kernel_params.h"

namespace ringattn::worker::cuda::paged {

// Take DecodeParams; grid [max_columns * packs].
cuda::sm90::ForwardKernel DecodeKernel_d64(bool parted);
cuda::sm90::ForwardKernel DecodeKernel_d96(bool parted);
cuda::sm90::ForwardKernel DecodeKernel_d128(bool parted);
cuda::sm90::ForwardKernel DecodeKernel_d192(bool parted);
cuda::sm90::ForwardKernel DecodeKernel_d256(bool parted);

// Take PrefillParams; a grid of at most one thread block for each multiprocessor.
cuda::sm90::ForwardKernel PrefillKernel_d64(bool parted);
cuda::sm90::ForwardKernel PrefillKernel_d96(bool parted);
cuda::sm90::ForwardKernel PrefillKernel_d128(bool parted);
cuda::sm90::ForwardKernel PrefillKernel_d192(bool parted);
cuda::sm90::ForwardKernel PrefillKernel_d256(bool parted);

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_KERNELS_H_
