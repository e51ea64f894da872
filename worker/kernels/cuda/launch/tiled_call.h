// Base of a prepared call of either direction whose kernel walks the tables of tile_plan.h: the
// kernel, its parameters, and a plan whose tiles and ranges become tables.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_TILED_CALL_H_
#define RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_TILED_CALL_H_

#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "worker/kernels/cuda/launch/launch.h"
#include "worker/kernels/cuda/launch/prepared_kernel.h"
#include "worker/kernels/cuda/launch/tables.h"
#include "worker/kernels/cuda/plan/tile_kernel.h"

namespace ringattn::worker::cuda {

// Params: ForwardParams or BackwardParams; Plan: ForwardPlan or BackwardPlan. Each direction
// derives a class that adds its other tables and launches the kernel.
template <typename Params, typename Plan>
class TiledCall : public PreparedKernel {
 public:
  void WriteTables(void* target) const override {
    WriteTable(plan_.tiles, target, 0);
    WriteTable(plan_.ranges, target, ranges_offset_);
  }
  void DropTables() override { plan_ = {}; }

 protected:
  // `params`: all parameters except those that ParamsAt sets.
  TiledCall(std::string_view family, const TileKernel& kernel, DType dtype, const Params& params,
            Plan plan, std::string_view kernel_class = kPlainKernelClass)
      : PreparedKernel(family, kernel_class),
        kernel_(kernel),
        dtype_(dtype),
        params_(params),
        plan_(std::move(plan)),
        tile_count_(static_cast<int64_t>(plan_.tiles.size())),
        ranges_offset_(TableBytes(plan_.tiles)) {
    table_bytes_ = ranges_offset_ + TableBytes(plan_.ranges);
  }

  const Plan& plan() const { return plan_; }
  const Params& params() const { return params_; }
  DType dtype() const { return dtype_; }
  bool has_work() const { return tile_count_ > 0 && params_.common.batch > 0; }

  // Returns the parameters with the launch's stop word, tiles and ranges.
  Params ParamsAt(const TableLaunch& launch) const {
    Params params = params_;
    params.common.stop_word = launch.stop_word;
    params.tiles = TableAt<typename decltype(Plan::tiles)::value_type>(launch.tables, 0);
    params.ranges =
        TableAt<typename decltype(Plan::ranges)::value_type>(launch.tables, ranges_offset_);
    return params;
  }

  // Launches one block per tile, batch row and head (or pack of heads).
  absl::Status LaunchKernel(const Params& params, int64_t heads, cudaStream_t stream) const {
    return LaunchTiles(kernel_, dtype_, tile_count_, heads, params.common.batch, &params, stream);
  }

 private:
  const TileKernel kernel_;
  const DType dtype_;
  const Params params_;
  Plan plan_;
  const int64_t tile_count_;
  const int64_t ranges_offset_;  // in the tables, bytes
};

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_TILED_CALL_H_
