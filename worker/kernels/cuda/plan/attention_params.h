// Plain structures that the host fills and the CUDA kernels read: tile tables
// and kernel parameters. No CUDA headers, so that planning builds and is tested
// without a toolkit.
//
// Coordinates: a kernel works on *ranges*. Rows r count from the first q row of
// a tile or range, columns c from the first key of a range or tile; the band
// lower <= key position - query position <= upper becomes, for row r,
//   ceil((lower_base + q_stride r) / k_stride) <= c <=
//   floor((upper_base + q_stride r) / k_stride)
// with the bases below: no global position is needed on the device.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_PLAN_ATTENTION_PARAMS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_PLAN_ATTENTION_PARAMS_H_

#include <cstdint>

namespace ringattn::worker::cuda {

// Which columns c of a range row r sees. first_*: the limits of row 0, clamped to ±2^30. With equal
// strides the limits of row r are those plus r.
struct BandLimits {
  int64_t lower_base = 0;
  int64_t upper_base = 0;
  int64_t q_stride = 1;
  int64_t k_stride = 1;
  int32_t first_lower = 0;
  int32_t first_upper = 0;
  int32_t same_stride = 1;
  int32_t unused = 0;
};

// Forward: keys [row_begin, row_begin + row_count) of one block, of which at least one is visible
// to a row of the q tile. Columns [full_begin, full_end) need no mask.
struct KvRange {
  const void* k = nullptr;  // the block's k, device: [batch, block_rows, num_kv_heads, head_dim]
  const void* v = nullptr;  // the block's v, device
  int64_t block_rows = 0;
  int64_t row_begin = 0;
  BandLimits limits;
  int32_t row_count = 0;
  int32_t full_begin = 0;
  int32_t full_end = 0;
  int32_t piece = 0;  // index of the piece over all blocks
};

// Forward: q rows [q_row_begin, q_row_begin + q_rows) against ranges [range_begin, range_end).
// partial_slot < 0: the epilogue merges into the outputs; otherwise it writes the partial to that
// slot of the split-KV buffers.
struct ForwardTile {
  int64_t q_row_begin = 0;
  int32_t q_rows = 0;
  int32_t range_begin = 0;
  int32_t range_end = 0;
  int32_t partial_slot = -1;
};

// Split-KV: the partials [slot_begin, slot_end) of one q tile.
struct CombineTile {
  int64_t q_row_begin = 0;
  int32_t q_rows = 0;
  int32_t slot_begin = 0;
  int32_t slot_end = 0;
  int32_t unused = 0;
};

// Backward: q rows [row_begin, row_begin + row_count) that see at least one key
// of the tile; rows [full_begin, full_end) see all of them.
struct QRange {
  int64_t row_begin = 0;
  BandLimits limits;
  int32_t row_count = 0;
  int32_t full_begin = 0;
  int32_t full_end = 0;
  int32_t piece = 0;  // index of the piece of q
};

// Backward: keys [row_begin, row_begin + rows) of one block.
struct BackwardTile {
  const void* k = nullptr;
  const void* v = nullptr;
  // Sums to add to. In sm90 they may be stored gradients, which have the problem's dtype despite
  // the pointer's type; null if tensor maps add.
  float* dk = nullptr;
  float* dv = nullptr;
  int64_t block_rows = 0;
  int64_t row_begin = 0;
  int32_t rows = 0;
  int32_t range_begin = 0;
  int32_t range_end = 0;
  int32_t piece = 0;  // index of the piece over all blocks
};

// Parameters of both directions. Tensors have the layouts of attention_kernel.h.
struct CommonParams {
  int64_t q_rows = 0;
  int32_t batch = 0;
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t group_size = 0;
  int32_t head_dim = 0;
  int32_t head_dim_v = 0;
  // 16-byte accesses are possible: head dims are multiples of 16 bytes and every base pointer is
  // aligned.
  int32_t vector_qk = 0;
  int32_t vector_v = 0;
  float softmax_scale = 0.0f;
  float scale_log2 = 0.0f;  // softmax_scale * log2(e)
  float softcap = 0.0f;
  const uint32_t* stop_word = nullptr;  // device-visible; nonzero ends the kernel early
};

struct ForwardParams {
  CommonParams common;
  const ForwardTile* tiles = nullptr;  // device; [grid.x]
  const KvRange* ranges = nullptr;     // device
  const void* q = nullptr;
  float* out_acc = nullptr;
  float* lse = nullptr;
  void* out = nullptr;
  const float* sinks = nullptr;  // [num_heads], or null; only in the final call
  int32_t initial = 0;
  int32_t final = 0;
  // Query heads of one kv head that share a tile: tile row r is q row
  // r / head_pack of head grid.y * head_pack + r % head_pack.
  int32_t head_pack = 1;
  int32_t tile_rows = 0;         // rows of a tile, including packed ones
  float* partial_out = nullptr;  // [slots, batch, num_heads / head_pack, tile_rows, head_dim_v]
  float* partial_lse = nullptr;  // [slots, batch, num_heads / head_pack, tile_rows]
};

struct CombineParams {
  ForwardParams forward;
  const CombineTile* tiles = nullptr;  // device
};

struct BackwardParams {
  // sm_90: a tensor map over dq_acc [batch, q_rows, num_heads, head_dim] whose box
  // is 32 columns by a tile's rows of one head, 128-byte swizzle.
  alignas(64) unsigned char dq_map[128] = {};
  int32_t has_dq_map = 0;
  CommonParams common;
  const BackwardTile* tiles = nullptr;  // device; [grid.x]
  const QRange* ranges = nullptr;       // device
  const void* q = nullptr;
  const void* dout = nullptr;
  const float* lse = nullptr;
  const float* delta = nullptr;
  float* dq_acc = nullptr;
  int32_t heads_per_block = 1;  // query heads of one group that one thread block sums
};

}  // namespace ringattn::worker::cuda

#endif  // RINGATTN_WORKER_KERNELS_CUDA_PLAN_ATTENTION_PARAMS_H_
