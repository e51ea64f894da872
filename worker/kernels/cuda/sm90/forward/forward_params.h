// What the host hands to the sm_90a forward kernels beyond the portable family's
// parameters. Plain structures; no CUDA headers.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_PARAMS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_PARAMS_H_

#include <cstdint>

#include "worker/kernels/cuda/plan/attention_params.h"

namespace ringattn::worker::cuda::sm90 {

// A CUtensorMap.
struct alignas(64) TensorMap {
  unsigned char bytes[128] = {};
};

// The keys and values of one piece of one block: [batch, rows, num_kv_heads, head_dim],
// where rows end with the piece, so that what follows it reads as zero.
struct SpanMaps {
  TensorMap k;
  TensorMap v;
};

// Which block computes what: items are handed out in order of their index, the first
// gridDim.x by block index, the others by a counter. Heads are cut into sections whose K/V
// fit in the L2 cache together (or not at all); within a section the tiles come in the
// table's order (longest first), each for all heads of the section.
struct WorkCounters {
  uint32_t next = 0;      // items handed out beyond the first gridDim.x
  uint32_t finished = 0;  // blocks; the last one zeroes all for the next launch
  uint32_t keys = 0;      // 1: late keys are there
};

// Of ForwardKernelParams::first_late_piece.
inline constexpr int32_t kNoLatePiece = 0x7fffffff;

struct ForwardKernelParams {
  TensorMap q_map;  // box: 64 columns of one tile's rows and packed heads
  ForwardParams forward;
  const SpanMaps* maps = nullptr;    // device; KvRange::piece counts in it
  WorkCounters* counters = nullptr;  // device
  uint32_t q_box_bytes = 0;
  int32_t tiles = 0;
  int32_t heads = 0;  // packs of heads times batch
  int32_t section_heads = 1;
  // Keys of this piece and of those behind it are there once counters->keys is 1.
  int32_t first_late_piece = kNoLatePiece;
};

// Keys of a range as a producer walks them (KvRange, of equal strides).
struct KeyRows {
  int32_t row_begin = 0;
  int32_t row_count = 0;
  int32_t full_begin = 0;
  int32_t full_end = 0;
  int32_t first_lower = 0;
  int32_t first_upper = 0;
  int32_t piece = 0;
};

// A tile of a plan whose keys are split, with all that its first copies need: one line of memory.
struct alignas(64) SplitPart {
  ForwardTile tile;
  KeyRows last;          // of its last range, where the producer begins
  int32_t combine = -1;  // the CombineTile that its partial belongs to, if it has one
};
static_assert(sizeof(SplitPart) == 64);

inline constexpr int32_t kNearMaps = 2;

// What kernels for few rows and split keys are given. All heads are one section.
struct SplitForwardParams : ForwardKernelParams {
  SpanMaps near_maps[kNearMaps];          // the first pieces' once more: here they need no fence
  const SplitPart* parts = nullptr;       // device; of each tile
  const CombineTile* combines = nullptr;  // device
  // Device; of each CombineTile and pack of heads, how many of its partials are there. The last
  // block to count one merges them, and leaves 0. Null: a kernel behind this one merges.
  uint32_t* tickets = nullptr;
};

// What the last block merges: more is done sooner by a kernel of many blocks.
inline constexpr int32_t kMostMergedRows = 8;
inline constexpr int32_t kMostMergedParts = 128;

// One kernel of the family in its two dtypes.
struct ForwardKernel {
  const void* bf16 = nullptr;
  const void* fp16 = nullptr;
  int32_t tile_rows = 0;
  int32_t tile_keys = 0;
  int32_t panels = 0;  // of 64 columns
  int32_t threads = 0;
  int32_t shared_bytes = 0;
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_PARAMS_H_
