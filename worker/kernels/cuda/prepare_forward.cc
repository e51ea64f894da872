#include "worker/kernels/cuda/prepare_forward.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "worker/kernels/cuda/attention_params.h"
#include "worker/kernels/cuda/elementwise.h"
#include "worker/kernels/cuda/launch.h"
#include "worker/kernels/cuda/params_of.h"
#include "worker/kernels/cuda/tables.h"
#include "worker/kernels/cuda/tile_plan.h"

namespace ringattn::worker::cuda {
namespace {

class TiledForward : public PreparedKernel {
 public:
  // `params`: all but the tables and partials, which Launch sets.
  TiledForward(std::string_view family, const TileKernel& kernel, DType dtype,
               const ForwardParams& params, ForwardPlan plan)
      : PreparedKernel(family),
        kernel_(kernel),
        dtype_(dtype),
        params_(params),
        plan_(std::move(plan)),
        tile_count_(static_cast<int64_t>(plan_.tiles.size())),
        combine_count_(static_cast<int64_t>(plan_.combines.size())),
        ranges_offset_(TableBytes(plan_.tiles)),
        combines_offset_(ranges_offset_ + TableBytes(plan_.ranges)) {
    const CommonParams& common = params.common;
    const int64_t partial_rows =
        plan_.slots * common.batch * (common.num_heads / params.head_pack) * kernel.tile_rows;
    partial_out_bytes_ = AlignUp(partial_rows * common.head_dim_v * 4);
    table_bytes_ = combines_offset_ + TableBytes(plan_.combines);
    scratch_bytes_ = partial_out_bytes_ + AlignUp(partial_rows * 4);
  }

  void WriteTables(void* target) const override {
    WriteTable(plan_.tiles, target, 0);
    WriteTable(plan_.ranges, target, ranges_offset_);
    WriteTable(plan_.combines, target, combines_offset_);
  }
  void DropTables() override { plan_ = {}; }

  absl::Status Launch(const TableLaunch& launch) const override {
    if (tile_count_ == 0 || params_.common.batch == 0) return absl::OkStatus();
    ForwardParams params = params_;
    params.common.stop_word = launch.stop_word;
    params.tiles = TableAt<ForwardTile>(launch.tables, 0);
    params.ranges = TableAt<KvRange>(launch.tables, ranges_offset_);
    params.partial_out = static_cast<float*>(launch.scratch);
    params.partial_lse = params.partial_out + partial_out_bytes_ / 4;
    const CommonParams& common = params.common;
    absl::Status status =
        LaunchTiles(kernel_, dtype_, tile_count_, common.num_heads / params.head_pack, common.batch,
                    &params, launch.stream);
    if (!status.ok() || combine_count_ == 0) return status;
    CombineParams combine;
    combine.tiles = TableAt<CombineTile>(launch.tables, combines_offset_);
    combine.forward = params;
    return ToStatus(LaunchCombine(dtype_, combine, combine_count_, launch.stream),
                    "combine launch");
  }

 private:
  const TileKernel kernel_;
  const DType dtype_;
  const ForwardParams params_;
  ForwardPlan plan_;
  const int64_t tile_count_;
  const int64_t combine_count_;
  const int64_t ranges_offset_;  // in the tables, bytes
  const int64_t combines_offset_;
  int64_t partial_out_bytes_ = 0;
};

ForwardParams ParamsOf(const ForwardCall& call, const TileKernel& kernel) {
  const AttentionProblem& problem = *call.problem;
  ForwardParams params;
  params.common = CommonOf(problem, call.q_rows);
  params.q = call.q;
  params.out_acc = call.out_acc;
  params.lse = call.lse;
  params.out = call.out;
  params.initial = call.initial;
  params.final = call.final;
  params.tile_rows = kernel.tile_rows;
  bool aligned_qk = problem.head_dim % 8 == 0 && Aligned16(call.q);
  bool aligned_v = problem.head_dim_v % 8 == 0;
  for (const KvBlock& block : call.blocks) {
    aligned_qk = aligned_qk && Aligned16(block.k);
    aligned_v = aligned_v && Aligned16(block.v);
  }
  params.common.vector_qk = aligned_qk;
  params.common.vector_v = aligned_v;

  // Short queries: all heads of a group share a tile, so that K/V are read once.
  int64_t longest_piece = 0;
  for (const Piece& piece : call.q_pieces) longest_piece = std::max(longest_piece, piece.length);
  const int64_t group_size = params.common.group_size;
  if (group_size > 1 && longest_piece * group_size <= kernel.tile_rows) {
    params.head_pack = static_cast<int32_t>(group_size);
  }
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
