// Ring shards of the kernel check: the tokens of a rank, and their rows of a tensor. This code is
// independent of common/plan, so that the check can detect an error there. Pure; host memory.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_CHECK_SHARDS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_CHECK_SHARDS_H_

#include <cstdint>
#include <vector>

#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker::cuda::check {

enum class Layout { kContiguous, kZigzag, kStriped };

// The global token indices that a rank holds, in its local order.
struct Shard {
  std::vector<int64_t> tokens;
  std::vector<Piece> pieces;

  int64_t rows() const { return static_cast<int64_t>(tokens.size()); }
};

// Returns one shard for each of `world` ranks. `cu`: first token of each document, then the total.
std::vector<Shard> Cut(Layout layout, int world, const std::vector<int64_t>& cu);

// Gather copies rows `tokens` of a [batch, total, row_bytes] array; Scatter copies them back into
// it.
std::vector<char> Gather(const std::vector<char>& source, int64_t batch, int64_t total,
                         int64_t row_bytes, const std::vector<int64_t>& tokens);
void Scatter(const std::vector<char>& rows, int64_t batch, int64_t total, int64_t row_bytes,
             const std::vector<int64_t>& tokens, std::vector<char>& target);

}  // namespace ringattn::worker::cuda::check

#endif  // RINGATTN_WORKER_KERNELS_CUDA_CHECK_SHARDS_H_
