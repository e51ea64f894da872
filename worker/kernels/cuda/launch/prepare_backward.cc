#include "worker/kernels/cuda/launch/prepare_backward.h"

#include <cstdint>
#include <utility>

#include "worker/kernels/cuda/launch/params_of.h"
#include "worker/kernels/cuda/launch/tensor_map.h"
#include "worker/kernels/cuda/launch/tiled_call.h"
#include "worker/kernels/cuda/plan/attention_params.h"
#include "worker/kernels/cuda/plan/tile_plan.h"

namespace ringattn::worker::cuda {
namespace {

constexpr int kBlocksPerSm = 8;  // keep the tail short

class TiledBackward : public TiledCall<BackwardParams, BackwardPlan> {
 public:
  TiledBackward(std::string_view family, const TileKernel& kernel, DType dtype,
                const BackwardParams& params, BackwardPlan plan)
      : TiledCall(family, kernel, dtype, params, std::move(plan)) {}

  absl::Status Launch(const TableLaunch& launch) const override {
    if (!has_work()) return absl::OkStatus();
    const BackwardParams params = ParamsAt(launch);
    return LaunchKernel(params, params.common.num_heads / params.heads_per_block, launch.stream);
  }
};

BackwardParams ParamsOf(const BackwardCall& call) {
  const AttentionProblem& problem = *call.problem;
  BackwardParams params;
  params.common = CommonOf(problem, call.q_rows);
  params.q = call.q;
  params.dout = call.dout;
  params.lse = call.lse;
  params.delta = call.delta;
  params.dq_acc = call.dq_acc;
  AllowVectors(call, call.q, call.dout, params.common);
  return params;
}

// Requires rows of whole 16-byte units. Without an address the call only measures sizes, and no map
// is encoded.
absl::Status EncodeDqMap(int32_t tile_rows, BackwardParams& params) {
  const CommonParams& common = params.common;
  if (params.dq_acc == nullptr || common.head_dim % 4 != 0 || !Aligned16(params.dq_acc)) {
    return absl::OkStatus();
  }
  absl::Status status = EncodeTensorMap("dq", params.dq_acc,
                                        {.head_dim = common.head_dim,
                                         .heads = common.num_heads,
                                         .rows = common.q_rows,
                                         .batch = common.batch,
                                         .row_pitch = common.q_rows},
                                        {.columns = 32, .rows = tile_rows}, params.dq_map);
  if (status.ok()) params.has_dq_map = 1;
  return status;
}

}  // namespace

int32_t HeadsPerBlock(int32_t group_size, int64_t num_heads, int64_t tiles, int64_t wanted) {
  for (int32_t heads = group_size; heads > 1; --heads) {
    if (group_size % heads == 0 && tiles * (num_heads / heads) >= wanted) return heads;
  }
  return 1;
}

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareTiledBackward(std::string_view family,
                                                                     const TileKernel& kernel,
                                                                     bool staged_dq,
                                                                     const BackwardCall& call,
                                                                     const DeviceInfo& device) {
  const AttentionProblem& problem = *call.problem;
  BackwardPlan plan = PlanBackwardTiles(call, kernel.tile_keys);
  BackwardParams params = ParamsOf(call);
  if (staged_dq && !plan.tiles.empty()) {
    if (absl::Status status = EncodeDqMap(kernel.tile_rows, params); !status.ok()) return status;
  }
  params.heads_per_block = HeadsPerBlock(params.common.group_size, problem.num_heads,
                                         static_cast<int64_t>(plan.tiles.size()) * problem.batch,
                                         int64_t{kBlocksPerSm} * device.sm_count);
  return std::make_unique<TiledBackward>(family, kernel, problem.dtype, params, std::move(plan));
}

}  // namespace ringattn::worker::cuda
