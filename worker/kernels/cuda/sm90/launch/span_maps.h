// What a call's pieces are to the family's kernels: the tensor maps of its blocks, and which
// pieces the masks can follow. Host side; thread-safe.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_SPAN_MAPS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_SPAN_MAPS_H_

#include <vector>

#include "absl/status/status.h"
#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/sm90/backward/backward_params.h"

namespace ringattn::worker::cuda::sm90 {

// Whether positions advance evenly in q and in all blocks: the limits of a row are then those of
// the row before plus one.
bool OneStride(const std::vector<Piece>& q_pieces, const std::vector<KvBlock>& blocks);

// Appends the maps of k and v of every piece of every block, in the order in which tile_plan.h
// counts them; those of empty pieces, and of blocks without addresses, stay empty. `box_rows`
// are a key tile's. INTERNAL with CUDA's text if the driver refuses one.
absl::Status MapKeys(const AttentionProblem& problem, const std::vector<KvBlock>& blocks,
                     int32_t box_rows, std::vector<SpanMaps>& maps);

// The same of dk and dv.
absl::Status MapSums(const AttentionProblem& problem, const std::vector<KvBlock>& blocks,
                     std::vector<SumMaps>& maps);

// The same of q, dout and dq of every piece of q, for tiles of `tile_rows` rows.
absl::Status MapQueries(const BackwardCall& call, int32_t tile_rows, std::vector<QueryMaps>& maps);

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_LAUNCH_SPAN_MAPS_H_
