// Buffers of a task of the backward kernel: some keys, and a few queries at a time.
#ifndef RINGATTN_WORKER_KERNELS_CPU_BACKWARD_BLOCK_H_
#define RINGATTN_WORKER_KERNELS_CPU_BACKWARD_BLOCK_H_

#include <cstdint>

#include "worker/kernels/cpu/score_pass.h"
#include "worker/kernels/cpu/simd/tile_ops.h"
#include "worker/kernels/cpu/workspace/workspace.h"

namespace ringattn::worker::cpu {

// One key tile of one kv head.
struct KeyTask {
  const KeyTile* tile;
  int64_t tile_index;
  int64_t unit;  // (batch, kv head)
  int64_t batch_index;
  int64_t kv_head;
  SourceRows k_rows;
  SourceRows v_rows;
  bool keys_not_finite;
  float k_magnitude;  // largest |element| of the tile
  float v_magnitude;
  float* keys_transposed;    // depth words of d, columns keys
  float* values_transposed;  // depth words of d_v, columns keys
  float* keys;               // depth words of keys, columns d
  float* dk;                 // [key_tile_, cols_]
  float* dv;                 // [key_tile_, cols_v_]
  float* convert;
  float* element_row;
  int64_t* key_places;  // with score terms: see ScorePass::KeysOf
  TermKeys keys_at;
};

// One query tile of one part of the group's heads.
struct QueryBlock {
  const QueryTile* tile;
  int64_t first_head;
  int heads;
  int rows;       // matrix rows
  int64_t pairs;  // visible
  bool uniform;
  int col_begin;
  int col_end;
  bool not_finite;
  bool wide;          // products may leave fp32's range, though all elements are finite
  float* query_left;  // rows of q, of dout
  float* dout_left;
  float* query_right;  // depth words of rows, columns d, d_v
  float* dout_right;
  float* scores;
  float* dp;
  float* p;
  float* ds;
  float* ds_rows;
  float* dq;
  float* lse;
  float* delta;
  int32_t* visible_begin;
  int32_t* visible_end;
  // For problems with score terms, a row every key tile: see ScorePass. Null if the problem has
  // no such terms.
  float* add;
  float* inside;
  float* slopes;
  float* keeps;
};

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_BACKWARD_BLOCK_H_
