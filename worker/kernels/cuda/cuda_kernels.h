// The CUDA back end of worker/kernels/attention_kernel.h: path check ->
// configuration -> launch. The Prepare functions choose the kernel and lay out
// the tile tables (host arithmetic only); Start enqueues. The one place that
// says which kernel serves which request is ChooseForward/ChooseBackward in
// cuda_kernels.cc.
//
//   auto forward = PrepareForward(call, device);
//   forward->device_bytes(), forward->staging_bytes()   // workspace it needs
//   forward->Start(context);                            // asynchronous
//
// Or, where the same call runs in a ring pass, with its tables on the device already:
//
//   forward->WriteTables(host);                         // table_bytes(), copied by the caller
//   forward->DropTables();
//   forward->Launch({stream, tables, scratch, stop_word});
//
// Start never allocates device or pinned memory and never waits: it fills
// `staging`, enqueues its copy to `workspace`, then the kernels. Both buffers
// belong to the call until the work enqueued here has run. The current device
// must be the one that `stream` belongs to. Tensors are memory of that device;
// base pointers are aligned to 16 bytes, or lie a whole number of rows behind
// such an address. Accumulators (out_acc, dq_acc, dk, dv) are fp32.
//
// Sums across thread blocks (dq_acc, and dk and dv when the heads of a group are
// spread over blocks) use fp32 reductions in memory: their order, hence the last
// bits, may differ from run to run. The forward is deterministic.
//
// Errors: INVALID_ARGUMENT for a problem outside attention_kernel.h's limits,
// RESOURCE_EXHAUSTED when the workspace is too small, INTERNAL with CUDA's text
// when a launch fails. Thread-safe: there is no shared state.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CUDA_KERNELS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/attention_params.h"
#include "worker/kernels/cuda/sm90/forward.h"
#include "worker/kernels/cuda/tile_plan.h"

namespace ringattn::cuda {

// What the choice of a kernel depends on. Tests lower shared_bytes_per_block to
// reach the paths of smaller devices.
struct DeviceInfo {
  int sm_count = 0;
  int compute_major = 0;
  int shared_bytes_per_block = 0;  // the opt-in maximum
};
absl::StatusOr<DeviceInfo> QueryDevice(int device);

// Loads every kernel onto the current device: some seconds. CUDA would do so at a kernel's
// first launch, and may wait then for work of the device that waits for that launch.
absl::Status LoadKernels();

struct LaunchContext {
  cudaStream_t stream = nullptr;
  void* workspace = nullptr;  // device, 256-byte aligned
  int64_t workspace_bytes = 0;
  void* staging = nullptr;  // pinned host
  int64_t staging_bytes = 0;
  // Device-visible (device or mapped pinned) word, may be null. Thread blocks
  // that start while it is nonzero do nothing; outputs are then unspecified.
  const uint32_t* stop_word = nullptr;
};

// Forward options that a caller may force; 0 = chosen here.
struct ForwardTuning {
  int32_t max_key_splits = 0;  // 1 = never split the keys
  int64_t long_keys = 0;  // sm_90: keys per q tile from which the kernel for long ranges serves
};

// Launches with tables that are on the device already.
struct TableLaunch {
  cudaStream_t stream = nullptr;
  const void* tables = nullptr;  // device, as WriteTables wrote them, 256-byte aligned
  void* scratch = nullptr;       // device, 256-byte aligned, in use until the work has run
  const uint32_t* stop_word = nullptr;  // as in LaunchContext
};

class PreparedForward {
 public:
  int64_t device_bytes() const { return table_bytes_ + scratch_bytes_; }
  int64_t staging_bytes() const { return table_bytes_; }
  absl::Status Start(const LaunchContext& context) const;

  bool uses_sm90() const { return sm90_.has_value(); }
  int64_t table_bytes() const { return table_bytes_; }
  int64_t scratch_bytes() const { return scratch_bytes_; }
  void WriteTables(void* target) const;
  // Frees the host's copy: afterwards only Launch may be called.
  void DropTables() {
    plan_ = {};
    if (sm90_) sm90_->DropTables();
  }
  absl::Status Launch(const TableLaunch& launch) const;

 private:
  friend absl::StatusOr<PreparedForward> PrepareForward(const ForwardCall&, const DeviceInfo&,
                                                        const ForwardTuning&);
  DType dtype_ = DType::kFloat32;
  TileKernel kernel_;
  ForwardParams params_;  // tables and partials unset
  ForwardPlan plan_;
  int64_t tile_count_ = 0;
  int64_t combine_count_ = 0;
  int64_t ranges_offset_ = 0;  // in the tables, bytes
  int64_t combines_offset_ = 0;
  int64_t table_bytes_ = 0;
  int64_t partial_floats_ = 0;
  int64_t scratch_bytes_ = 0;
  std::optional<sm90::PreparedForward> sm90_;  // then it has the tables and the launch
};

// The call's problem and pointers are copied; the call itself need not outlive this.
absl::StatusOr<PreparedForward> PrepareForward(const ForwardCall& call, const DeviceInfo& device,
                                               const ForwardTuning& tuning = {});

class PreparedBackward {
 public:
  int64_t device_bytes() const { return table_bytes_; }
  int64_t staging_bytes() const { return table_bytes_; }
  absl::Status Start(const LaunchContext& context) const;

  int64_t table_bytes() const { return table_bytes_; }
  void WriteTables(void* target) const;
  void DropTables() { plan_ = {}; }
  absl::Status Launch(const TableLaunch& launch) const;

 private:
  friend absl::StatusOr<PreparedBackward> PrepareBackward(const BackwardCall&, const DeviceInfo&);
  DType dtype_ = DType::kFloat32;
  TileKernel kernel_;
  BackwardParams params_;
  BackwardPlan plan_;
  int64_t tile_count_ = 0;
  int64_t ranges_offset_ = 0;  // in the tables, bytes
  int64_t table_bytes_ = 0;
};

absl::StatusOr<PreparedBackward> PrepareBackward(const BackwardCall& call,
                                                 const DeviceInfo& device);

// The calls that need no preparation.
absl::Status StartDelta(const DeltaCall& call, cudaStream_t stream);
absl::Status StartZero(const ZeroCall& call, cudaStream_t stream);
absl::Status StartAdd(const AddCall& call, cudaStream_t stream);
absl::Status StartConvert(const ConvertCall& call, cudaStream_t stream);

}  // namespace ringattn::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CUDA_KERNELS_H_
