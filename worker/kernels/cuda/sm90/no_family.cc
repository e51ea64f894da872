// In the place of family.cc where the architectures lack Hopper.
#include "worker/kernels/cuda/sm90/family.h"

namespace ringattn::worker::cuda::sm90 {

std::optional<KernelFamily> Family() { return std::nullopt; }

}  // namespace ringattn::worker::cuda::sm90
