#include <algorithm>
#include <limits>

#include "common/attention/dtype.h"
#include "worker/kernels/cuda/cuda_kernels.h"
#include "worker/kernels/cuda/launch.h"
#include "worker/kernels/cuda/zero_rows.h"

namespace ringattn::worker::cuda {
namespace {

class ZeroRowsKernel : public PreparedKernel {
 public:
  explicit ZeroRowsKernel(const ZeroRowsParams& params)
      : PreparedKernel(std::string_view()), params_(params) {}

  void WriteTables(void*) const override {}
  void DropTables() override {}
  absl::Status Launch(const TableLaunch& launch) const override {
    return ToStatus(LaunchZeroRows(params_, launch.stream), "zero rows launch");
  }

 private:
  const ZeroRowsParams params_;
};

}  // namespace

std::unique_ptr<PreparedKernel> PrepareZero(const ZeroCall& call,
                                            const std::vector<const BiasGradientCall*>& behind) {
  const std::vector<StoredRows> stored = StoredRowsOf(behind);
  if (stored.empty()) return nullptr;
  const AttentionProblem& problem = *behind.front()->problem;
  const BiasForm& form = *problem.terms.bias;
  ZeroRowsParams params;
  params.target = static_cast<char*>(call.target);
  params.planes = (form.per_batch ? problem.batch : 1) * (form.per_head ? problem.num_heads : 1);
  params.rows = behind.front()->q_rows;
  params.columns = problem.terms.columns;
  params.element_bytes =
      static_cast<int32_t>(ElementBytes(form.float32 ? DType::kFloat32 : problem.dtype));
  if (params.planes * params.rows * params.columns * params.element_bytes != call.bytes ||
      params.planes * params.rows > std::numeric_limits<int32_t>::max()) {
    return nullptr;
  }
  params.count = static_cast<int32_t>(std::min<size_t>(stored.size(), kMostStoredRows));
  std::copy_n(stored.begin(), params.count, params.stored);
  return std::make_unique<ZeroRowsKernel>(params);
}

}  // namespace ringattn::worker::cuda
