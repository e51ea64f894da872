// What the host hands to the sm_90a backward kernels. Plain structures; no CUDA headers.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_PARAMS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_PARAMS_H_

#include <cstdint>

#include "worker/kernels/cuda/plan/attention_params.h"
#include "worker/kernels/cuda/sm90/forward/forward_params.h"

namespace ringattn::worker::cuda::sm90 {

// The rows of one piece of q, which end with the piece: what follows reads as zero, and sums
// that would go there are dropped.
struct QueryMaps {
  TensorMap q;     // [batch, q_rows, num_heads, head_dim]; box: 64 columns of a tile's rows
  TensorMap dout;  // like q, of head_dim_v
  TensorMap dq;    // fp32, like q; box: 32 columns of kStagedRows rows
};

// The same of the keys of one piece of one block, beside its SpanMaps.
struct SumMaps {
  TensorMap dk;  // fp32, like k; boxes as dq's
  TensorMap dv;
};

inline constexpr int kStagedRows = 64;

// Thread blocks, or clusters of them, are items of work in order of blockIdx.x. Packs of
// heads_per_block heads (of all batch rows) are cut into sections; within a section the tiles come
// in the table's order (longest first), each for all packs of the section.
struct BackwardKernelParams {
  CommonParams common;
  const BackwardTile* tiles = nullptr;    // device
  const QRange* ranges = nullptr;         // device
  const QueryMaps* query_maps = nullptr;  // device; QRange::piece counts in it
  const SpanMaps* key_maps = nullptr;     // device; BackwardTile::piece counts in it
  const SumMaps* sum_maps = nullptr;      // device; likewise
  const float* lse = nullptr;
  const float* delta = nullptr;
  int32_t heads_per_block = 1;  // query heads of one group that one thread block sums
  int32_t tile_count = 0;
  int32_t packs = 0;  // of heads, times batch
  int32_t section_packs = 1;
};

// Of a range of an ordered backward (ordered_backward.h): who adds to its q tiles before.
struct QTurn {
  // What the tiles' counters read when it is the range's turn: 1 + the number of the key tile that
  // added last, where those come in the table's order, or in the opposite one; 0: nobody did.
  int32_t after = 0;
  int32_t after_turned = 0;
  int32_t first_tile = 0;  // the range's first q tile, counted through q's pieces
};

// That a key tile comes to a q tile, where some pairs of tiles are empty (terms_params.h).
struct QVisit {
  int32_t pair = 0;
  int32_t number = 0;  // of the key tile
};

// Counters are 0 when the kernel starts; each consumer group has its own.
struct TurnParams {
  const QTurn* ranges = nullptr;  // device; beside BackwardKernelParams::ranges
  uint32_t* tickets = nullptr;    // device; how many thread blocks have taken an item
  int32_t* queries = nullptr;     // device, [batch, num_heads, query_tiles, 2]; as QTurn has them
  // device, [batch, num_kv_heads, tile_count, 2]; how many packs have added
  int32_t* keys = nullptr;
  int32_t query_tiles = 0;
  int32_t turned_sections = 0;  // the first so many take the table's tiles from its end

  // With segment ids or a mask: those that come to each q tile, in the table's order, and what
  // sm90_pair_turns makes of them once it is known which pairs are empty.
  const int32_t* visit_begins = nullptr;  // device, [query_tiles + 1]
  const QVisit* visits = nullptr;         // device
  int32_t* pair_turns =
      nullptr;  // device, [batch, turn_heads, pairs, 2]: as QTurn's; null: as that
  int32_t turn_heads = 1;
};

struct OrderedBackwardKernelParams : BackwardKernelParams {
  TurnParams turns;
};

// One kernel of the family in its two dtypes.
struct BackwardKernel {
  const void* bf16 = nullptr;
  const void* fp16 = nullptr;
  int32_t tile_rows = 0;
  int32_t block_keys = 0;  // of a thread block
  int32_t blocks = 1;      // of a cluster, that share an item: each has block_keys of its keys
  int32_t threads = 0;
  int32_t shared_bytes = 0;

  int32_t tile_keys() const { return blocks * block_keys; }  // of an item
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_PARAMS_H_
