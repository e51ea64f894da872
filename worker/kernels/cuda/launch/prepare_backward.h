// Prepares a backward call for a kernel that walks the tables of tile_plan.h: assigns the heads of
// a group to blocks and lays out the tables.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_PREPARE_BACKWARD_H_
#define RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_PREPARE_BACKWARD_H_

#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "worker/kernels/cuda/launch/family.h"
#include "worker/kernels/cuda/plan/tile_kernel.h"

namespace ringattn::worker::cuda {

// REQUIRES: `kernel` computes the call's problem; `family` is a literal. `staged_dq`: the kernel
// adds dq by the copy engine, which needs a tensor map of dq. Returns INTERNAL with CUDA's text if
// the driver rejects the map.
absl::StatusOr<std::unique_ptr<PreparedKernel>> PrepareTiledBackward(std::string_view family,
                                                                     const TileKernel& kernel,
                                                                     bool staged_dq,
                                                                     const BackwardCall& call,
                                                                     const DeviceInfo& device);

// Returns how many query heads of a group one block processes. More heads per block save dk/dv
// traffic. Fewer heads give the scheduler more and shorter blocks; `wanted` is the number of blocks
// to reach. `tiles` is the number of key tiles times batch.
int32_t HeadsPerBlock(int32_t group_size, int64_t num_heads, int64_t tiles, int64_t wanted);

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_PREPARE_BACKWARD_H_
