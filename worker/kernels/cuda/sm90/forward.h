// The sm_90a forward family, from a call to a launch. cuda_kernels.cc asks ServesForward
// and leaves the rest to the portable family.
//
// Tables, as WriteTables lays them out: work counters (zeroed; a launch leaves them zeroed),
// tiles, key ranges, combine tiles, tensor maps. The kernel writes the counters, so a
// prepared call runs on one stream at a time.
//
// Thread-safe: there is no shared state.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/sm90/forward_params.h"
#include "worker/kernels/cuda/tile_plan.h"

namespace ringattn::cuda {

struct DeviceInfo;
struct ForwardTuning;
struct TableLaunch;

namespace sm90 {

// 16-bit tensors on a device of compute capability 9.0 whose rows and addresses the copy
// engine can take: head_dim and head_dim_v multiples of 8, one of them above 32 (below, the
// tensor cores would mostly multiply padding); all pieces of one stride.
bool ServesForward(const ForwardCall& call, const DeviceInfo& device);

// Addresses of all kernels of the family, for loading them early.
std::vector<const void*> ForwardEntries();

class PreparedForward {
 public:
  // False for calls that have nothing to write.
  bool has_work() const { return params_.tiles + keyless_tiles_ > 0 && params_.heads > 0; }
  int64_t table_bytes() const { return table_bytes_; }
  int64_t scratch_bytes() const { return scratch_bytes_; }
  void WriteTables(void* target) const;
  // Frees the host's copy: afterwards only Launch may be called.
  void DropTables() {
    plan_ = {};
    maps_ = {};
  }
  absl::Status Launch(const TableLaunch& launch) const;

 private:
  friend absl::StatusOr<PreparedForward> PrepareForward(const ForwardCall&, const DeviceInfo&,
                                                        const ForwardTuning&);
  ForwardKernel kernel_;
  DType dtype_ = DType::kBFloat16;
  ForwardKernelParams params_;  // tables and partials unset
  ForwardPlan plan_;
  std::vector<PieceMaps> maps_;
  int32_t blocks_ = 0;
  int32_t keyless_tiles_ = 0;
  int64_t combine_count_ = 0;
  int64_t tiles_offset_ = 0;  // in the tables, bytes
  int64_t ranges_offset_ = 0;
  int64_t combines_offset_ = 0;
  int64_t maps_offset_ = 0;
  int64_t table_bytes_ = 0;
  int64_t partial_floats_ = 0;
  int64_t scratch_bytes_ = 0;
};

// REQUIRES: ServesForward(call, device).
absl::StatusOr<PreparedForward> PrepareForward(const ForwardCall& call, const DeviceInfo& device,
                                               const ForwardTuning& tuning);

}  // namespace sm90
}  // namespace ringattn::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_H_
