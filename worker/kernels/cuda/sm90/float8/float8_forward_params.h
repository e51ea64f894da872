// What the host hands to the kernels of a forward in e4m3. Plain structures; no CUDA headers.
//
// A call's q, k and v are first rounded into scratch memory (float8_rounding.cu); columns, padded
// to whole 16 bytes, are 0 beyond the head dim:
//   q  [batch, q_rows, num_heads, columns]
//   k  [batch, block_rows, num_kv_heads, columns], for each block
//   v  [batch, num_kv_heads, head_dim_v, pitch], for each piece of each block: its keys are the
//      inner axis, as the product with p wants them (an 8-bit B operand is read along its rows
//      alone), each 16 of them in the order of float8_wgmma.cuh, beyond the piece 0
// and multiplied as they lie there by the forward of forward_float8.cu.
#ifndef RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_FORWARD_PARAMS_H_
#define RINGATTN_WORKER_KERNELS_CUDA_SM90_FLOAT8_FLOAT8_FORWARD_PARAMS_H_

#include <cstdint>

#include "worker/kernels/cuda/sm90/forward/forward_params.h"

namespace ringattn::worker::cuda::sm90 {

inline constexpr int kFloat8MaxColumns = 128;
inline constexpr int kFloat8TileRows = 128;  // at most, that one block rounds; of q fewer

// Bytes of a row of q's or k's copy: the copy engine takes strides of whole 16.
constexpr int Float8RowBytes(int columns) { return (columns + 15) / 16 * 16; }

enum Float8Kind : int32_t { kFloat8Q = 0, kFloat8K = 1, kFloat8V = 2 };

// Rows [row_begin, row_begin + rows) of one tensor, all of one piece.
struct Float8Tile {
  const void* source = nullptr;  // device: [batch, tensor_rows, heads, columns], 16-bit
  int64_t target = 0;            // bytes behind the scratch's beginning
  int64_t tensor_rows = 0;
  int64_t row_begin = 0;
  int32_t rows = 0;
  int32_t kind = kFloat8Q;
  int64_t pitch = 0;   // of v, whose rows lie innermost
  int64_t column = 0;  // of v: where the first row goes
};

// The grid: tiles, kv heads, batch rows. A block of q has all query heads of its kv head.
struct Float8RoundingParams {
  const Float8Tile* tiles = nullptr;  // device
  char* scratch = nullptr;
  uint32_t* largest = nullptr;  // [kind][batch][kv head]: bits of max |x|, an fp32; 0 before
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
