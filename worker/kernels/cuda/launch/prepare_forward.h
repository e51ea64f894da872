// Prepares a forward call for a kernel that walks the tables of tile_plan.h: packs the heads of a
// group, splits the keys where too few blocks would run, and lays out the tables.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_PREPARE_FORWARD_H_
#define RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_PREPARE_FORWARD_H_

#include <memory>
#include <string_view>

#include "worker/kernels/cuda/launch/family.h"
#include "worker/kernels/cuda/plan/tile_kernel.h"

namespace ringattn::worker::cuda {

// REQUIRES: `kernel` computes the call's problem; `family` is a literal.
std::unique_ptr<PreparedKernel> PrepareTiledForward(std::string_view family,
                                                    const TileKernel& kernel,
                                                    const ForwardCall& call,
                                                    const DeviceInfo& device,
                                                    const KernelTuning& tuning);

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_LAUNCH_PREPARE_FORWARD_H_
