#include "worker/kernels/cpu/cpu_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <variant>

#include "worker/kernels/cpu/backward.h"
#include "worker/kernels/cpu/bias_gradient.h"
#include "worker/kernels/cpu/bias_gradient_rows.h"
#include "worker/kernels/cpu/forward.h"
#include "worker/kernels/cpu/part_rows.h"
#include "worker/kernels/cpu/probabilities.h"
#include "worker/kernels/cpu/simd/elementwise.h"
#include "worker/kernels/cpu/simd/tile_ops.h"
#include "worker/kernels/cpu/wide_rows.h"
#include "worker/kernels/cpu/workspace/workspace.h"

namespace ringattn::worker {
namespace cpu {
namespace {

// Elements or rows that one task of the memory-bound calls handles: large
// against the cost of a task, small against how fast a stop must be seen.
constexpr int64_t kElementsPerTask = int64_t{1} << 18;
constexpr int64_t kRowsPerTask = 256;

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Runs body(begin, end) over [0, count) in parallel.
template <typename Body>
absl::Status ForRanges(int64_t count, int64_t per_task, Workspace& workspace,
                       const Progress& progress, const Body& body) {
  workspace.pool.ParallelFor((count + per_task - 1) / per_task, [&](int, int64_t task) {
    if (progress.stopped()) return;
    body(task * per_task, std::min(count, (task + 1) * per_task));
    progress.CountTile(0);
  });
  return progress.stopped() ? absl::CancelledError("kernel stopped") : absl::OkStatus();
}

absl::Status RunCall(const ForwardCall& call, Workspace& workspace, const Progress& progress) {
  return Forward(call, workspace, progress);
}

absl::Status RunCall(const BackwardCall& call, Workspace& workspace, const Progress& progress) {
  return Backward(call, nullptr, workspace, progress);
}

absl::Status RunCall(const BiasGradientCall& call, Workspace& workspace, const Progress& progress) {
  return BiasGradient(call, workspace, progress);
}

absl::Status RunCall(const ProbabilitiesCall& call, Workspace& workspace,
                     const Progress& progress) {
  return Probabilities(call, workspace, progress);
}

// Finite if the row is: products of bf16 or fp32 need not fit fp32.
float RowDelta(const AttentionProblem& problem, const void* dout, const void* out) {
  const int64_t dim = problem.head_dim_v;
  float a[kMaxHeadDim], b[kMaxHeadDim];
  float delta;
  if (problem.out_dtype() == problem.dtype) {
    delta = Dot(problem.dtype, dout, out, dim);
  } else {
    ConvertToFloat(problem.dtype, dout, a, dim);
    delta = Dot(problem.out_dtype(), a, out, dim);
  }
  if (std::isfinite(delta)) return delta;
  ConvertToFloat(problem.dtype, dout, a, dim);
  ConvertToFloat(problem.out_dtype(), out, b, dim);
  double sum = 0;
  for (int64_t d = 0; d < dim; ++d) sum += static_cast<double>(a[d]) * b[d];
  return std::isfinite(sum) ? Saturate(sum) : delta;
}

absl::Status RunCall(const DeltaCall& call, Workspace& workspace, const Progress& progress) {
  const AttentionProblem& problem = *call.problem;
  const int64_t heads = problem.num_heads;
  const int64_t dim = problem.head_dim_v;
  const int64_t dout_bytes = dim * ElementBytes(problem.dtype);
  const int64_t out_bytes = dim * ElementBytes(problem.out_dtype());
  const int64_t token_elements = heads * problem.head_dim;
  return ForRanges(
      problem.batch * call.q_rows, kRowsPerTask, workspace, progress,
      [&](int64_t begin, int64_t end) {
        if (call.dq_acc != nullptr) {
          std::fill(call.dq_acc + begin * token_elements, call.dq_acc + end * token_elements, 0.0f);
        }
        for (int64_t token = begin; token < end; ++token) {
          const int64_t batch_index = token / call.q_rows;
          const int64_t row = token % call.q_rows;
          for (int64_t h = 0; h < heads; ++h) {
            const int64_t vector = token * heads + h;
            const int64_t at = (batch_index * heads + h) * call.q_rows + row;
            call.delta[at] =
                RowDelta(problem, static_cast<const char*>(call.dout) + vector * dout_bytes,
                         static_cast<const char*>(call.out) + vector * out_bytes);
            if (call.dlse == nullptr) continue;
            const bool sees_none = call.lse[at] == kNegativeInfinity;
            call.delta[at] = sees_none ? 0.0f : call.delta[at] - call.dlse[at];
          }
        }
      });
}

// A head is one task: its sum has one order for any number of threads.
absl::Status RunCall(const SinkGradientCall& call, Workspace& workspace, const Progress& progress) {
  const AttentionProblem& problem = *call.problem;
  return ForRanges(problem.num_heads, 1, workspace, progress, [&](int64_t h, int64_t) {
    double sum = 0;
    for (int64_t b = 0; b < problem.batch && call.sinks[h] != kNegativeInfinity; ++b) {
      const int64_t first = (b * problem.num_heads + h) * call.q_rows;
      for (int64_t at = first; at < first + call.q_rows; ++at) {
        sum += std::exp(double{call.sinks[h]} - call.lse[at]) * call.delta[at];
      }
    }
    call.dsinks[h] = static_cast<float>(-sum);
  });
}

absl::Status RunCall(const ZeroCall& call, Workspace& workspace, const Progress& progress) {
  return ForRanges(
      call.bytes, 4 * kElementsPerTask, workspace, progress, [&](int64_t begin, int64_t end) {
        std::memset(static_cast<char*>(call.target) + begin, 0, static_cast<size_t>(end - begin));
      });
}

absl::Status RunCall(const AddCall& call, Workspace& workspace, const Progress& progress) {
  return ForRanges(call.count, kElementsPerTask, workspace, progress,
                   [&](int64_t begin, int64_t end) {
                     AddScaled(1.0f, call.source + begin, call.target + begin, end - begin);
                   });
}

absl::Status RunCall(const ConvertCall& call, Workspace& workspace, const Progress& progress) {
  return ForRanges(
      call.count, kElementsPerTask, workspace, progress, [&](int64_t begin, int64_t end) {
        Convert(call.dtype, call.source + begin,
                static_cast<char*>(call.target) + begin * ElementBytes(call.dtype), end - begin);
      });
}

// Weights of a row's parts, in order, and what all of them have; `sink` -inf for none.
struct RowMerge {
  float weights[kMaxMergeParts];
  float lse;
};

RowMerge MergeRow(const MergeCall& call, int64_t at, float sink) {
  RowMerge row;
  float max = sink;
  for (const MergePart& part : call.parts) {
    const float lse = part.lse[at];
    if (lse > max || std::isnan(lse)) max = lse;  // a NaN stays
  }
  row.lse = max;
  if (max == kNegativeInfinity) {
    std::fill_n(row.weights, call.parts.size(), 0.0f);
    return row;
  }
  float sum = sink == kNegativeInfinity ? 0.0f : std::exp(sink - max);
  for (size_t i = 0; i < call.parts.size(); ++i) {
    const float lse = call.parts[i].lse[at];
    row.weights[i] = lse == kNegativeInfinity ? 0.0f : std::exp(lse - max);
    sum += row.weights[i];
  }
  row.lse = max + std::log(sum);
  for (size_t i = 0; i < call.parts.size(); ++i) row.weights[i] /= sum;
  return row;
}

absl::Status RunCall(const MergeCall& call, Workspace& workspace, const Progress& progress) {
  const AttentionProblem& problem = *call.problem;
  const int64_t heads = problem.num_heads;
  const int64_t dim = problem.head_dim_v;
  const int64_t out_bytes = dim * ElementBytes(problem.out_dtype());
  const bool has_sinks = call.final && call.sinks != nullptr;
  const auto merge = [&](int64_t token, int64_t h) {
    const int64_t at = (token / call.q_rows * heads + h) * call.q_rows + token % call.q_rows;
    const int64_t vector = token * heads + h;
    const RowMerge row = MergeRow(call, at, has_sinks ? call.sinks[h] : kNegativeInfinity);
    float out[kMaxHeadDim] = {};
    for (size_t i = 0; i < call.parts.size(); ++i) {
      // A row that saw no key has value 0 and weight 0.
      if (call.parts[i].lse[at] == kNegativeInfinity) continue;
      AddScaled(row.weights[i], call.parts[i].out + vector * dim, out, dim);
    }
    call.lse[at] = row.lse;
    if (call.final) {
      Convert(problem.out_dtype(), out, static_cast<char*>(call.out) + vector * out_bytes, dim);
    } else {
      std::copy_n(out, dim, call.out_acc + vector * dim);
    }
  };
  return ForRanges(problem.batch * call.q_rows, kRowsPerTask, workspace, progress,
                   [&](int64_t begin, int64_t end) {
                     for (int64_t token = begin; token < end; ++token) {
                       for (int64_t h = 0; h < heads; ++h) merge(token, h);
                     }
                   });
}

absl::Status RunCall(const CopyCall& call, Workspace& workspace, const Progress& progress) {
  const int64_t per_task =
      std::max<int64_t>(1, 4 * kElementsPerTask / std::max<int64_t>(1, call.run_bytes));
  return ForRanges(call.runs, per_task, workspace, progress, [&](int64_t begin, int64_t end) {
    for (int64_t run = begin; run < end; ++run) {
      std::memcpy(static_cast<char*>(call.target) + run * call.target_pitch,
                  static_cast<const char*>(call.source) + run * call.source_pitch,
                  static_cast<size_t>(call.run_bytes));
    }
  });
}

int64_t RowsPerTask(int64_t row_bytes) {
  return std::max<int64_t>(1, 4 * kElementsPerTask / std::max<int64_t>(1, row_bytes));
}

absl::Status RunCall(const GatherCall& call, Workspace& workspace, const Progress& progress) {
  return ForRanges(call.outer * call.part_rows, RowsPerTask(call.part_heads * call.inner_bytes),
                   workspace, progress,
                   [&](int64_t begin, int64_t end) { GatherRows(call, begin, end); });
}

absl::Status RunCall(const ScatterCall& call, Workspace& workspace, const Progress& progress) {
  return ForRanges(call.outer * call.rows, RowsPerTask(call.heads * call.width * 4), workspace,
                   progress, [&](int64_t begin, int64_t end) { ScatterRows(call, begin, end); });
}

}  // namespace
}  // namespace cpu

CpuKernels::CpuKernels(int threads, cpu::Pause* pause)
    : pause_(pause), workspace_(std::make_unique<cpu::Workspace>(threads)) {}
CpuKernels::~CpuKernels() = default;

std::string_view CpuKernels::InstructionsFor(DType dtype) { return cpu::TileOpsFor(dtype).name; }

absl::Status CpuKernels::Run(const KernelCall& call, const std::atomic<bool>& stop,
                             std::atomic<int64_t>* tiles_done, std::atomic<int64_t>* work_done) {
  const cpu::Progress progress(stop, pause_, tiles_done, work_done);
  return std::visit([&](const auto& typed) { return cpu::RunCall(typed, *workspace_, progress); },
                    call);
}

absl::Status CpuKernels::RunGradients(const BackwardCall& backward,
                                      const BiasGradientCall& bias_gradient,
                                      const std::atomic<bool>& stop,
                                      std::atomic<int64_t>* tiles_done,
                                      std::atomic<int64_t>* work_done) {
  const cpu::Progress progress(stop, pause_, tiles_done, work_done);
  if (HasBothAtOnce(backward, bias_gradient)) {
    return cpu::Backward(backward, bias_gradient.dbias, *workspace_, progress);
  }
  absl::Status status = cpu::Backward(backward, nullptr, *workspace_, progress);
  if (!status.ok()) return status;
  return cpu::BiasGradient(bias_gradient, *workspace_, progress);
}

bool CpuKernels::HasBothAtOnce(const BackwardCall& backward,
                               const BiasGradientCall& bias_gradient) {
  return cpu::BackwardHasBiasGradient(backward, bias_gradient);
}

}  // namespace ringattn::worker
