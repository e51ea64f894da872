#include "worker/kernels/cuda/paged/paged_attention.h"

#include <algorithm>

#include "worker/kernels/cuda/paged/paged_problem.h"
#include "worker/kernels/cuda/paged/portable/portable_attention.h"
#include "worker/kernels/cuda/paged/sm90/sm90_attention.h"

namespace ringattn::worker::cuda::paged {

int64_t CacheShape::k_row_bytes() const {
  const int64_t elements = k_row_elements > 0 ? k_row_elements : int64_t{num_kv_heads} * head_dim;
  return elements * ElementBytes(dtype);
}

int64_t CacheShape::v_row_bytes() const {
  const int64_t elements = v_row_elements > 0 ? v_row_elements : int64_t{num_kv_heads} * head_dim_v;
  return elements * ElementBytes(dtype);
}

int64_t CacheShape::k_plane_bytes() const { return blocks * block_tokens * k_row_bytes(); }

int64_t CacheShape::v_plane_bytes() const { return blocks * block_tokens * v_row_bytes(); }

absl::StatusOr<std::unique_ptr<PagedAttention>> PagedAttention::Create(
    const CacheShape& shape, const AttentionOptions& options, const BatchClass& batch,
    const Buffers& buffers, const DeviceInfo& device, KernelChoice choice) {
  const PagedProblem problem{shape, options, batch, device};
  if (absl::Status status = CheckProblem(problem); !status.ok()) return status;
  if (absl::Status status = CheckBuffers(problem, buffers); !status.ok()) return status;
  if (choice != KernelChoice::kPortable && Sm90Serves(problem)) {
    return CreateSm90Attention(problem, buffers);
  }
  return CreatePortableAttention(problem, buffers);
}

int64_t PagedAttention::WorkspaceBytes(const CacheShape& shape, const AttentionOptions& options,
                                       const BatchClass& batch, const DeviceInfo& device,
                                       KernelChoice choice) {
  const PagedProblem problem{shape, options, batch, device};
  if (!CheckProblem(problem).ok()) return 0;
  if (choice != KernelChoice::kPortable && Sm90Serves(problem)) {
    return Sm90WorkspaceBytes(problem);
  }
  return PortableWorkspaceBytes(problem);
}

}  // namespace ringattn::worker::cuda::paged
