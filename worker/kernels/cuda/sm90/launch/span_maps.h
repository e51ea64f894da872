// Converts a call's pieces for the family's kernels: encodes the tensor maps of its blocks, and
// checks that the kernels' masks support the pieces. Host code; thread-safe.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_SPAN_MAPS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_SPAN_MAPS_H_

#include <vector>

#include "absl/status/status.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/sm90/backward/backward_params.h"

namespace ringattn::worker::cuda::sm90 {

// Returns whether positions advance by the same step in q and in all blocks. The limits of a row
// are then those of the preceding row plus one.
bool OneStride(const std::vector<Piece>& q_pieces, const std::vector<KvBlock>& blocks);

// Appends the maps of k and v for every piece of every block, in the order of the indices of
// tile_plan.h. The maps of empty pieces, and of blocks without addresses, stay empty. `box_rows`:
// the rows of a key tile. Returns INTERNAL with CUDA's text if the driver rejects a map.
absl::Status MapKeys(const AttentionProblem& problem, const std::vector<KvBlock>& blocks,
                     int32_t box_rows, std::vector<SpanMaps>& maps);

// The same for dk and dv.
absl::Status MapSums(const AttentionProblem& problem, const std::vector<KvBlock>& blocks,
                     std::vector<SumMaps>& maps);

// The same for q, dout and dq of every piece of q, for tiles of `tile_rows` rows.
absl::Status MapQueries(const BackwardCall& call, int32_t tile_rows, std::vector<QueryMaps>& maps);

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_SPAN_MAPS_H_
