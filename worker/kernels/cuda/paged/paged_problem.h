// What both kernel families share on the host: the checked arguments, the workspace, parameters and
// launches.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_PAGED_PROBLEM_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_PAGED_PROBLEM_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "worker/kernels/cuda/paged/paged_attention.h"
#include "worker/kernels/cuda/paged/step_params.h"

namespace ringattn::worker::cuda::paged {

// Arguments that CheckProblem has accepted.
struct PagedProblem {
  CacheShape shape;
  AttentionOptions options;
  BatchClass batch;
  DeviceInfo device;

  int32_t group_size() const { return options.num_heads / shape.num_kv_heads; }
};

// INVALID_ARGUMENT, with the value and what is accepted.
absl::Status CheckProblem(const PagedProblem& problem);
// The same of addresses.
absl::Status CheckBuffers(const PagedProblem& problem, const Buffers& buffers);

// How a kernel that splits keys divides a problem.
struct SplitShape {
  int32_t head_pack = 1;  // query heads of one kv head that share a unit
  int32_t packs = 1;
  int32_t tile_rows = 0;  // packed rows of a unit, at most
  int32_t unit_queries = 1;
  int32_t max_q = 1;  // rows of more queries are left to another kernel
  int32_t max_columns = 1;
  int64_t tickets = 0;
  int64_t group_tickets = 0;
};
// `blocks`: thread blocks that fill the GPU.
SplitShape SplitShapeOf(const PagedProblem& problem, int32_t tile_rows, int32_t max_q,
                        int32_t blocks);

// Where things lie in Buffers::workspace, in bytes from its beginning.
struct Workspace {
  int64_t counters = 0;  // 128 bytes
  int64_t done = 0;      // DoneSignal::counter, 128 bytes
  int64_t tickets = 0;
  int64_t group_tickets = 0;
  int64_t zeroed_bytes = 0;  // counters and tickets
  int64_t lse = 0;           // for callers that want none
  int64_t partial_lse = 0;
  int64_t partial_out = 0;
  int64_t bytes = 0;

  Workspace(const PagedProblem& problem, const SplitShape& split);
};

MaskRule MaskRuleOf(const PagedProblem& problem);
StepParams StepParamsOf(const PagedProblem& problem, const Buffers& buffers);
ForwardParams ForwardParamsOf(const PagedProblem& problem, const Buffers& buffers,
                              const Workspace& workspace, int32_t head_pack, int32_t tile_rows);
SplitParams SplitParamsOf(const PagedProblem& problem, const Buffers& buffers,
                          const Workspace& workspace, const SplitShape& split);

// What precedes the attention of a problem: the append, and with a FetchedInput its copy.
class AppendLaunch {
 public:
  // REQUIRES: CheckBuffers.
  AppendLaunch(const PagedProblem& problem, const Buffers& buffers);

  // INTERNAL if the kernel cannot be loaded.
  absl::Status Load() const;
  // Asynchronous. Does nothing if the batch class appends nothing and nothing is fetched.
  // `appends`: false to fetch alone.
  absl::Status Launch(cudaStream_t stream, bool appends = true) const;
  // Whether Launch launches a kernel.
  bool launches(bool appends) const { return fetches() || (appends && slices_ > 0); }
  // The kernel that follows must wait for this one before it reads the step.
  bool fetches() const { return params_.bytes > 0; }

 private:
  FetchParams params_;
  const void* kernel_;
  int32_t slices_;
};

// One kernel's launch but for its parameters. `overlap`: the kernel may be set up while the one in
// front of it in the stream still runs, and itself waits for that one's end.
struct KernelLaunch {
  const void* kernel = nullptr;
  int64_t blocks = 0;
  int32_t threads = 0;
  int32_t shared_bytes = 0;

  // INTERNAL if the kernel cannot be loaded with this much shared memory.
  absl::Status Load() const;
  absl::Status Launch(const void* params, bool overlap, cudaStream_t stream) const;
};

}  // namespace ringattn::worker::cuda::paged

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_PAGED_PROBLEM_H_
