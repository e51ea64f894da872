// The bias of one sm_90a call on the host: decides whether the copy engine reads it in place or
// from a copy in scratch memory (bias_copy.h), and encodes its tensor map.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_CALL_BIAS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_CALL_BIAS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/attention/dtype.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/sm90/terms/bias_copy.h"
#include "worker/kernels/cuda/sm90/terms/terms_params.h"

namespace ringattn::worker::cuda::sm90 {

// A range of a call with a bias begins at a multiple of this many keys in its piece. The copy
// engine reads columns only from multiples of 16 bytes; other addresses stop the kernel with an
// illegal instruction error.
inline constexpr int32_t kBiasKeyAlign = 8;

// Returns whether the kernels can read a call's bias, if it has one. The bias must be at an address
// that is a multiple of 16, or be copied. The pieces of its keys must begin at columns that are
// multiples of 16 bytes. If a bias or a mask is sharded by keys, positions must be consecutive. The
// columns and rows of a range are then consecutive, as they are for a bias sharded by queries.
// REQUIRES: OneStride (span_maps.h) holds for the call.
bool TakesBias(const AttentionProblem& problem, const TermOperands& operands,
               const std::vector<KvBlock>& blocks, int32_t stride);

// Returns whether the bias's rows, and the keys' pieces in them, begin at multiples of 16 bytes.
// The copy engine then reads the bias in place, and tiles of its gradient are whole vectors.
// REQUIRES: the problem has a bias.
bool BiasInVectors(const AttentionProblem& problem, const std::vector<KvBlock>& blocks,
                   int32_t stride);

// A value type. Without Init it represents a call without a bias. Const methods may run
// concurrently.
class CallBias {
 public:
  // `stride`: of positions, in q and in all blocks. Returns RESOURCE_EXHAUSTED for more rows or
  // columns than the copy engine can count.
  absl::Status Init(const AttentionProblem& problem, const TermOperands& operands, int64_t q_rows,
                    const std::vector<KvBlock>& blocks, int32_t stride);

  // Bytes of the copy, a multiple of 256; 0 without a copy.
  int64_t scratch_bytes() const { return scratch_bytes_; }

  // Copies the bias to `scratch` (device, 256-byte aligned) on `stream` if a copy is needed. Fills
  // `target` for boxes of 128 bytes by `box_rows` rows. Returns INTERNAL with CUDA's text if the
  // driver rejects the map or the launch fails.
  absl::Status Place(void* scratch, int32_t box_rows, cudaStream_t stream, BiasMap& target) const;
  // The mapping from the bias's columns to the copy's, for tests.
  const BiasCopyParams& copy() const { return copy_; }
  bool copies() const { return scratch_bytes_ > 0; }
  int32_t element_bytes() const { return static_cast<int32_t>(ElementBytes(dtype_)); }

 private:
  DType dtype_ = DType::kFloat32;
  const void* bias_ = nullptr;
  int64_t planes_ = 0;
  int64_t rows_ = 0;  // of a plane
  int64_t columns_ = 0;
  int64_t scratch_bytes_ = 0;
  BiasCopyParams copy_;  // without source and target
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_CALL_BIAS_H_
