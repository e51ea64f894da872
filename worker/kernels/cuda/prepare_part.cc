#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "worker/kernels/cuda/cuda_kernels.h"
#include "worker/kernels/cuda/launch/launch.h"
#include "worker/kernels/cuda/launch/tables.h"
#include "worker/kernels/cuda/part_rows.h"

namespace ringattn::worker::cuda {
namespace {

// The tables are the lists of the call.
class GatherKernel : public PreparedKernel {
 public:
  explicit GatherKernel(const GatherCall& call)
      : PreparedKernel(std::string_view()),
        call_(call),
        heads_offset_(AlignUp(static_cast<int64_t>(call.row_runs.size() * sizeof(RowRun)))) {
    table_bytes_ =
        heads_offset_ + AlignUp(static_cast<int64_t>(call.head_of.size() * sizeof(int32_t)));
    params_.run_count = static_cast<int64_t>(call.row_runs.size());
    params_.whole = static_cast<const char*>(call.whole);
    params_.part = static_cast<char*>(call.part);
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
    GatherParams params = params_;
    params.runs = TableAt<RowRun>(launch.tables, 0);
    params.head_of = TableAt<int32_t>(launch.tables, heads_offset_);
    return ToStatus(LaunchGather(params, launch.stream), "gather launch");
  }

 private:
  GatherCall call_;
  const int64_t heads_offset_;
  GatherParams params_;
};

uint64_t AddressOf(const void* address) { return reinterpret_cast<uintptr_t>(address); }

class ScatterKernel : public PreparedKernel {
 public:
  explicit ScatterKernel(const ScatterCall& call) : PreparedKernel(std::string_view()) {
    std::vector<std::vector<ScatterHead>> heads(call.heads);
    for (size_t p = 0; p < call.parts.size(); ++p) {
      const ScatterPart& part = call.parts[p];
      parts_.push_back({part.values, part.lse, part.rows, static_cast<int64_t>(part.head_of.size()),
                        static_cast<int64_t>(runs_.size()),
                        static_cast<int64_t>(part.row_runs.size())});
      runs_.insert(runs_.end(), part.row_runs.begin(), part.row_runs.end());
      for (size_t h = 0; h < part.head_of.size(); ++h) {
        heads[part.head_of[h]].push_back({static_cast<int32_t>(p), static_cast<int32_t>(h)});
      }
    }
    for (const std::vector<ScatterHead>& of_one : heads) {
      heads_begin_.push_back(static_cast<int32_t>(heads_of_.size()));
      heads_of_.insert(heads_of_.end(), of_one.begin(), of_one.end());
    }
    heads_begin_.push_back(static_cast<int32_t>(heads_of_.size()));
    params_.runs_offset = TableBytes(parts_);
    params_.begin_offset = params_.runs_offset + TableBytes(runs_);
    params_.heads_offset = params_.begin_offset + TableBytes(heads_begin_);
    params_.table_bytes = table_bytes_ = params_.heads_offset + TableBytes(heads_of_);
    params_.merges = call.merges;
    params_.heads_first = call.heads_first;
    params_.initial = call.initial;
    params_.final = call.final;
    params_.dtype = call.dtype;
    params_.outer = call.outer;
    params_.rows = call.rows;
    params_.heads = call.heads;
    params_.width = call.width;
    params_.values = call.values;
    params_.result = call.result;
    params_.lse = call.lse;
    params_.sinks = call.final ? call.sinks : nullptr;
    auto bits = static_cast<uint64_t>(call.width) * 4 | AddressOf(call.values) |
                AddressOf(call.result) * (4 / ElementBytes(call.dtype));
    for (const ScatterPart& part : call.parts) bits |= AddressOf(part.values);
    params_.fours = bits % 16 == 0;
  }

  void WriteTables(void* target) const override {
    WriteTable(parts_, target, 0);
    WriteTable(runs_, target, params_.runs_offset);
    WriteTable(heads_begin_, target, params_.begin_offset);
    WriteTable(heads_of_, target, params_.heads_offset);
  }
  void DropTables() override {
    parts_ = {};
    runs_ = {};
    heads_begin_ = {};
    heads_of_ = {};
  }

  absl::Status Launch(const TableLaunch& launch) const override {
    if (params_.outer * params_.rows * params_.heads * params_.width == 0) return absl::OkStatus();
    ScatterParams params = params_;
    params.tables = TableAt<char>(launch.tables, 0);
    return ToStatus(LaunchScatter(params, launch.stream), "scatter launch");
  }

 private:
  std::vector<ScatterSource> parts_;
  std::vector<RowRun> runs_;
  std::vector<int32_t> heads_begin_;
  std::vector<ScatterHead> heads_of_;
  ScatterParams params_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareGather(const GatherCall& call) {
  return std::make_unique<GatherKernel>(call);
}

absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareScatter(const ScatterCall& call) {
  return std::make_unique<ScatterKernel>(call);
}

}  // namespace ringattn::worker::cuda
