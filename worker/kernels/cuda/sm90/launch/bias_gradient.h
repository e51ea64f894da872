// The sm90 family's gradient of a bias. Its kernel is separate from the backward's. One thread
// computes each element.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_BIAS_GRADIENT_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_BIAS_GRADIENT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/launch/family.h"
#include "worker/kernels/cuda/plan/tile_plan.h"
#include "worker/kernels/cuda/sm90/launch/call_bias.h"
#include "worker/kernels/cuda/sm90/launch/call_terms.h"
#include "worker/kernels/cuda/sm90/launch/forward.h"
#include "worker/kernels/cuda/sm90/terms/bias_gradient_params.h"

namespace ringattn::worker::cuda::sm90 {

// Returns whether the kernel can compute a call of a problem whose backward the family serves.
bool TakesBiasGradient(const BiasGradientCall& call, const DeviceInfo& device);

// All kernels of the bias gradient.
std::vector<KernelEntry> BiasGradientEntries();

class PreparedBiasGradient : public PreparedKernel {
 public:
  // REQUIRES: ServesBackward and TakesBiasGradient.
  static absl::StatusOr<std::unique_ptr<PreparedBiasGradient>> Create(const BiasGradientCall& call,
                                                                      const DeviceInfo& device);

  bool has_work() const { return blocks_ > 0; }
  void WriteTables(void* target) const override;
  void DropTables() override {
    plan_ = {};
    maps_ = {};
    terms_.DropTables();
  }
  absl::Status Launch(const TableLaunch& launch) const override;

 private:
  PreparedBiasGradient() : PreparedKernel(kName, kTermKernelClass) {}
  absl::Status Init(const BiasGradientCall& call, const DeviceInfo& device);

  ForwardKernel kernel_;
  DType dtype_ = DType::kBFloat16;
  BiasGradientKernelParams params_;  // without tables
  CallTerms terms_;
  CallBias bias_;
  ForwardPlan plan_;
  std::vector<SpanMaps> maps_;
  int64_t blocks_ = 0;
  int64_t ranges_offset_ = 0;  // in the tables, bytes
  int64_t maps_offset_ = 0;
  int64_t terms_offset_ = 0;
  int64_t bias_scratch_offset_ = 0;  // in the scratch memory, bytes
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_BIAS_GRADIENT_H_
