// Prepares calls with score terms, and deterministic backward calls, for the kernels of
// terms_kernels.h.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SIMT_TERMS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SIMT_TERMS_H_

#include <memory>
#include <string_view>

#include "worker/kernels/cuda/launch/family.h"
#include "worker/kernels/cuda/simt/terms_kernels.h"

namespace ringattn::worker::cuda::simt {

// REQUIRES: `kernels` belong to a class that fits the problem's head dims; `family` is a literal.
std::unique_ptr<PreparedKernel> PrepareTermForward(std::string_view family,
                                                   const TermKernels& kernels,
                                                   const ForwardCall& call,
                                                   const DeviceInfo& device,
                                                   const KernelTuning& tuning);
std::unique_ptr<PreparedKernel> PrepareTermBackward(std::string_view family,
                                                    const TermKernels& kernels,
                                                    const BackwardCall& call);
// REQUIRES: the problem has a bias.
std::unique_ptr<PreparedKernel> PrepareTermBiasGradient(std::string_view family,
                                                        const TermKernels& kernels,
                                                        const BiasGradientCall& call,
                                                        const DeviceInfo& device);

}  // namespace ringattn::worker::cuda::simt

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SIMT_TERMS_H_
