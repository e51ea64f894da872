#include <algorithm>
#include <limits>
#include <optional>

#include "worker/kernels/cuda/cuda_kernels.h"
#include "worker/kernels/cuda/launch/launch.h"
#include "worker/kernels/cuda/plan/stored_rows.h"
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
  const std::optional<PartlyStored> partly = PartlyStoredOf(call, behind);
  if (!partly.has_value() || partly->planes * partly->rows > std::numeric_limits<int32_t>::max()) {
    return nullptr;
  }
  ZeroRowsParams params;
  params.target = static_cast<char*>(call.target);
  params.planes = partly->planes;
  params.rows = partly->rows;
  params.columns = partly->columns;
  params.element_bytes = static_cast<int32_t>(partly->element_bytes);
  params.count = static_cast<int32_t>(std::min<size_t>(partly->stored.size(), kMostStoredRows));
  std::copy_n(partly->stored.begin(), params.count, params.stored);
  return std::make_unique<ZeroRowsKernel>(params);
}

}  // namespace ringattn::worker::cuda
