// Parameters of the sm_90a backward kernels. Plain structures; no CUDA headers.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_PARAMS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_PARAMS_H_

#include <cstdint>

#include "worker/kernels/cuda/plan/attention_params.h"
#include "worker/kernels/cuda/sm90/forward/forward_params.h"

namespace ringattn::worker::cuda::sm90 {

// Tensor maps of the rows of one piece of q. They end with the piece: later rows read as zero, and
// sums for them are dropped.
struct QueryMaps {
  TensorMap q;     // [batch, q_rows, num_heads, head_dim]; box: 64 columns of a tile's rows
  TensorMap dout;  // like q, of head_dim_v
  TensorMap dq;    // fp32, like q; box: 32 columns of kStagedRows rows
};

// Tensor maps of the key gradients of one piece of one block, in addition to its SpanMaps.
struct SumMaps {
  TensorMap dk;  // fp32, like k; boxes as dq's
  TensorMap dv;
};

inline constexpr int kStagedRows = 64;

// Thread blocks, or clusters of them, are work items in the order of blockIdx.x. Packs of
// heads_per_block heads (of all batch rows) are divided into sections. Within a section the tiles
// follow the table's order (longest first), each for all packs of the section.
struct BackwardKernelParams {
  CommonParams common;
  const BackwardTile* tiles = nullptr;    // device
  const QRange* ranges = nullptr;         // device
  const QueryMaps* query_maps = nullptr;  // device; indexed by QRange::piece
  const SpanMaps* key_maps = nullptr;     // device; indexed by BackwardTile::piece
  const SumMaps* sum_maps = nullptr;      // device; indexed by BackwardTile::piece
  const float* lse = nullptr;
  const float* delta = nullptr;
  int32_t heads_per_block = 1;  // query heads of one group that one thread block sums
  int32_t tile_count = 0;
  int32_t packs = 0;  // of heads, times batch
  int32_t section_packs = 1;
};

// For a range of an ordered backward (ordered_backward.h): the key tiles that add to its q tiles
// before it.
struct QTurn {
  // Value of the tiles' counters when the range may add: 1 + the number of the key tile that adds
  // before it, in the table's order or in the opposite one; 0: no tile does.
  int32_t after = 0;
  int32_t after_turned = 0;
  int32_t first_tile = 0;  // the range's first q tile, counted over q's pieces
};

// A visit of a key tile to a q tile, for calls in which some pairs of tiles are empty
// (terms_params.h).
struct QVisit {
  int32_t pair = 0;
  int32_t number = 0;  // of the key tile
};

// Counters are 0 when the kernel starts; each consumer group has a separate set.
struct TurnParams {
  const QTurn* ranges = nullptr;  // device; parallel to BackwardKernelParams::ranges
  uint32_t* tickets = nullptr;    // device; number of thread blocks that have taken an item
  int32_t* queries = nullptr;     // device, [batch, num_heads, query_tiles, 2]; values as in QTurn
  // device, [batch, num_kv_heads, tile_count, 2]; number of packs that have added
  int32_t* keys = nullptr;
  int32_t query_tiles = 0;
  int32_t turned_sections = 0;  // this many first sections take the table's tiles from its end

  // With segment ids or a mask: the visits of each q tile, in the table's order, and the turns that
  // sm90_pair_turns computes from them once the empty pairs are known.
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
  int32_t blocks = 1;      // of a cluster that share an item; each has block_keys of the item's
                           // keys
  int32_t threads = 0;
  int32_t shared_bytes = 0;

  int32_t tile_keys() const { return blocks * block_keys; }  // of an item
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_BACKWARD_BACKWARD_PARAMS_H_
