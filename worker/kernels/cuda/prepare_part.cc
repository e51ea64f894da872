#include <cstring>

#include "worker/kernels/cuda/cuda_kernels.h"
#include "worker/kernels/cuda/launch.h"
#include "worker/kernels/cuda/part_rows.h"
#include "worker/kernels/cuda/tables.h"

namespace ringattn::worker::cuda {
namespace {

// The lists of the call are its tables.
class PartRowsKernel : public PreparedKernel {
 public:
  explicit PartRowsKernel(const PartCall& call)
      : PreparedKernel(std::string_view()),
        call_(call),
        heads_offset_(AlignUp(static_cast<int64_t>(call.row_runs.size() * sizeof(RowRun)))) {
    table_bytes_ =
        heads_offset_ + AlignUp(static_cast<int64_t>(call.head_of.size() * sizeof(int32_t)));
    params_.run_count = static_cast<int64_t>(call.row_runs.size());
    params_.whole = static_cast<char*>(call.whole);
    params_.part = static_cast<char*>(call.part);
    params_.whole_lse = call.whole_lse;
    params_.part_lse = call.part_lse;
    params_.outer = call.outer;
    params_.inner_bytes = call.inner_bytes;
    params_.rows = call.rows;
    params_.part_rows = call.part_rows;
    params_.heads = call.heads;
    params_.part_heads = call.part_heads;
    params_.heads_first = call.heads_first;
  }

  void WriteTables(void* target) const override {
    const auto write = [&](const void* list, size_t bytes, int64_t offset) {
      if (bytes > 0) std::memcpy(static_cast<char*>(target) + offset, list, bytes);
    };
    write(call_.row_runs.data(), call_.row_runs.size() * sizeof(RowRun), 0);
    write(call_.head_of.data(), call_.head_of.size() * sizeof(int32_t), heads_offset_);
  }
  void DropTables() override { call_.row_runs = {}, call_.head_of = {}; }

  absl::Status Launch(const TableLaunch& launch) const override {
    if (params_.outer * params_.part_rows * params_.part_heads * params_.inner_bytes == 0) {
      return absl::OkStatus();
    }
    PartRowsParams params = params_;
    params.runs = TableAt<RowRun>(launch.tables, 0);
    params.head_of = TableAt<int32_t>(launch.tables, heads_offset_);
    return ToStatus(LaunchPartRows(call_.kind, params, launch.stream), "part rows launch");
  }

 private:
  PartCall call_;
  const int64_t heads_offset_;
  PartRowsParams params_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PreparedKernel>> PreparePart(const PartCall& call) {
  return std::make_unique<PartRowsKernel>(call);
}

}  // namespace ringattn::worker::cuda
