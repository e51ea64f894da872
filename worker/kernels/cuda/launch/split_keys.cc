#include "worker/kernels/cuda/launch/split_keys.h"

#include "worker/kernels/cuda/launch/elementwise.h"
#include "worker/kernels/cuda/launch/launch.h"
#include "worker/kernels/cuda/launch/tables.h"

namespace ringattn::worker::cuda {

SplitKeys::SplitKeys(const ForwardPlan& plan, const ForwardParams& params)
    : combine_count_(static_cast<int64_t>(plan.combines.size())) {
  const CommonParams& common = params.common;
  const int64_t rows =
      plan.slots * common.batch * (common.num_heads / params.head_pack) * params.tile_rows;
  out_bytes_ = AlignUp(rows * common.head_dim_v * 4);
  lse_bytes_ = AlignUp(rows * 4);
}

void SplitKeys::Place(void* scratch, ForwardParams& params) const {
  params.partial_out = static_cast<float*>(scratch);
  params.partial_lse = params.partial_out + out_bytes_ / 4;
}

absl::Status SplitKeys::Combine(DType dtype, const ForwardParams& params,
                                const CombineTile* combines, cudaStream_t stream,
                                bool early) const {
  if (combine_count_ == 0) return absl::OkStatus();
  CombineParams combine;
  combine.forward = params;
  combine.tiles = combines;
  return ToStatus(LaunchCombine(dtype, combine, combine_count_, stream, early), "combine launch");
}

}  // namespace ringattn::worker::cuda
