// CpuKernels: every KernelCall on the processor's cores.
//
//   CpuKernels kernels(/*threads=*/4);
//   absl::Status status = kernels.Run(call, stop, &tiles_done);
//
// Tests: cpu_kernels_test.cc, cpu_kernels_robustness_test.cc, cpu_kernels_wide_test.cc
// Tests: by_keys_test.cc
#ifndef RINGATTN_WORKER_KERNELS_CPU_CPU_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_CPU_CPU_KERNELS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker {

namespace cpu {
class Pause;
struct Workspace;
}  // namespace cpu

// Run is called by one thread at a time. Results have the same bits for any number of threads; they
// may differ between processors (SIMD widths).
class CpuKernels {
 public:
  // Compute threads, the calling one included, which live as long as the object. They hold between
  // two tiles while `pause` (may be null) is active.
  // REQUIRES: threads >= 1; `pause` outlives the object.
  explicit CpuKernels(int threads, cpu::Pause* pause = nullptr);
  ~CpuKernels();
  CpuKernels(const CpuKernels&) = delete;
  CpuKernels& operator=(const CpuKernels&) = delete;

  // The instruction set that products of this type run on: "AVX3", "AVX512_BF16". Static text.
  static std::string_view InstructionsFor(DType dtype);

  // Runs `call`, whose pointers are host memory, to its end. Working memory is
  // kept and grows only when a call needs more than any before it.
  // `stop` is read at least once per tile: once true, returns CANCELLED at the
  // next tile and the call's outputs are undefined. `tiles_done`, if not null, is
  // incremented once per computed tile, and `work_done` grows by what the tile's visible
  // pairs cost (worker/kernels/work.h), over a call by exactly what all of them do.
  absl::Status Run(const KernelCall& call, const std::atomic<bool>& stop,
                   std::atomic<int64_t>* tiles_done, std::atomic<int64_t>* work_done = nullptr);
  // Both calls, at once where HasBothAtOnce: much sooner than one after the other.
  absl::Status RunGradients(const BackwardCall& backward, const BiasGradientCall& bias_gradient,
                            const std::atomic<bool>& stop, std::atomic<int64_t>* tiles_done,
                            std::atomic<int64_t>* work_done = nullptr);
  static bool HasBothAtOnce(const BackwardCall& backward, const BiasGradientCall& bias_gradient);

 private:
  cpu::Pause* const pause_;
  const std::unique_ptr<cpu::Workspace> workspace_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_CPU_CPU_KERNELS_H_
