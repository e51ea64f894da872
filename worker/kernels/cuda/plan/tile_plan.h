// Turns pieces and bands into the tile tables that the CUDA kernels walk: which
// tiles have work, and for each the ranges it meets with the part that needs no
// mask. Pure host arithmetic; tiles without work never reach the device.
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
  // At least so many (tile, head) pairs should exist; below, the keys of each
  // tile are split and combined. 0 = never split.
  int64_t target_blocks = 0;
  int64_t blocks_per_tile = 1;  // heads (or packs of heads) times batch
  // How many of these run at a time. 0: not known.
  int64_t blocks_at_once = 0;
  // Where their number leaves a last wave of equal tiles short, some are split.
  bool fills_last_wave = false;
  // Ranges begin at multiples of so many keys of their piece: the copy engine reads an axis that
  // lies innermost in memory from multiples of 16 bytes alone. What a tile has too early nobody
  // sees.
  int32_t key_align = 1;
  // Of a call with late keys (KvBlock::late): so many key tiles of each head are to be done when
  // these are waited for. Every tile begins with keys that are there, so what the first
  // blocks_at_once do of theirs counts. What is missing comes before them: tiles that see no late
  // keys, then others, whose keys are split in two, the late ones and those before them.
  int64_t early_key_tiles = 0;
};

struct ForwardPlan {
  std::vector<ForwardTile> tiles;  // longest first, behind those of early_key_tiles
  // Late keys first: kernels that wait for them begin with a tile's last range.
  std::vector<KvRange> ranges;
  std::vector<CombineTile> combines;  // not empty iff the keys were split
  int64_t slots = 0;                  // split-KV partials per (batch, head)
};

// A tile whose rows see no key is listed only when the outputs must be written
// all the same (initial or final).
ForwardPlan PlanForwardTiles(const ForwardCall& call, const ForwardTileShape& shape);

struct BackwardPlan {
  std::vector<BackwardTile> tiles;  // longest first
  std::vector<QRange> ranges;
};

// Ranges begin at multiples of `q_align` rows of their piece: rows that see nothing of the tile may
// come first.
BackwardPlan PlanBackwardTiles(const BackwardCall& call, int32_t tile_keys, int32_t q_align = 1);

// Rows [first, first + count) of a range. REQUIRES: it has them.
QRange RowsOf(const QRange& range, int32_t first, int32_t count);

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PLAN_TILE_PLAN_H_
