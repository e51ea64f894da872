// In the place of sm90_attention.cc where the build has no kernels for sm_90a.
#include "absl/status/status.h"
#include "worker/kernels/cuda/paged/sm90/sm90_attention.h"

namespace ringattn::worker::cuda::paged {

bool Sm90Serves(const PagedProblem&) { return false; }

absl::StatusOr<std::unique_ptr<PagedAttention>> CreateSm90Attention(const PagedProblem&,
                                                                    const Buffers&) {
  return absl::InternalError("this build has no kernels for sm_90a");
}

int64_t Sm90WorkspaceBytes(const PagedProblem&) { return 0; }

}  // namespace ringattn::worker::cuda::paged
