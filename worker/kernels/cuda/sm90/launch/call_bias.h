// The bias of one sm_90a call on the host: whether the copy engine can read it as it lies, or a
// copy of it in scratch memory (bias_copy.h), and its tensor map.
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

// Keys at which a range of a call with a bias begins, counted from its piece's first: the copy
// engine reads columns from multiples of 16 bytes alone (else it stops the kernel: illegal
// instruction).
inline constexpr int32_t kBiasKeyAlign = 8;

// Whether a call's bias, if it has one, can be read: from an address that is a multiple of 16, or
// copied; with the pieces of its keys at columns that are multiples of 16 bytes. Where a bias or a
// mask is cut by keys, positions are to be consecutive: columns and rows of a range then are, as
// they are where it is cut by queries. OneStride (span_maps.h) holds for the call.
bool TakesBias(const AttentionProblem& problem, const TermOperands& operands,
               const std::vector<KvBlock>& blocks, int32_t stride);

// Whether the bias's rows, and the keys' pieces in them, begin at multiples of 16 bytes: then the
// copy engine reads it as it lies, and tiles of its gradient are whole vectors.
// REQUIRES: the problem has a bias.
bool BiasInVectors(const AttentionProblem& problem, const std::vector<KvBlock>& blocks,
                   int32_t stride);

// A value; without Init that of a call without a bias. Thread-safe for readers.
class CallBias {
 public:
  // `stride`: of positions, in q and in all blocks. RESOURCE_EXHAUSTED for more rows or columns
  // than the copy engine counts.
  absl::Status Init(const AttentionProblem& problem, const TermOperands& operands, int64_t q_rows,
                    const std::vector<KvBlock>& blocks, int32_t stride);

  // Of the copy, a multiple of 256; 0 where there is none.
  int64_t scratch_bytes() const { return scratch_bytes_; }

  // Copies the bias to `scratch` (device, 256-byte aligned) on `stream`, where that is to be, and
  // fills `target`, for boxes of 128 bytes of `box_rows` rows. INTERNAL with CUDA's text if the
  // driver refuses the map, or the launch fails.
  absl::Status Place(void* scratch, int32_t box_rows, cudaStream_t stream, BiasMap& target) const;
  // How the bias's columns are found in the copy's, for tests.
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
  BiasCopyParams copy_;  // source and target unset
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_CALL_BIAS_H_
