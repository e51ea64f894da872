// PagedAttention by the sm_90a kernels.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_SM90_ATTENTION_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_SM90_ATTENTION_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "worker/kernels/cuda/paged/paged_attention.h"
#include "worker/kernels/cuda/paged/paged_problem.h"

namespace ringattn::worker::cuda::paged {

// Whether they serve a problem: bf16 or fp16, head dims that are multiples of 8, and compute
// capability 9.0. False where the build has no kernels for sm_90a.
bool Sm90Serves(const PagedProblem& problem);

// REQUIRES: Sm90Serves, CheckBuffers. INTERNAL if a kernel cannot be loaded or a tensor map cannot
// be encoded.
absl::StatusOr<std::unique_ptr<PagedAttention>> CreateSm90Attention(const PagedProblem& problem,
                                                                    const Buffers& buffers);
int64_t Sm90WorkspaceBytes(const PagedProblem& problem);

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_SM90_SM90_ATTENTION_H_
