// Converts pieces and bands to the tile tables that the CUDA kernels walk. The tables list the
// tiles that have work and, for each tile, its ranges with the columns that need no mask. Pure host
// arithmetic; tiles without work never reach the device.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PLAN_TILE_PLAN_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PLAN_TILE_PLAN_H_

#include <cstdint>
#include <vector>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cuda/plan/attention_params.h"

namespace ringattn::worker::cuda {

struct ForwardTileShape {
  int32_t q_rows = 0;  // q rows of one tile (packed heads divide the kernel's rows)
  int32_t keys = 0;    // keys of one tile
  // The plan has at least this many (tile, head) pairs. If there are fewer, it splits the keys of
  // each tile and combines the partials. 0 = never split.
  int64_t target_blocks = 0;
  int64_t blocks_per_tile = 1;  // heads (or packs of heads) times batch
  // How many of these run at a time. 0: unknown.
  int64_t blocks_at_once = 0;
  // Split some tiles if the number of equal tiles leaves the last wave short.
  bool fills_last_wave = false;
  // Ranges begin at multiples of this many keys of their piece, because the copy engine reads the
  // innermost axis in memory only from multiples of 16 bytes. The band hides the additional keys
  // from all rows of the tile.
  int32_t key_align = 1;
  // For a call with late keys (KvBlock::late), by arrival: the number of key tiles per head to
  // process before the kernel waits for it. Every tile processes its keys in the order of their
  // arrivals, so the work of the first blocks_at_once tiles counts. If that is not enough, tiles
  // that see no late keys come before them. Further tiles are split in two, one with the late keys
  // and one with the others.
  std::vector<int64_t> early_key_tiles;
};

struct ForwardPlan {
  std::vector<ForwardTile> tiles;  // longest first, after those for early_key_tiles
  // The latest keys first: kernels that wait for them begin with a tile's last range.
  std::vector<KvRange> ranges;
  std::vector<CombineTile> combines;  // not empty iff the keys were split
  int64_t slots = 0;                  // split-KV partials per (batch, head)
};

// A tile whose rows see no key is listed only if the outputs must be written (initial or final).
ForwardPlan PlanForwardTiles(const ForwardCall& call, const ForwardTileShape& shape);

struct BackwardPlan {
  std::vector<BackwardTile> tiles;  // longest first
  std::vector<QRange> ranges;
};

// Ranges begin at multiples of `q_align` rows of their piece, so the first rows of a range may see
// no key of the tile.
BackwardPlan PlanBackwardTiles(const BackwardCall& call, int32_t tile_keys, int32_t q_align = 1);

// Returns rows [first, first + count) of a range. REQUIRES: the range contains them.
QRange RowsOf(const QRange& range, int32_t first, int32_t count);

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PLAN_TILE_PLAN_H_
