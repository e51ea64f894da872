// Workspace: what the calls of one CpuKernels share and keep between calls, and
// how the query rows of a call are cut into tiles.
#ifndef RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_WORKSPACE_H_
#define RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_WORKSPACE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cpu/simd/tile_ops.h"
#include "worker/kernels/cpu/workspace/progress.h"
#include "worker/kernels/cpu/workspace/scratch.h"
#include "worker/kernels/cpu/workspace/thread_pool.h"
#include "worker/kernels/cpu/workspace/token_runs.h"
#include "worker/kernels/cpu/workspace/turns.h"

namespace ringattn::worker::cpu {

// Rows of one run, all heads of a HeadSplit's part: `rows` * heads matrix rows,
// heads fastest.
struct QueryTile {
  int run = 0;
  int64_t begin = 0;  // row of the run
  int rows = 0;
  int64_t first_position = 0;
  int64_t last_position = 0;
  int64_t cost = 0;  // keys that its rows reach, summed; forward only
};

// Keys of one run.
struct KeyTile {
  int run = 0;
  int64_t begin = 0;
  int rows = 0;
  int64_t first_position = 0;
  int64_t last_position = 0;
};

// The query heads of a kv head share its packed keys: they are the rows of one
// matrix, in parts of at most kMaxHeads.
struct HeadSplit {
  static constexpr int kMaxHeads = 32;

  explicit HeadSplit(const AttentionProblem& problem)
      : group_size(static_cast<int>(problem.num_heads / problem.num_kv_heads)),
        parts((group_size + kMaxHeads - 1) / kMaxHeads),
        heads((group_size + parts - 1) / parts) {}

  // Heads of one part; the last may have fewer.
  int HeadsOf(int part) const { return std::min(heads, group_size - part * heads); }
  int RowsPerTile(int matrix_rows) const { return std::max(1, matrix_rows / heads); }

  int group_size;
  int parts;
  int heads;
};

inline constexpr double kLog2E = 1.44269504088896340736;

// The sign of softmax_scale goes into the packed q (scores are odd in q), so
// that the largest product is always the largest score.
inline bool NegateQuery(const AttentionProblem& problem) { return problem.softmax_scale < 0; }

inline ScoreScale ScaleOf(const AttentionProblem& problem) {
  const double scale = std::abs(static_cast<double>(problem.softmax_scale));
  if (problem.softcap > 0 && scale > 0) {
    return {problem.softcap, static_cast<float>(problem.softcap * kLog2E),
            static_cast<float>(scale / problem.softcap)};
  }
  return {static_cast<float>(scale), static_cast<float>(scale * kLog2E), 0.0f};
}

// Elements [row, row + rows) of head `head` in a [batch, total_rows, heads, dim] tensor.
inline SourceRows RowsOf(DType dtype, const void* tensor, int64_t batch_index, int64_t total_rows,
                         int64_t heads, int64_t dim, int64_t head, int64_t row, int rows) {
  const int64_t offset = ((batch_index * total_rows + row) * heads + head) * dim;
  return {dtype, static_cast<const char*>(tensor) + offset * ElementBytes(dtype), heads * dim, rows,
          static_cast<int>(dim)};
}

// The same for `heads` heads of each token: rows * heads matrix rows, heads fastest.
inline SourceRows RowsOfHeads(DType dtype, const void* tensor, int64_t batch_index,
                              int64_t total_rows, int64_t all_heads, int64_t dim,
                              int64_t first_head, int heads, int64_t row, int rows) {
  SourceRows source =
      RowsOf(dtype, tensor, batch_index, total_rows, all_heads, dim, first_head, row, rows);
  if (heads > 1) {
    source.rows = rows * heads;
    source.group_rows = heads;
    source.group_stride = source.row_stride;
    source.row_stride = dim;
  }
  return source;
}

// A half-open range of tile indices; its hull grows by Include, in ascending order.
struct TileHull {
  int64_t begin = 0;
  int64_t end = 0;

  void Include(int64_t tile) {
    if (begin == end) begin = tile;
    end = tile + 1;
  }
  bool Contains(int64_t tile) const { return begin <= tile && tile < end; }
};

// Used by one call at a time.
struct Workspace {
  explicit Workspace(int threads) : pool(threads), scratch(threads) {}

  // Fills q and kv from the pieces of a call.
  void SetRuns(const std::vector<Piece>& q_pieces, const std::vector<KvBlock>& blocks);
  // Fills query_tiles, in the order of the runs.
  void CutQueries(int rows_per_tile);
  // Fills key_tiles, in the order of the runs.
  void CutKeys(int rows_per_tile);

  ThreadPool pool;
  std::vector<Scratch> scratch;  // per thread
  TokenRuns q;
  TokenRuns kv;
  std::vector<QueryTile> query_tiles;
  std::vector<KeyTile> key_tiles;
  // Backward: the key tiles that each query tile may meet, and the reverse.
  std::vector<TileHull> query_hulls;
  std::vector<TileHull> key_hulls;
  Turns turns;
};

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_WORKSPACE_H_
