// CpuDevice: host memory, with compute calls run by CpuKernels on a HostQueue. Calls that preempt
// have kernels with separate threads, and the other kernels pause meanwhile.
#ifndef RINGATTN_WORKER_DEVICE_CPU_CPU_DEVICE_H_
#define RINGATTN_WORKER_DEVICE_CPU_CPU_DEVICE_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/base/limits.h"
#include "worker/device/cpu/page_pool.h"
#include "worker/device/device.h"
#include "worker/device/host_queue.h"
#include "worker/kernels/cpu/cpu_kernels.h"
#include "worker/kernels/cpu/workspace/pause.h"

namespace ringattn::worker {

// Thread safe, as Device requires.
class CpuDevice : public Device {
 public:
  // `threads`: compute threads, at least 1. Released memory is kept briefly for later buffers,
  // while all memory stays within `memory_limit_bytes` (page_pool.h).
  CpuDevice(int threads, int64_t memory_limit_bytes);

  absl::StatusOr<std::unique_ptr<DeviceBuffer>> Allocate(int64_t bytes) override;
  std::vector<ServedCalls> served_calls() const override;
  std::vector<std::string> served_options() const override;
  TuningChoices tuning_offer() const override;
  absl::StatusOr<PreparedCalls> Prepare(std::vector<KernelCall> calls) override;
  // With compute threads of its own.
  absl::StatusOr<std::unique_ptr<StepKernels>> MakeStepKernels() override;
  bool pauses() const override { return true; }
  bool preempts() const override { return true; }
  void Preempt(bool active) override {
    active ? pause_.Begin(absl::ToChronoNanoseconds(kLongestPause)) : pause_.End();
  }
  bool waits_for_transfer() const override { return queue_.waiting(); }
  bool is_host_memory() const override { return true; }
  absl::Status CopyFromHost(void* device, const void* host, int64_t bytes) override;
  absl::Status CopyToHost(void* host, const void* device, int64_t bytes) override;
  std::string description() const override;

 private:
  CpuKernels& KernelsOf(const RunControl& control) {
    return control.preempts ? preempting_kernels_ : kernels_;
  }
  absl::Status Run(const KernelCall& call, RunControl* control);
  // Runs a BackwardCall and computes the bias gradient in the same pass.
  absl::Status RunBoth(const KernelCall& backward, const BiasGradientCall& gradient,
                       RunControl* control);
  EventRef StartWork(std::function<absl::Status()> work, std::vector<EventRef> after,
                     RunControl* control);

  const int threads_;
  const std::shared_ptr<PagePool> pool_;
  cpu::Pause pause_;  // of kernels_
  CpuKernels kernels_;
  CpuKernels preempting_kernels_;
  // Last: their threads use the kernels.
  HostQueue queue_;
  HostQueue preempting_queue_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_DEVICE_CPU_CPU_DEVICE_H_
