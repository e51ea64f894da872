// Prepares forward calls in e4m3: a launch rounds q, k and v into scratch memory, then runs the
// kernel of forward_float8.cu on the copies.
//
// Tables: the work counters, tiles, key ranges, combine tiles, tensor maps of the copies, and the
// table of the rounding kernel's blocks. A prepared call runs on one stream at a time.
//
// Thread-safe: no shared state.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_FLOAT8_FORWARD_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_FLOAT8_FORWARD_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/launch/family.h"
#include "worker/kernels/cuda/launch/split_keys.h"
#include "worker/kernels/cuda/plan/tile_plan.h"
#include "worker/kernels/cuda/sm90/float8/float8_kernels.h"

namespace ringattn::worker::cuda::sm90 {

// Serves 16-bit tensors with head dims that are multiples of 8 up to 128, on compute capability
// 9.0.
bool ServesFloat8Forward(const AttentionProblem& problem, const DeviceInfo& device);

std::vector<KernelEntry> Float8ForwardEntries();

class PreparedFloat8Forward : public PreparedKernel {
 public:
  // REQUIRES: ServesFloat8Forward, and TakesForward (forward.h).
  static absl::StatusOr<std::unique_ptr<PreparedFloat8Forward>> Create(const ForwardCall& call,
                                                                       const DeviceInfo& device,
                                                                       const KernelTuning& tuning);

  absl::Status PlaceScratch(void* scratch) override;
  void WriteTables(void* target) const override;
  void DropTables() override;
  absl::Status Launch(const TableLaunch& launch) const override;

 private:
  // The copies of a block, as byte offsets in the scratch, and its pieces.
  struct Block {
    std::vector<Piece> pieces;
    int64_t rows = 0;
    int64_t k = 0;           // offsets in the scratch, bytes
    std::vector<int64_t> v;  // by piece
  };

  explicit PreparedFloat8Forward(const ForwardCall& call, const DeviceInfo& device,
                                 const KernelTuning& tuning);
  void LayOutScratch(const ForwardCall& call);
  void AddTiles(const void* source, int64_t target, int64_t rows, const std::vector<Piece>& pieces,
                Float8Kind kind, int64_t pitch);

  const int32_t columns_;  // of the kernel: the rows of a tile of v's copy
  const ForwardKernel kernel_;
  const DType dtype_;
  ForwardKernelParams params_;  // without tables, partials and q's map
  Float8RoundingParams rounding_;
  ForwardPlan plan_;
  std::vector<SpanMaps> maps_;
  std::vector<Float8Tile> float8_tiles_;
  std::vector<Block> blocks_;
  int32_t grid_ = 0;
  int32_t rounded_tiles_ = 0;
  int32_t keyless_tiles_ = 0;
  SplitKeys split_;
  int64_t largest_offset_ = 0;  // in the scratch, bytes
  int64_t largest_bytes_ = 0;
  int64_t q_offset_ = 0;
  int64_t tiles_offset_ = 0;  // in the tables, bytes
  int64_t ranges_offset_ = 0;
  int64_t combines_offset_ = 0;
  int64_t maps_offset_ = 0;
  int64_t float8_tiles_offset_ = 0;
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_FLOAT8_FORWARD_H_
