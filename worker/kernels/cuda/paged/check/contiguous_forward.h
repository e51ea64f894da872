// One causal Forward of n queries over n contiguous keys, by the Hopper family's kernel: the bound
// that a chunked prefill is compared with.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_CONTIGUOUS_FORWARD_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_CONTIGUOUS_FORWARD_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "worker/kernels/cuda/paged/check/device_buffer.h"
#include "worker/kernels/cuda/sm90/forward/forward_params.h"

namespace ringattn::worker::cuda::paged::check {

// bf16, head_dim 128.
class ContiguousForwardRun {
 public:
  // All device memory: q and out [n, num_heads, 128], k and v [n, num_kv_heads, 128], lse
  // [num_heads, n]. The buffers outlive the object.
  ContiguousForwardRun(int64_t n, int32_t num_heads, int32_t num_kv_heads, float softmax_scale,
                       const void* q, const void* k, const void* v, void* out, float* lse,
                       int sm_count);

  // Asynchronous.
  void Launch(cudaStream_t stream) const;

  // Launches, waits, and compares sampled rows of out and lse with fp64. Ends the program if they
  // differ.
  void Verify(cudaStream_t stream) const;

 private:
  // Checks one row and head.
  void VerifyRow(int64_t row, int32_t head) const;

  cuda::sm90::ForwardKernelParams params_;
  cuda::sm90::ForwardKernel kernel_;
  DeviceBuffer tables_;
  int blocks_;
  const void* k_;
  const void* v_;
};

}  // namespace ringattn::worker::cuda::paged::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PAGED_CHECK_CONTIGUOUS_FORWARD_H_
