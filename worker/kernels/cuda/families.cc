// The families in order of preference. A new family is added here and nowhere else.
#include "worker/kernels/cuda/choose.h"
#include "worker/kernels/cuda/simt/family.h"
#include "worker/kernels/cuda/sm80/family.h"
#include "worker/kernels/cuda/sm90/family.h"

namespace ringattn::worker::cuda {

const std::vector<KernelFamily>& Families() {
  static const auto* const families = [] {
    auto* all = new std::vector<KernelFamily>;
    if (const auto hopper = sm90::Family()) all->push_back(*hopper);
    all->push_back(sm80::Family());
    all->push_back(simt::Family());
    return all;
  }();
  return *families;
}

}  // namespace ringattn::worker::cuda
