#include "worker/kernels/cuda/simt/terms.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "worker/kernels/cuda/launch/params_of.h"
#include "worker/kernels/cuda/launch/split_keys.h"
#include "worker/kernels/cuda/launch/tables.h"
#include "worker/kernels/cuda/launch/tiled_call.h"
#include "worker/kernels/cuda/plan/term_params.h"
#include "worker/kernels/cuda/plan/term_table.h"
#include "worker/kernels/cuda/plan/tile_plan.h"

namespace ringattn::worker::cuda::simt {
namespace {

// Clears the ranges' segment ids if the problem has none, so that no kernel reads them.
std::vector<TermRange> WithoutIds(const AttentionProblem& problem, std::vector<TermRange> ranges) {
  if (problem.terms.segment_ids) return ranges;
  for (TermRange& range : ranges) range.segment_ids = nullptr;
  return ranges;
}

// A tiled call whose tables of terms follow the plan's tables.
template <typename Params, typename Plan>
class TermCall : public TiledCall<Params, Plan> {
  using Base = TiledCall<Params, Plan>;

 public:
  TermCall(std::string_view family, const TileKernel& kernel, const AttentionProblem& problem,
           const Params& params, Plan plan, std::vector<TermRange> ranges, int64_t grid_heads,
           int64_t grid_batch)
      : Base(family, kernel, problem.dtype, params, std::move(plan), kTermKernelClass),
        kernel_(kernel),
        ranges_(WithoutIds(problem, std::move(ranges))),
        slopes_(problem.terms.alibi_slopes),
        has_slopes_(!slopes_.empty()),
        tile_count_(static_cast<int64_t>(this->plan().tiles.size())),
        grid_heads_(grid_heads),
        grid_batch_(grid_batch),
        term_ranges_offset_(this->table_bytes_),
        slopes_offset_(term_ranges_offset_ + TableBytes(ranges_)) {
    this->table_bytes_ = slopes_offset_ + TableBytes(slopes_);
  }

  void WriteTables(void* target) const override {
    Base::WriteTables(target);
    WriteTable(ranges_, target, term_ranges_offset_);
    WriteTable(slopes_, target, slopes_offset_);
  }
  void DropTables() override {
    Base::DropTables();
    ranges_ = {};
    slopes_ = {};
  }
  absl::Status Launch(const TableLaunch& launch) const override {
    if (!this->has_work()) return absl::OkStatus();
    const Params params = WithTables(launch);
    return LaunchTerms(params, launch.stream);
  }

 protected:
  Params WithTables(const TableLaunch& launch) const {
    Params params = this->ParamsAt(launch);
    params.terms.ranges = TableAt<TermRange>(launch.tables, term_ranges_offset_);
    params.terms.slopes = has_slopes_ ? TableAt<float>(launch.tables, slopes_offset_) : nullptr;
    return params;
  }
  absl::Status LaunchTerms(const Params& params, cudaStream_t stream) const {
    return LaunchTiles(kernel_, this->dtype(), tile_count_, grid_heads_, grid_batch_, &params,
                       stream);
  }

 private:
  const TileKernel kernel_;
  std::vector<TermRange> ranges_;
  std::vector<float> slopes_;
  const bool has_slopes_;
  const int64_t tile_count_;
  const int64_t grid_heads_;
  const int64_t grid_batch_;
  const int64_t term_ranges_offset_;  // in the tables, bytes
  const int64_t slopes_offset_;
};

class ForwardWithTerms : public TermCall<TermForwardParams, ForwardPlan> {
  using Base = TermCall<TermForwardParams, ForwardPlan>;

 public:
  ForwardWithTerms(std::string_view family, const TileKernel& kernel,
                   const AttentionProblem& problem, const TermForwardParams& params,
                   ForwardPlan plan, std::vector<TermRange> ranges)
      : Base(family, kernel, problem, params, std::move(plan), std::move(ranges),
             problem.num_heads / params.head_pack, problem.batch),
        split_(this->plan(), params),
        combines_offset_(table_bytes_) {
    table_bytes_ += TableBytes(this->plan().combines);
    scratch_bytes_ = split_.scratch_bytes();
  }

  void WriteTables(void* target) const override {
    Base::WriteTables(target);
    WriteTable(plan().combines, target, combines_offset_);
  }
  absl::Status Launch(const TableLaunch& launch) const override {
    if (!has_work()) return absl::OkStatus();
    TermForwardParams params = WithTables(launch);
    split_.Place(launch.scratch, params);
    if (absl::Status status = LaunchTerms(params, launch.stream); !status.ok()) return status;
    return split_.Combine(dtype(), params, TableAt<CombineTile>(launch.tables, combines_offset_),
                          launch.stream);
  }

 private:
  const SplitKeys split_;
  const int64_t combines_offset_;  // in the tables, bytes
};

// Runs one kernel after another, with their tables in the same order. Neither kernel needs scratch.
class InTurn : public PreparedKernel {
 public:
  InTurn(std::string_view family, std::unique_ptr<PreparedKernel> first,
         std::unique_ptr<PreparedKernel> second)
      : PreparedKernel(family, kTermKernelClass),
        first_(std::move(first)),
        second_(std::move(second)) {
    table_bytes_ = first_->table_bytes() + second_->table_bytes();
  }

  void WriteTables(void* target) const override {
    first_->WriteTables(target);
    second_->WriteTables(static_cast<char*>(target) + first_->table_bytes());
  }
  void DropTables() override {
    first_->DropTables();
    second_->DropTables();
  }
  absl::Status Launch(const TableLaunch& launch) const override {
    if (absl::Status status = first_->Launch(launch); !status.ok()) return status;
    TableLaunch behind = launch;
    behind.tables = static_cast<const char*>(launch.tables) + first_->table_bytes();
    return second_->Launch(behind);
  }

 private:
  const std::unique_ptr<PreparedKernel> first_;
  const std::unique_ptr<PreparedKernel> second_;
};

// Returns a forward call with the call's queries and keys, for the forward planner. Only tiles with
// keys matter.
template <typename Call>
ForwardCall QueryView(const Call& call) {
  ForwardCall view;
  view.problem = call.problem;
  view.q_rows = call.q_rows;
  view.q_pieces = call.q_pieces;
  view.blocks = call.blocks;
  return view;
}

template <typename Call>
TermQueryGradientParams QueryGradientParams(const Call& call) {
  TermQueryGradientParams params;
  params.common = CommonOf(*call.problem, call.q_rows);
  params.q = call.q;
  params.dout = call.dout;
  params.lse = call.lse;
  params.delta = call.delta;
  params.terms = TermsOf(*call.problem, call.terms, call.q_rows);
  return params;
}

std::unique_ptr<PreparedKernel> PrepareKeyGradient(std::string_view family,
                                                   const TileKernel& kernel,
                                                   const BackwardCall& call) {
  const AttentionProblem& problem = *call.problem;
  TermKeyGradientParams params;
  params.common = CommonOf(problem, call.q_rows);
  params.q = call.q;
  params.dout = call.dout;
  params.lse = call.lse;
  params.delta = call.delta;
  // One block for all heads of a group: no other block adds to the sums of its keys.
  params.heads_per_block = params.common.group_size;
  params.terms = TermsOf(problem, call.terms, call.q_rows);
  BackwardPlan plan = PlanBackwardTiles(call, kernel.tile_keys);
  std::vector<TermRange> ranges = TermRangesOf(call, plan);
  return std::make_unique<TermCall<TermKeyGradientParams, BackwardPlan>>(
      family, kernel, problem, params, std::move(plan), std::move(ranges), problem.num_kv_heads,
      problem.batch);
}

std::unique_ptr<PreparedKernel> PrepareQueryGradient(std::string_view family,
                                                     const TileKernel& kernel,
                                                     const BackwardCall& call) {
  const AttentionProblem& problem = *call.problem;
  TermQueryGradientParams params = QueryGradientParams(call);
  params.dq_acc = call.dq_acc;
  const ForwardCall view = QueryView(call);
  ForwardTileShape shape;  // keys are not split: one block sums a row
  shape.q_rows = kernel.tile_rows;
  shape.keys = kernel.tile_keys;
  ForwardPlan plan = PlanForwardTiles(view, shape);
  std::vector<TermRange> ranges = TermRangesOf(view, plan);
  return std::make_unique<TermCall<TermQueryGradientParams, ForwardPlan>>(
      family, kernel, problem, params, std::move(plan), std::move(ranges), problem.num_heads,
      problem.batch);
}

}  // namespace

std::unique_ptr<PreparedKernel> PrepareTermForward(std::string_view family,
                                                   const TermKernels& kernels,
                                                   const ForwardCall& call,
                                                   const DeviceInfo& device,
                                                   const KernelTuning& tuning) {
  const AttentionProblem& problem = *call.problem;
  const TileKernel& kernel = kernels.forward;
  TermForwardParams params;
  params.common = CommonOf(problem, call.q_rows);
  params.q = call.q;
  params.lse = call.lse;
  params.sinks = call.sinks;
  SetResult(call, params);
  params.tile_rows = kernel.tile_rows;
  params.head_pack = HeadPack(call, kernel.tile_rows);
  params.terms = TermsOf(problem, call.terms, call.q_rows);
  ForwardTileShape shape;
  shape.q_rows = kernel.tile_rows / params.head_pack;
  shape.keys = kernel.tile_keys;
  shape.blocks_per_tile = problem.batch * problem.num_heads / params.head_pack;
  shape.target_blocks =
      tuning.max_key_splits == 1 ? 0 : int64_t{device.sm_count} * kernel.blocks_per_sm;
  ForwardPlan plan = PlanForwardTiles(call, shape);
  std::vector<TermRange> ranges = TermRangesOf(call, plan);
  return std::make_unique<ForwardWithTerms>(family, kernel, problem, params, std::move(plan),
                                            std::move(ranges));
}

std::unique_ptr<PreparedKernel> PrepareTermBackward(std::string_view family,
                                                    const TermKernels& kernels,
                                                    const BackwardCall& call) {
  return std::make_unique<InTurn>(family, PrepareKeyGradient(family, kernels.key_gradient, call),
                                  PrepareQueryGradient(family, kernels.query_gradient, call));
}

std::unique_ptr<PreparedKernel> PrepareTermBiasGradient(std::string_view family,
                                                        const TermKernels& kernels,
                                                        const BiasGradientCall& call,
                                                        const DeviceInfo& device) {
  const AttentionProblem& problem = *call.problem;
  const TileKernel& kernel = kernels.bias_gradient;
  const BiasForm& bias = *problem.terms.bias;
  TermQueryGradientParams params = QueryGradientParams(call);
  params.dbias = call.dbias;
  const ForwardCall view = QueryView(call);
  const int64_t heads = bias.per_head ? problem.num_heads : 1;
  const int64_t batch = bias.per_batch ? problem.batch : 1;
  // Splits of a tile's keys have separate elements, so nothing is combined.
  ForwardTileShape shape;
  shape.q_rows = kernel.tile_rows;
  shape.keys = kernel.tile_keys;
  shape.blocks_per_tile = heads * batch;
  shape.target_blocks = int64_t{device.sm_count} * kernel.blocks_per_sm;
  ForwardPlan plan = PlanForwardTiles(view, shape);
  std::vector<TermRange> ranges = TermRangesOf(view, plan);
  return std::make_unique<TermCall<TermQueryGradientParams, ForwardPlan>>(
      family, kernel, problem, params, std::move(plan), std::move(ranges), heads, batch);
}

}  // namespace ringattn::worker::cuda::simt
