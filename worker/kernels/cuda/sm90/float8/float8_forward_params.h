// Parameters of the kernels of a forward in e4m3. Plain structures; no CUDA headers.
//
// A launch first rounds a call's q, k and v into scratch memory (float8_rounding.cu). Columns are
// padded to whole 16 bytes, with zeros beyond the head dim:
//  q  [batch, q_rows, num_heads, columns]
//  k  [batch, block_rows, num_kv_heads, columns], for each block
//  v  [batch, num_kv_heads, head_dim_v, pitch], for each piece of each block. The inner axis is
//     keys, because an 8-bit B operand of the product with p can only be read along its rows.
//     Each 16 keys are in the order of float8_wgmma.cuh, with zeros beyond the piece.
// The forward of forward_float8.cu then multiplies these copies.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_FORWARD_PARAMS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_FORWARD_PARAMS_H_

#include <cstdint>

#include "worker/kernels/cuda/sm90/forward/forward_params.h"

namespace ringattn::worker::cuda::sm90 {

inline constexpr int kFloat8MaxColumns = 128;
inline constexpr int kFloat8TileRows = 128;  // most rows that one block rounds; fewer of q

// Bytes of a row of q's or k's copy: the copy engine requires strides of whole 16 bytes.
constexpr int Float8RowBytes(int columns) { return (columns + 15) / 16 * 16; }

enum Float8Kind : int32_t { kFloat8Q = 0, kFloat8K = 1, kFloat8V = 2 };

// Rows [row_begin, row_begin + rows) of one tensor, all of one piece.
struct Float8Tile {
  const void* source = nullptr;  // device: [batch, tensor_rows, heads, columns], 16-bit
  int64_t target = 0;            // byte offset in the scratch
  int64_t tensor_rows = 0;
  int64_t row_begin = 0;
  int32_t rows = 0;
  int32_t kind = kFloat8Q;
  int64_t pitch = 0;   // for v, whose innermost axis is rows
  int64_t column = 0;  // for v: the column of the first row
};

// The grid: tiles, kv heads, batch rows. A block of q processes all query heads of its kv head.
struct Float8RoundingParams {
  const Float8Tile* tiles = nullptr;  // device
  char* scratch = nullptr;
  uint32_t* largest = nullptr;  // [kind][batch][kv head]: bits of max |x|, fp32; initially 0
  const uint32_t* stop_word = nullptr;
  int32_t batch = 0;
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t head_dim_v = 0;
};

struct Float8ForwardParams {
  ForwardKernelParams forward;
  const uint32_t* largest = nullptr;
};

}  // namespace ringattn::worker::cuda::sm90

#endif  // RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_FORWARD_PARAMS_H_
