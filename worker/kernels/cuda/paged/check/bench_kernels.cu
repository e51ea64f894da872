#include "worker/kernels/cuda/paged/check/bench_kernels.h"

#include "worker/kernels/cuda/sm90/forward/forward_kernels.cuh"

namespace ringattn::worker::cuda::sm90 {
// The shape of d128_long, under another name.
RINGATTN_SM90_FORWARD(paged_bench_d128, 384, 128, 128, 176, true)
}  // namespace ringattn::worker::cuda::sm90

namespace ringattn::worker::cuda::paged::check {
namespace {

__device__ uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

__global__ void paged_bench_fill(__nv_bfloat16* target, int64_t elements, uint64_t seed) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += stride) {
    const uint64_t bits = Mix(seed + static_cast<uint64_t>(i));
    float sum = 0.0f;  // of four uniform numbers
    for (int j = 0; j < 4; ++j) sum += static_cast<float>(bits >> (16 * j) & 0xffff) / 65536.0f;
    target[i] = __float2bfloat16((sum - 2.0f) * 1.7320508f);
  }
}

__device__ uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void paged_bench_pause(uint64_t nanoseconds) {
  const uint64_t begin = Nanoseconds();
  while (Nanoseconds() - begin < nanoseconds) continue;
}

}  // namespace

cudaError_t Pause(uint64_t nanoseconds, cudaStream_t stream) {
  paged_bench_pause<<<1, 1, 0, stream>>>(nanoseconds);
  return cudaGetLastError();
}

cudaError_t FillRandom(void* target, int64_t elements, uint64_t seed, cudaStream_t stream) {
  paged_bench_fill<<<2048, 256, 0, stream>>>(static_cast<__nv_bfloat16*>(target), elements, seed);
  return cudaGetLastError();
}

cuda::sm90::ForwardKernel ContiguousForward() {
  return cuda::sm90::ForwardKernel_paged_bench_d128();
}

}  // namespace ringattn::worker::cuda::paged::check
