#include <cassert>
#include <utility>
#include <vector>

#include "worker/kernels/cuda/cuda_kernels.h"
#include "worker/kernels/cuda/launch/launch.h"
#include "worker/kernels/cuda/launch/params_of.h"
#include "worker/kernels/cuda/launch/tables.h"
#include "worker/kernels/cuda/plan/probability_plan.h"
#include "worker/kernels/cuda/plan/term_table.h"
#include "worker/kernels/cuda/probabilities.h"

namespace ringattn::worker::cuda {
namespace {

// Blocks of one key head per SM: enough to balance blocks of different length.
constexpr int64_t kTilesPerSm = 8;

class ProbabilityKernel : public PreparedKernel {
 public:
  // The kernel has simt's name: it computes in fp32 without tensor cores and supports every score
  // term, as that family does.
  ProbabilityKernel(const ProbabilitiesCall& call, const DeviceInfo& device)
      : PreparedKernel("simt", kTermKernelClass),
        initial_(call.initial),
        final_(call.final),
        plan_(PlanProbabilities(call, kTilesPerSm * device.sm_count)),
        slopes_(call.problem->terms.alibi_slopes),
        has_slopes_(!slopes_.empty()),
        tile_pairs_(plan_.tile_pairs),
        tile_count_(static_cast<int64_t>(plan_.tiles.size())),
        rows_offset_(TableBytes(plan_.tiles)),
        slopes_offset_(rows_offset_ + TableBytes(plan_.rows)) {
    table_bytes_ = slopes_offset_ + TableBytes(slopes_);
    params_.common = CommonOf(*call.problem, call.q_rows);
    AllowVectors(call, call.q, nullptr, params_.common);
    assert(!call.problem->terms.by_keys);
    params_.terms = TermsOf(*call.problem, call.terms, call.q_rows);
    params_.q = call.q;
    params_.target = call.target;
    params_.lse = call.lse;
    params_.columns = call.columns;
    params_.row_count = static_cast<int32_t>(plan_.rows.size());
    params_.finished = initial_ && final_;
  }

  void WriteTables(void* target) const override {
    WriteTable(plan_.tiles, target, 0);
    WriteTable(plan_.rows, target, rows_offset_);
    WriteTable(slopes_, target, slopes_offset_);
  }
  void DropTables() override {
    plan_ = {};
    slopes_ = {};
  }

  absl::Status Launch(const TableLaunch& launch) const override {
    const int64_t count = int64_t{params_.row_count} * params_.common.num_heads * params_.columns;
    if (count == 0) return absl::OkStatus();
    ProbabilityParams params = params_;
    params.common.stop_word = launch.stop_word;
    params.tiles = TableAt<ProbabilityTile>(launch.tables, 0);
    params.rows = TableAt<ChosenRowLocation>(launch.tables, rows_offset_);
    params.terms.slopes = has_slopes_ ? TableAt<float>(launch.tables, slopes_offset_) : nullptr;
    cudaError_t error = cudaSuccess;
    if (params.finished) {
      error = cudaMemsetAsync(params.target, 0, count * sizeof(float), launch.stream);
    } else if (initial_) {
      error = LaunchUnseen(params, launch.stream);
    }
    if (error == cudaSuccess && tile_count_ > 0) {
      error = LaunchProbabilityTiles(params, tile_pairs_, tile_count_, launch.stream);
    }
    if (error == cudaSuccess && final_ && !params.finished) {
      error = LaunchWeights(params, launch.stream);
    }
    return ToStatus(error, "probabilities launch");
  }

 private:
  const bool initial_;
  const bool final_;
  ProbabilityPlan plan_;
  std::vector<float> slopes_;
  const bool has_slopes_;
  const int32_t tile_pairs_;
  const int64_t tile_count_;
  const int64_t rows_offset_;  // in the tables, bytes
  const int64_t slopes_offset_;
  ProbabilityParams params_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareProbabilities(const ProbabilitiesCall& call,
                                                                     const DeviceInfo& device) {
  if (absl::Status status = CheckProblem(*call.problem); !status.ok()) return status;
  return std::make_unique<ProbabilityKernel>(call, device);
}

}  // namespace ringattn::worker::cuda
