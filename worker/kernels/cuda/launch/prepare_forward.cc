#include "worker/kernels/cuda/launch/prepare_forward.h"

#include <cstdint>
#include <utility>

#include "worker/kernels/cuda/launch/params_of.h"
#include "worker/kernels/cuda/launch/split_keys.h"
#include "worker/kernels/cuda/launch/tables.h"
#include "worker/kernels/cuda/launch/tiled_call.h"
#include "worker/kernels/cuda/plan/attention_params.h"
#include "worker/kernels/cuda/plan/tile_plan.h"

namespace ringattn::worker::cuda {
namespace {

class TiledForward : public TiledCall<ForwardParams, ForwardPlan> {
 public:
  TiledForward(std::string_view family, const TileKernel& kernel, DType dtype,
               const ForwardParams& params, ForwardPlan plan)
      : TiledCall(family, kernel, dtype, params, std::move(plan)),
        split_(this->plan(), params),
        combines_offset_(table_bytes_) {
    table_bytes_ += TableBytes(this->plan().combines);
    scratch_bytes_ = split_.scratch_bytes();
  }

  void WriteTables(void* target) const override {
    TiledCall::WriteTables(target);
    WriteTable(plan().combines, target, combines_offset_);
  }

  absl::Status Launch(const TableLaunch& launch) const override {
    if (!has_work()) return absl::OkStatus();
    ForwardParams params = ParamsAt(launch);
    split_.Place(launch.scratch, params);
    absl::Status status =
        LaunchKernel(params, params.common.num_heads / params.head_pack, launch.stream);
    if (!status.ok()) return status;
    return split_.Combine(dtype(), params, TableAt<CombineTile>(launch.tables, combines_offset_),
                          launch.stream);
  }

 private:
  const SplitKeys split_;
  const int64_t combines_offset_;  // in the tables, bytes
};

ForwardParams ParamsOf(const ForwardCall& call, const TileKernel& kernel) {
  const AttentionProblem& problem = *call.problem;
  ForwardParams params;
  params.common = CommonOf(problem, call.q_rows);
  params.q = call.q;
  params.lse = call.lse;
  params.sinks = call.sinks;
  SetResult(call, params);
  params.tile_rows = kernel.tile_rows;
  AllowVectors(call, call.q, nullptr, params.common);
  params.head_pack = HeadPack(call, kernel.tile_rows);
  return params;
}

}  // namespace

std::unique_ptr<PreparedKernel> PrepareTiledForward(std::string_view family,
                                                    const TileKernel& kernel,
                                                    const ForwardCall& call,
                                                    const DeviceInfo& device,
                                                    const KernelTuning& tuning) {
  const AttentionProblem& problem = *call.problem;
  const ForwardParams params = ParamsOf(call, kernel);
  ForwardTileShape shape;
  shape.q_rows = kernel.tile_rows / params.head_pack;
  shape.keys = kernel.tile_keys;
  shape.blocks_per_tile = problem.batch * problem.num_heads / params.head_pack;
  shape.target_blocks =
      tuning.max_key_splits == 1 ? 0 : int64_t{device.sm_count} * kernel.blocks_per_sm;
  return std::make_unique<TiledForward>(family, kernel, problem.dtype, params,
                                        PlanForwardTiles(call, shape));
}

}  // namespace ringattn::worker::cuda
