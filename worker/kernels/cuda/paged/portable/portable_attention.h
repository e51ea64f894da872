// PagedAttention by the portable kernels. They serve every problem that CheckProblem accepts.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_PORTABLE_PORTABLE_ATTENTION_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_PORTABLE_PORTABLE_ATTENTION_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "worker/kernels/cuda/paged/paged_attention.h"
#include "worker/kernels/cuda/paged/paged_problem.h"

namespace ringattn::worker::cuda::paged {

// REQUIRES: CheckProblem, CheckBuffers.
absl::StatusOr<std::unique_ptr<PagedAttention>> CreatePortableAttention(const PagedProblem& problem,
                                                                        const Buffers& buffers);
int64_t PortableWorkspaceBytes(const PagedProblem& problem);

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_PORTABLE_PORTABLE_ATTENTION_H_
