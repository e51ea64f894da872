#include "worker/kernels/cuda/prepare_backward.h"

#include <cstdint>
#include <utility>

#include "worker/kernels/cuda/attention_params.h"
#include "worker/kernels/cuda/launch.h"
#include "worker/kernels/cuda/params_of.h"
#include "worker/kernels/cuda/tables.h"
#include "worker/kernels/cuda/tensor_map.h"
#include "worker/kernels/cuda/tile_plan.h"

namespace ringattn::worker::cuda {
namespace {

class TiledBackward : public PreparedKernel {
 public:
  // `params`: all but the tables, which Launch sets.
  TiledBackward(std::string_view family, const TileKernel& kernel, DType dtype,
                const BackwardParams& params, BackwardPlan plan)
      : PreparedKernel(family),
        kernel_(kernel),
        dtype_(dtype),
        params_(params),
        plan_(std::move(plan)),
        tile_count_(static_cast<int64_t>(plan_.tiles.size())),
        ranges_offset_(TableBytes(plan_.tiles)) {
    table_bytes_ = ranges_offset_ + TableBytes(plan_.ranges);
  }

  void WriteTables(void* target) const override {
    WriteTable(plan_.tiles, target, 0);
    WriteTable(plan_.ranges, target, ranges_offset_);
  }
  void DropTables() override { plan_ = {}; }

  absl::Status Launch(const TableLaunch& launch) const override {
    if (tile_count_ == 0 || params_.common.batch == 0) return absl::OkStatus();
    BackwardParams params = params_;
    params.common.stop_word = launch.stop_word;
    params.tiles = TableAt<BackwardTile>(launch.tables, 0);
    params.ranges = TableAt<QRange>(launch.tables, ranges_offset_);
    return LaunchTiles(kernel_, dtype_, tile_count_,
                       params.common.num_heads / params.heads_per_block, params.common.batch,
                       &params, launch.stream);
  }

 private:
  const TileKernel kernel_;
  const DType dtype_;
  const BackwardParams params_;
  BackwardPlan plan_;
  const int64_t tile_count_;
  const int64_t ranges_offset_;  // in the tables, bytes
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
  bool aligned_qk = problem.head_dim % 8 == 0 && Aligned16(call.q);
  bool aligned_v = problem.head_dim_v % 8 == 0 && Aligned16(call.dout);
  for (const KvBlock& block : call.blocks) {
    aligned_qk = aligned_qk && Aligned16(block.k);
    aligned_v = aligned_v && Aligned16(block.v);
  }
  params.common.vector_qk = aligned_qk;
  params.common.vector_v = aligned_v;
  return params;
}

// All heads of a group in one block save dk/dv traffic; fewer per block give
// the scheduler more, shorter blocks. Eight per SM keep the tail short.
int32_t HeadsPerBlock(int32_t group_size, int64_t num_heads, int64_t tiles, int sm_count) {
  const int64_t wanted = int64_t{8} * sm_count;
  for (int32_t heads = group_size; heads > 1; --heads) {
    if (group_size % heads == 0 && tiles * (num_heads / heads) >= wanted) return heads;
  }
  return 1;
}

// Needs rows of whole 16-byte units; without an address the call is only being measured.
absl::Status EncodeDqMap(int32_t tile_rows, BackwardParams& params) {
  const CommonParams& common = params.common;
  if (params.dq_acc == nullptr || common.head_dim % 4 != 0 || !Aligned16(params.dq_acc)) {
    return absl::OkStatus();
  }
  absl::Status status = EncodeTensorMap("dq", params.dq_acc,
                                        {.head_dim = common.head_dim,
                                         .heads = common.num_heads,
                                         .rows = common.q_rows,
                                         .batch = common.batch},
                                        {.columns = 32, .rows = tile_rows}, params.dq_map);
  if (status.ok()) params.has_dq_map = 1;
  return status;
}

}  // namespace

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
  params.heads_per_block =
      HeadsPerBlock(params.common.group_size, problem.num_heads,
                    static_cast<int64_t>(plan.tiles.size()) * problem.batch, device.sm_count);
  return std::make_unique<TiledBackward>(family, kernel, problem.dtype, params, std::move(plan));
}

}  // namespace ringattn::worker::cuda
