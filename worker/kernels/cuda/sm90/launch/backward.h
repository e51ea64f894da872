// Prepares and launches the sm_90a backward.
//
// Tables in the order of WriteTables: tiles, q ranges, tensor maps (of q's pieces, of the blocks'
// pieces and of the pieces' gradients), turns, score terms.
//
// Thread-safe: no shared state.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_BACKWARD_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_BACKWARD_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/launch/family.h"
#include "worker/kernels/cuda/plan/tile_plan.h"
#include "worker/kernels/cuda/sm90/launch/call_bias.h"
#include "worker/kernels/cuda/sm90/launch/call_terms.h"
#include "worker/kernels/cuda/sm90/launch/forward.h"
#include "worker/kernels/cuda/sm90/launch/ordered_backward.h"
#include "worker/kernels/cuda/sm90/terms/terms_params.h"

namespace ringattn::worker::cuda::sm90 {

// As ServesForward (forward.h). A problem with score terms must have no softcap. The ordered
// kernels (ordered_backward.h) serve deterministic problems.
bool ServesBackward(const AttentionProblem& problem, const DeviceInfo& device);

// Returns whether the kernels can take the call's addresses (multiples of 16) and pieces (all of
// one stride).
bool TakesBackward(const BackwardCall& call);

// Returns whether the backward's kernel can also store the gradient of the call's bias at `dbias`,
// all that a BiasGradientCall with the same operands stores. Requires one plane per head and batch
// row, of the call's 16-bit type, in whole vectors.
bool StoresBiasGradient(const BackwardCall& call, const void* dbias);

// All kernels of the backward.
std::vector<KernelEntry> BackwardEntries();

class PreparedBackward : public PreparedKernel {
 public:
  // REQUIRES: ServesBackward and TakesBackward; with a `dbias`, StoresBiasGradient.
  static absl::StatusOr<std::unique_ptr<PreparedBackward>> Create(const BackwardCall& call,
                                                                  const DeviceInfo& device,
                                                                  std::optional<void*> dbias = {});

  // Only copy engines add, and only the kernels with a fixed order and those with terms have
  // scratch memory.
  bool adds_atomically() const override { return scratch_bytes_ == 0; }
  bool stores_key_gradients() const override { return stores_key_gradients_; }
  void WriteTables(void* target) const override;
  void DropTables() override;
  absl::Status Launch(const TableLaunch& launch) const override;

 private:
  explicit PreparedBackward(std::string_view kernel_class) : PreparedKernel(kName, kernel_class) {}
  absl::Status Init(const BackwardCall& call, const DeviceInfo& device, std::optional<void*> dbias);

  BackwardKernel kernel_;
  DType dtype_ = DType::kBFloat16;
  TermBackwardKernelParams params_;  // without tables; plain kernels use a part of it
  CallTerms terms_;
  CallBias bias_;
  CallTurns turns_;
  BackwardPlan plan_;
  std::vector<QueryMaps> query_maps_;
  std::vector<SpanMaps> key_maps_;
  std::vector<SumMaps> sum_maps_;
  int64_t ranges_offset_ = 0;  // in the tables, bytes
  int64_t query_maps_offset_ = 0;
  int64_t key_maps_offset_ = 0;
  int64_t sum_maps_offset_ = 0;
  int64_t turns_offset_ = 0;
  int64_t terms_offset_ = 0;
  int64_t bias_scratch_offset_ = 0;  // in the scratch memory, bytes
  int64_t turns_scratch_offset_ = 0;
  int64_t sorted_scratch_offset_ = 0;
  bool stores_key_gradients_ = false;
  bool sorts_ = false;  // tiles by the work that segment ids leave
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_BACKWARD_H_
