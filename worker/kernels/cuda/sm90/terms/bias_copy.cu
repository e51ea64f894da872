#include "worker/kernels/cuda/sm90/terms/bias_copy.h"

#include <algorithm>

namespace ringattn::worker::cuda::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostRowBlocks = 4096;

// Grid: columns of the target, by kThreads; rows, as many at a time.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    sm90_copy_bias(const __grid_constant__ BiasCopyParams params) {
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= int64_t{params.classes} * params.class_columns) return;
  const int64_t from = params.first + column / params.class_columns +
                       params.stride * (column % params.class_columns);
  const Element* source = static_cast<const Element*>(params.source) + from;
  Element* target = static_cast<Element*>(params.target) + column;
  for (int64_t row = blockIdx.y; row < params.rows; row += gridDim.y) {
    target[row * params.pitch] = from < params.end ? source[row * params.columns] : Element{0};
  }
}

}  // namespace

cudaError_t LaunchBiasCopy(const BiasCopyParams& params, int element_bytes, cudaStream_t stream) {
  const int64_t columns = int64_t{params.classes} * params.class_columns;
  if (columns == 0 || params.rows == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((columns + kThreads - 1) / kThreads),
                  static_cast<unsigned>(std::min(params.rows, kMostRowBlocks)));
  void* arguments[] = {const_cast<BiasCopyParams*>(&params)};
  return cudaLaunchKernel(BiasCopyEntry(element_bytes), grid, dim3(kThreads), arguments, 0, stream);
}

const void* BiasCopyEntry(int element_bytes) {
  return element_bytes == 4 ? reinterpret_cast<const void*>(&sm90_copy_bias<uint32_t>)
                            : reinterpret_cast<const void*>(&sm90_copy_bias<uint16_t>);
}

}  // namespace ringattn::worker::cuda::sm90
