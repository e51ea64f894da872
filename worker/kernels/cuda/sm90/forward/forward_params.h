// Parameters of the sm_90a forward kernels in addition to those of the portable family. Plain
// structures; no CUDA headers.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_PARAMS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FORWARD_FORWARD_PARAMS_H_

#include <cstdint>

#include "worker/kernels/cuda/plan/attention_params.h"

namespace ringattn::worker::cuda::sm90 {

// A CUtensorMap.
struct alignas(64) TensorMap {
  unsigned char bytes[128] = {};
};

// Tensor maps of the keys and values of one piece of one block: [batch, rows, num_kv_heads,
// head_dim]. The rows end with the piece, so that later rows read as zero.
struct SpanMaps {
  TensorMap k;
  TensorMap v;
};

// Counters that distribute items to blocks. Items are assigned in order of their index: the first
// WorkShifts::first_blocks by block index, the others by a counter. Heads are divided into sections
// whose K/V fit in the L2 cache together (or not at all). Within a section the tiles follow the
// table's order (longest first), each for all heads of the section.
struct WorkCounters {
  uint32_t next = 0;      // items assigned in addition to the first ones
  uint32_t finished = 0;  // blocks; the last one zeroes all counters for the next launch
  uint32_t keys = 0;      // late keys with at most this KvBlock::late have arrived
};

// A persistent block occupies its multiprocessor, and a block of another stream with priority
// would wait for the end of the launch. Blocks of long launches therefore leave between two items
// once they have worked for a shift, and further blocks of the launch take the other items. The
// first blocks leave after different parts of a shift, so that later ones do not leave together.
// The last ones stay until no item is left.
struct WorkShifts {
  uint32_t first_blocks = 0;  // that run at the same time
  uint32_t cycles = 0;        // of a shift; 0: all blocks are first ones and stay
};

// The value of ForwardKernelParams::first_late_piece without late keys.
inline constexpr int32_t kNoLatePiece = 0x7fffffff;

struct ForwardKernelParams {
  TensorMap q_map;  // box: 64 columns of one tile's rows and packed heads
  ForwardParams forward;
  const SpanMaps* maps = nullptr;    // device; indexed by KvRange::piece
  WorkCounters* counters = nullptr;  // device
  uint32_t q_box_bytes = 0;
  int32_t tiles = 0;
  int32_t heads = 0;  // packs of heads times batch
  int32_t section_heads = 1;
  // KvRange::piece (late_pieces.h) of the first late keys, which counters->keys announces.
  int32_t first_late_piece = kNoLatePiece;
  WorkShifts shifts;
};

// Keys of a range in the form that a producer walks (KvRange with equal strides).
struct KeyRows {
  int32_t row_begin = 0;
  int32_t row_count = 0;
  int32_t full_begin = 0;
  int32_t full_end = 0;
  int32_t first_lower = 0;
  int32_t first_upper = 0;
  int32_t piece = 0;
};

// A tile of a plan whose keys are split, with all data for its first copies: one cache line.
struct alignas(64) SplitPart {
  ForwardTile tile;
  KeyRows last;          // the last range, where the producer begins
  int32_t combine = -1;  // the CombineTile of its partial; -1: none
};
static_assert(sizeof(SplitPart) == 64);

inline constexpr int32_t kNearMaps = 2;

// Parameters of the kernels for few rows and split keys. All heads form one section.
struct SplitForwardParams : ForwardKernelParams {
  SpanMaps near_maps[kNearMaps];          // copies of the first pieces' maps; parameters need no
                                          // fence
  const SplitPart* parts = nullptr;       // device; one per tile
  const CombineTile* combines = nullptr;  // device
  // Device, one per CombineTile and pack of heads: how many of its partials are complete. The block
  // that counts the last one merges them and resets the ticket to 0. Null: a later kernel merges.
  uint32_t* tickets = nullptr;
};

// The most rows that the last block merges. A separate kernel of many blocks merges more rows
// faster.
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
