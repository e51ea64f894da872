// Replaces family.cc in builds whose architectures do not include Hopper.
#include "worker/kernels/cuda/sm90/family.h"

namespace ringattn::worker::cuda::sm90 {

std::optional<KernelFamily> Family() { return std::nullopt; }

}  // namespace ringattn::worker::cuda::sm90
