#include "worker/kernels/cpu/backward.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "worker/kernels/cpu/backward_block.h"
#include "worker/kernels/cpu/bias_gradient_rows.h"
#include "worker/kernels/cpu/nonfinite_gradients.h"
#include "worker/kernels/cpu/simd/elementwise.h"
#include "worker/kernels/cpu/workspace/tile_hulls.h"
#include "worker/kernels/work.h"

namespace ringattn::worker::cpu {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// A task owns some keys of a kv head, with their dk and dv sums, and streams the
// queries that reach them past, kMatrixRows at a time. Reading q, dout and dq from
// beyond L2 is what many keys amortise; what belongs to the keys must fit in L2.
constexpr int kMatrixRows = 48;

int ChooseKeyTile(const BackwardCall& call) {
  const AttentionProblem& problem = *call.problem;
  if (problem.tuning.tile_kv != 0) return problem.tuning.tile_kv;
  int64_t keys = 0;
  for (const KvBlock& block : call.blocks) keys += block.rows * problem.batch;
  const int tile = std::max(problem.head_dim, problem.head_dim_v) <= 128 ? 384 : 192;
  // Small calls need tasks for many threads more than they need efficient ones.
  return keys * problem.num_kv_heads < 32 * tile ? 96 : tile;
}

class BackwardPass {
 public:
  BackwardPass(const BackwardCall& call, void* dbias, Workspace& workspace,
               const Progress& progress)
      : call_(call),
        problem_(*call.problem),
        dbias_(problem_, call.q_rows, dbias),
        workspace_(workspace),
        progress_(progress),
        ops_(TileOpsFor(problem_.dtype)),
        split_(problem_),
        terms_(problem_, call.q_rows, call.terms),
        scale_(terms_.any() ? kFinished : ScaleOf(problem_)),
        matrix_rows_(problem_.tuning.tile_q != 0 ? problem_.tuning.tile_q : kMatrixRows),
        key_tile_(ChooseKeyTile(call)),
        head_dim_(static_cast<int>(problem_.head_dim)),
        head_dim_v_(static_cast<int>(problem_.head_dim_v)),
        depth_(ops_.Words(head_dim_)),
        depth_v_(ops_.Words(head_dim_v_)),
        cols_(ops_.PadColumns(head_dim_)),
        cols_v_(ops_.PadColumns(head_dim_v_)) {}

  absl::Status Run() {
    workspace_.SetRuns(call_.q_pieces, call_.blocks);
    workspace_.CutQueries(split_.RowsPerTile(matrix_rows_));
    workspace_.CutKeys(key_tile_);
    FindHulls(problem_.bands, workspace_);
    const int64_t bytes = ScratchBytes();
    for (Scratch& scratch : workspace_.scratch) scratch.Reserve(bytes);
    const int64_t units = problem_.batch * problem_.num_kv_heads;
    workspace_.turns.Reset(units * split_.parts * QueryTiles());
    const int64_t tasks = units * static_cast<int64_t>(workspace_.key_tiles.size());
    workspace_.pool.ParallelFor(tasks, [this](int thread, int64_t task) {
      if (!progress_.stopped()) RunTask(workspace_.scratch[thread], task);
    });
    return progress_.stopped() ? absl::CancelledError("backward kernel stopped") : absl::OkStatus();
  }

 private:
  using Task = KeyTask;
  using Block = QueryBlock;

  int64_t QueryTiles() const { return static_cast<int64_t>(workspace_.query_tiles.size()); }
  int64_t MaxRows() const { return int64_t{split_.RowsPerTile(matrix_rows_)} * split_.heads; }

  int64_t ScratchBytes() const {
    const int64_t rows = MaxRows();
    const int64_t square = Scratch::Bytes<float>(rows * key_tile_);
    return Scratch::Bytes<float>(key_tile_ * depth_) + Scratch::Bytes<float>(key_tile_ * depth_v_) +
           2 * Scratch::Bytes<float>(key_tile_ * cols_) +
           Scratch::Bytes<float>(key_tile_ * cols_v_) +
           Scratch::Bytes<float>(key_tile_ * std::max(head_dim_, head_dim_v_)) +
           Scratch::Bytes<float>(std::max(cols_, cols_v_)) + Scratch::Bytes<float>(rows * depth_) +
           Scratch::Bytes<float>(rows * depth_v_) + 2 * Scratch::Bytes<float>(rows * cols_) +
           Scratch::Bytes<float>(rows * cols_v_) + 5 * square + 2 * Scratch::Bytes<float>(rows) +
           2 * Scratch::Bytes<int32_t>(rows) +
           (terms_.any() ? 4 * square + Scratch::Bytes<int64_t>(key_tile_) : 0);
  }

  void RunTask(Scratch& scratch, int64_t index) {
    // Units vary fastest: neighbours in time work on different heads and seldom
    // wait for each other.
    const int64_t units = problem_.batch * problem_.num_kv_heads;
    const TileHull hull = workspace_.key_hulls[index / units];
    if (hull.begin == hull.end) return;
    scratch.Restart();
    Task task = MakeTask(scratch, index / units, index % units);
    Block block = MakeBlock(scratch);
    const Band& band = problem_.bands[workspace_.kv.runs()[task.tile->run].document];
    for (int part = 0; part < split_.parts; ++part) {
      for (int64_t q = hull.begin; q < hull.end; ++q) {
        if (progress_.stopped()) return;
        const TileHull turns = workspace_.query_hulls[q];
        if (!turns.Contains(task.tile_index)) continue;
        block.tile = &workspace_.query_tiles[q];
        const bool reaches = Reaches(*block.tile, *task.tile, band);
        const bool works = reaches && SetBlock(task, block, part);
        const bool sees = works && block.col_begin < block.col_end;
        if (sees) AddBlock(task, block);
        if (reaches && dbias_.wanted()) StoreBiasGradient(task, block);
        const int64_t counter = (task.unit * split_.parts + part) * QueryTiles() + q;
        if (!workspace_.turns.Await(counter, task.tile_index - turns.begin, progress_)) return;
        if (sees) StoreQueryGradient(task, block);
        if (works) {
          progress_.CountTile(block.pairs * PairWork());
        }
        workspace_.turns.Pass(counter);
      }
    }
    StoreKeyGradients(task);
  }

  int64_t PairWork() const {
    return BackwardPairWork(head_dim_, head_dim_v_) +
           (dbias_.wanted() ? BiasGradientPairWork(head_dim_, head_dim_v_) : 0);
  }

  Task MakeTask(Scratch& scratch, int64_t tile_index, int64_t unit) {
    Task task;
    task.tile = &workspace_.key_tiles[tile_index];
    task.tile_index = tile_index;
    task.unit = unit;
    task.batch_index = unit / problem_.num_kv_heads;
    task.kv_head = unit % problem_.num_kv_heads;
    task.keys_transposed = scratch.Take<float>(key_tile_ * depth_);
    task.values_transposed = scratch.Take<float>(key_tile_ * depth_v_);
    task.keys = scratch.Take<float>(key_tile_ * cols_);
    task.dk = scratch.Take<float>(key_tile_ * cols_);
    task.dv = scratch.Take<float>(key_tile_ * cols_v_);
    task.convert = scratch.Take<float>(key_tile_ * std::max(head_dim_, head_dim_v_));
    task.element_row = scratch.Take<float>(std::max(cols_, cols_v_));
    task.key_places = terms_.any() ? scratch.Take<int64_t>(key_tile_) : nullptr;

    const TokenRun& run = workspace_.kv.runs()[task.tile->run];
    const KvBlock& block = call_.blocks[run.block];
    const int64_t row = run.local_begin + task.tile->begin;
    task.k_rows = RowsOf(problem_.dtype, block.k, task.batch_index, block.rows,
                         problem_.num_kv_heads, head_dim_, task.kv_head, row, task.tile->rows);
    task.v_rows = RowsOf(problem_.dtype, block.v, task.batch_index, block.rows,
                         problem_.num_kv_heads, head_dim_v_, task.kv_head, row, task.tile->rows);
    if (terms_.any()) {
      task.keys_at = terms_.KeysOf(workspace_.kv, run, block, task.batch_index, task.tile->begin,
                                   task.tile->rows, task.key_places);
    }
    ops_.pack_right_transposed(task.k_rows, task.keys_transposed, task.convert);
    ops_.pack_right_transposed(task.v_rows, task.values_transposed, task.convert);
    task.keys_not_finite = ops_.pack_right(task.k_rows, task.keys);
    task.k_magnitude = MaxMagnitude(task.k_rows);
    task.v_magnitude = MaxMagnitude(task.v_rows);
    std::fill_n(task.dk, int64_t{task.tile->rows} * cols_, 0.0f);
    std::fill_n(task.dv, int64_t{task.tile->rows} * cols_v_, 0.0f);
    return task;
  }

  Block MakeBlock(Scratch& scratch) {
    const int64_t rows = MaxRows();
    Block block;
    block.query_left = scratch.Take<float>(rows * depth_);
    block.dout_left = scratch.Take<float>(rows * depth_v_);
    block.query_right = scratch.Take<float>(rows * cols_);
    block.dout_right = scratch.Take<float>(rows * cols_v_);
    block.dq = scratch.Take<float>(rows * cols_);
    block.scores = scratch.Take<float>(rows * key_tile_);
    block.dp = scratch.Take<float>(rows * key_tile_);
    const bool in_place = ops_.elements_per_word == 1;
    block.p = in_place ? block.scores : scratch.Take<float>(rows * key_tile_);
    block.ds = in_place ? block.dp : scratch.Take<float>(rows * key_tile_);
    block.ds_rows = in_place ? block.dp : scratch.Take<float>(rows * key_tile_);
    block.lse = scratch.Take<float>(rows);
    block.delta = scratch.Take<float>(rows);
    block.visible_begin = scratch.Take<int32_t>(rows);
    block.visible_end = scratch.Take<int32_t>(rows);
    const auto tile_if = [&](bool wanted) {
      return wanted ? scratch.Take<float>(rows * key_tile_) : nullptr;
    };
    block.add = tile_if(terms_.has_addends());
    block.inside = tile_if(terms_.has_inside());
    block.slopes = tile_if(terms_.any() && terms_.has_slopes());
    block.keeps = tile_if(terms_.drops());
    return block;
  }

  // Masks and packs the block's rows. False: no row sees a key of the task by the band. Where the
  // score terms hide the rest, true with no columns.
  bool SetBlock(const Task& task, Block& block, int part) {
    block.heads = split_.HeadsOf(part);
    block.first_head = task.kv_head * split_.group_size + int64_t{part} * split_.heads;
    block.rows = block.tile->rows * block.heads;
    if (!SetRows(task, block)) return false;
    if (terms_.any() && !SetAddends(task, block)) return true;
    const SourceRows q = BlockRows(task, block, call_.q, head_dim_);
    const SourceRows dout = BlockRows(task, block, call_.dout, head_dim_v_);
    ops_.pack_left(q, NegateQuery(problem_), block.query_left, depth_);
    ops_.pack_left(dout, false, block.dout_left, depth_v_);
    const bool q_not_finite = ops_.pack_right(q, block.query_right);
    const bool dout_not_finite = ops_.pack_right(dout, block.dout_right);
    block.not_finite = task.keys_not_finite || q_not_finite || dout_not_finite;
    block.wide = LeavesRange(task, block, MaxMagnitude(q), MaxMagnitude(dout));
    return true;
  }

  // Whether a product or one of the block's sums of them may not fit fp32, although all
  // that goes into them does. fp16 never comes near.
  bool LeavesRange(const Task& task, const Block& block, double q, double dout) const {
    if (problem_.dtype == DType::kFloat16) return false;
    const double k = task.k_magnitude, v = task.v_magnitude;
    if (!std::isfinite(q + dout + k + v)) return false;
    const double score = q * k * head_dim_;
    const double ds = 4 * (1 + dout) * v * head_dim_v_ *
                      terms_.keep_scale();  // dp and delta, and p a little above 1
    const double dq = ds * k * task.tile->rows;
    const double dk = ds * q * block.rows;
    const double dv = 2 * dout * block.rows * terms_.keep_scale();
    return std::max({score, ds, dq, dk, dv}) >= 0x1p126;
  }

  // Those of the task's keys that the band lets row r of the block's tile see.
  RowRange ColumnsInBand(const Task& task, const Block& block, int r) const {
    const TokenRun& q_run = workspace_.q.runs()[block.tile->run];
    const TokenRun& kv_run = workspace_.kv.runs()[task.tile->run];
    const Band& band = problem_.bands[kv_run.document];
    const int64_t position = workspace_.q.PositionOf(q_run, block.tile->begin + r);
    const RowRange keys =
        workspace_.kv.RowsAt(kv_run, position + band.lower, position + band.upper);
    const int64_t from = std::clamp<int64_t>(keys.begin - task.tile->begin, 0, task.tile->rows);
    return {from, std::clamp<int64_t>(keys.end - task.tile->begin, from, task.tile->rows)};
  }

  // lse, delta and visible columns of every matrix row.
  bool SetRows(const Task& task, Block& block) {
    const int count = task.tile->rows;
    const int64_t local = LocalRow(*block.tile);
    int from_all = count;
    int to_all = 0;
    block.uniform = true;
    block.pairs = 0;
    for (int r = 0; r < block.tile->rows; ++r) {
      const auto [from, to] = ColumnsInBand(task, block, r);
      for (int h = 0; h < block.heads; ++h) {
        const int64_t at =
            (task.batch_index * problem_.num_heads + block.first_head + h) * call_.q_rows + local +
            r;
        const int m = r * block.heads + h;
        const float lse = call_.lse[at];
        const bool sees = from < to && lse != kNegativeInfinity;
        block.lse[m] = sees ? lse : 0.0f;
        block.delta[m] = call_.delta[at];
        block.visible_begin[m] = sees ? static_cast<int32_t>(from) : 0;
        block.visible_end[m] = sees ? static_cast<int32_t>(to) : 0;
        block.pairs += to - from;
        if (sees) {
          from_all = std::min(from_all, static_cast<int>(from));
          to_all = std::max(to_all, static_cast<int>(to));
        }
        block.uniform = block.uniform && sees && from == 0 && to == count;
      }
    }
    SetColumns(from_all, to_all, block);
    return from_all < to_all;
  }

  void SetColumns(int from, int to, Block& block) const {
    block.col_begin = from / ops_.panel * ops_.panel;
    block.col_end = from < to ? ops_.PadColumns(to) : block.col_begin;
  }

  TermRow TermRowOf(const Task& task, const Block& block, int m) const {
    const TokenRun& run = workspace_.q.runs()[block.tile->run];
    const int row = m / block.heads;
    return {task.batch_index, block.first_head + m % block.heads, LocalRow(*block.tile) + row,
            run.document, workspace_.q.PositionOf(run, block.tile->begin + row)};
  }

  // Row m of one of the block's tiles; null of none.
  float* RowOf(float* tile, int m) const {
    return tile == nullptr ? nullptr : tile + int64_t{m} * key_tile_;
  }

  // Stores the score terms' addends and the columns that they leave visible. Returns false if
  // there are none.
  bool SetAddends(const Task& task, Block& block) {
    int from_all = task.tile->rows;
    int to_all = 0;
    for (int m = 0; m < block.rows; ++m) {
      int32_t& from = block.visible_begin[m];
      int32_t& to = block.visible_end[m];
      terms_.Addends(TermRowOf(task, block, m), task.keys_at, &from, &to, RowOf(block.add, m),
                     RowOf(block.inside, m));
      if (from >= to) continue;
      from_all = std::min(from_all, static_cast<int>(from));
      to_all = std::max(to_all, static_cast<int>(to));
    }
    block.uniform = block.uniform && !terms_.masks();
    SetColumns(from_all, to_all, block);
    return from_all < to_all;
  }

  // Products become finished scores, and dropout's factors are drawn.
  void FinishScores(const Task& task, Block& block) {
    for (int m = 0; m < block.rows; ++m) {
      if (block.visible_begin[m] >= block.visible_end[m]) continue;
      const TermRow row = TermRowOf(task, block, m);
      terms_.Finish(row, task.keys_at, RowOf(block.add, m), RowOf(block.inside, m), block.col_begin,
                    block.col_end, RowOf(block.scores, m), RowOf(block.slopes, m));
      if (!terms_.drops()) continue;
      terms_.Keeps(row, task.keys_at, block.visible_begin[m], block.visible_end[m],
                   RowOf(block.keeps, m));
    }
  }

  NonfiniteGradients Nonfinite() const {
    return {call_, workspace_, ops_, terms_, key_tile_, cols_, cols_v_};
  }

  // The block's rows of q or dout.
  SourceRows BlockRows(const Task& task, const Block& block, const void* tensor, int dim) const {
    return Nonfinite().BlockRows(task, block, tensor, dim);
  }

  // The first row of the tile in q's buffer.
  int64_t LocalRow(const QueryTile& tile) const {
    return workspace_.q.runs()[tile.run].local_begin + tile.begin;
  }

  // p and ds of the block's pairs.
  void ComputeGradients(const Task& task, Block& block) {
    GemmArgs scores;
    scores.rows = block.rows;
    scores.col_begin = block.col_begin;
    scores.col_end = block.col_end;
    scores.depth_end = scores.right_depth = depth_;
    scores.left_stride = depth_;
    scores.left = block.query_left;
    scores.right = task.keys_transposed;
    scores.right_cols = ops_.PadColumns(task.tile->rows);
    scores.c = block.scores;
    scores.c_stride = key_tile_;
    ops_.gemm(scores);
    GemmArgs dp = scores;
    dp.depth_end = dp.right_depth = depth_v_;
    dp.left_stride = depth_v_;
    dp.left = block.dout_left;
    dp.right = task.values_transposed;
    dp.c = block.dp;
    ops_.gemm(dp);
    if (terms_.any()) FinishScores(task, block);
    GradientArgs gradient;
    gradient.terms = terms_.any();
    gradient.slopes = block.slopes;
    gradient.keeps = block.keeps;
    gradient.rows = block.rows;
    gradient.col_begin = block.col_begin;
    gradient.col_end = block.col_end;
    gradient.scale = scale_;
    gradient.visible_begin = block.visible_begin;
    gradient.visible_end = block.visible_end;
    gradient.lse = block.lse;
    gradient.delta = block.delta;
    gradient.scores = block.scores;
    gradient.dp = block.dp;
    gradient.stride = key_tile_;
    gradient.p = block.p;
    gradient.ds = block.ds;
    gradient.ds_rows = block.ds_rows;
    gradient.ds_rows_stride = key_tile_;
    gradient.exact_ds = dbias_.wanted() ? block.dp : nullptr;
    ops_.gradient(gradient);
  }

  // Adds the block to dk and dv of the task and to dq of the block; stores ds if the gradient of
  // the bias is requested.
  void AddBlock(Task& task, Block& block) {
    if (block.wide) {
      Nonfinite().AddWideGradients(task, block);
      // StoreBiasGradient mends what does not fit.
      if (dbias_.wanted()) ComputeGradients(task, block);
      return;
    }
    ComputeGradients(task, block);
    if (block.not_finite && !block.uniform) {
      Nonfinite().AddVisibleGradients(task, block);
      return;
    }
    const int key_end = std::min(block.col_end, task.tile->rows);
    AccumulateByKey(block, block.p, block.dout_right, key_end, cols_v_, task.dv);
    AccumulateByKey(block, block.ds, block.query_right, key_end, cols_, task.dk);

    GemmArgs dq;
    dq.rows = block.rows;
    dq.col_end = cols_;
    dq.depth_begin = block.col_begin / ops_.elements_per_word;
    dq.depth_end = ops_.Words(key_end);
    dq.left = block.ds_rows;
    dq.left_stride = key_tile_;
    dq.right = task.keys;
    dq.right_cols = cols_;
    dq.right_depth = ops_.Words(task.tile->rows);
    dq.c = block.dq;
    dq.c_stride = cols_;
    ops_.gemm(dq);
  }

  // sums[key, cols] += weights[row, key] * right[row, cols] over the block's rows,
  // for the keys [block.col_begin, key_end).
  void AccumulateByKey(const Block& block, const float* weights, const float* right, int key_end,
                       int cols, float* sums) {
    GemmArgs args;
    args.rows = key_end - block.col_begin;
    args.col_end = cols;
    args.depth_end = ops_.Words(block.rows);
    args.left = weights + block.col_begin;
    args.left_stride = key_tile_;
    args.left_transposed = true;
    args.right = right;
    args.right_cols = cols;
    args.right_depth = ops_.Words(block.rows);
    args.c = sums + int64_t{block.col_begin} * cols;
    args.c_stride = cols;
    args.accumulate = true;
    ops_.gemm(args);
  }

  // ds of all pairs that the band has: 0 where score terms hide them.
  void StoreBiasGradient(const Task& task, const Block& block) const {
    const bool in_range = std::isfinite(MaxMagnitude({.data = block.dp + block.col_begin,
                                                      .row_stride = key_tile_,
                                                      .rows = block.rows,
                                                      .cols = block.col_end - block.col_begin}));
    for (int m = 0; m < block.rows; ++m) {
      float* ds = RowOf(block.dp, m);
      const RowRange keys = ColumnsInBand(task, block, m / block.heads);
      const int from = static_cast<int>(keys.begin), to = static_cast<int>(keys.end);
      // Columns that the block has not computed.
      std::fill(ds + from, ds + std::clamp(block.col_begin, from, to), 0.0f);
      std::fill(ds + std::clamp(block.col_end, from, to), ds + to, 0.0f);
      if (!in_range) Nonfinite().MendScoreGradients(task, block, m);
      dbias_.Store(TermRowOf(task, block, m), task.keys_at, from, to, ds);
    }
  }

  void StoreQueryGradient(const Task& task, const Block& block) {
    const int64_t local = LocalRow(*block.tile);
    for (int m = 0; m < block.rows; ++m) {
      const int64_t row =
          (task.batch_index * call_.q_rows + local + m / block.heads) * problem_.num_heads +
          block.first_head + m % block.heads;
      AddScaled(problem_.softmax_scale, block.dq + int64_t{m} * cols_,
                call_.dq_acc + row * head_dim_, head_dim_);
    }
  }

  void StoreKeyGradients(const Task& task) {
    const TokenRun& run = workspace_.kv.runs()[task.tile->run];
    const KvBlock& block = call_.blocks[run.block];
    for (int j = 0; j < task.tile->rows; ++j) {
      const int64_t row = (task.batch_index * block.rows + run.local_begin + task.tile->begin + j) *
                              problem_.num_kv_heads +
                          task.kv_head;
      AddScaled(problem_.softmax_scale, task.dk + int64_t{j} * cols_, block.dk + row * head_dim_,
                head_dim_);
      AddScaled(1.0f, task.dv + int64_t{j} * cols_v_, block.dv + row * head_dim_v_, head_dim_v_);
    }
  }

  const BackwardCall& call_;
  const AttentionProblem& problem_;
  const BiasGradientRows dbias_;
  Workspace& workspace_;
  const Progress& progress_;
  const TileOps& ops_;
  const HeadSplit split_;
  const ScorePass terms_;
  const ScoreScale scale_;
  const int matrix_rows_;
  const int key_tile_;  // keys of a task, a multiple of every vector and of 2
  const int head_dim_;
  const int head_dim_v_;
  const int depth_;    // words of a k row
  const int depth_v_;  // words of a v row
  const int cols_;     // padded columns of k
  const int cols_v_;   // padded columns of v
};

}  // namespace

absl::Status Backward(const BackwardCall& call, void* dbias, Workspace& workspace,
                      const Progress& progress) {
  return BackwardPass(call, dbias, workspace, progress).Run();
}

}  // namespace ringattn::worker::cpu
