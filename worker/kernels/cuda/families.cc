// The families in order of preference. A new one takes its place here and nowhere else.
#include "worker/kernels/cuda/choose.h"
#include "worker/kernels/cuda/simt/family.h"
#include "worker/kernels/cuda/sm80/family.h"

namespace ringattn::worker::cuda {

const std::vector<KernelFamily>& Families() {
  static const auto* const families = new std::vector<KernelFamily>{
      sm80::Family(),
      simt::Family(),
  };
  return *families;
}

}  // namespace ringattn::worker::cuda
