// Split keys: a kernel writes one partial result per split of a q tile's keys to scratch memory,
// and a second kernel combines them. For every family whose plans are those of tile_plan.h.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_SPLIT_KEYS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_SPLIT_KEYS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "common/attention/dtype.h"
#include "worker/kernels/cuda/plan/attention_params.h"
#include "worker/kernels/cuda/plan/tile_plan.h"

namespace ringattn::worker::cuda {

// A plain value; thread safe.
class SplitKeys {
 public:
  SplitKeys() = default;
  // Requires of `params`: head counts, dims, head_pack and tile_rows.
  SplitKeys(const ForwardPlan& plan, const ForwardParams& params);

  // Bytes of scratch for the partials; 0 if no keys are split.
  int64_t scratch_bytes() const { return out_bytes_ + lse_bytes_; }

  // Points `params` at its partials in `scratch` (device, scratch_bytes()).
  void Place(void* scratch, ForwardParams& params) const;

  // Enqueues the combination, if keys are split, after the kernel that ran with `params`.
  // `combines`: the plan's table on the device. `early` (compute capability 9.0): blocks of the
  // combination may start, and wait, while that kernel still runs. Returns INTERNAL with CUDA's
  // text if the launch fails.
  absl::Status Combine(DType dtype, const ForwardParams& params, const CombineTile* combines,
                       cudaStream_t stream, bool early = false) const;

 private:
  int64_t combine_count_ = 0;
  int64_t out_bytes_ = 0;
  int64_t lse_bytes_ = 0;
};

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_SPLIT_KEYS_H_
