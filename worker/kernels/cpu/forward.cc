#include "worker/kernels/cpu/forward.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "worker/kernels/cpu/finish_row.h"
#include "worker/kernels/cpu/float8_rows.h"
#include "worker/kernels/cpu/nonfinite.h"
#include "worker/kernels/cpu/score_pass.h"
#include "worker/kernels/cpu/simd/elementwise.h"
#include "worker/kernels/cpu/wide_rows.h"
#include "worker/kernels/work.h"

namespace ringattn::worker::cpu {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Scores exist for this many rows at a time, which keeps them near L1 and lets a
// diagonal tile skip what none of them sees.
constexpr int kRowGroup = 12;

// A task holds some rows of q with their outputs and streams packed key tiles
// past them: the more rows, the less packing costs.
int ChooseMatrixRows(const ForwardCall& call) {
  const AttentionProblem& problem = *call.problem;
  if (problem.tuning.tile_q != 0) return problem.tuning.tile_q;
  const int rows = std::max(problem.head_dim, problem.head_dim_v) <= 128 ? 480 : 240;
  // Small calls need tasks for many threads more than they need efficient ones.
  const int64_t all_rows = problem.batch * call.q_rows * problem.num_heads;
  return all_rows < 32 * rows ? 120 : rows;
}

// Half a typical L2 of packed keys and values, within reason.
int ChooseKeyTile(const Tuning& tuning, int words_per_key) {
  if (tuning.tile_kv != 0) return tuning.tile_kv;
  return std::clamp(131072 / words_per_key, 128, 1024) / 64 * 64;
}

class ForwardPass {
 public:
  ForwardPass(const ForwardCall& call, Workspace& workspace, const Progress& progress)
      : call_(call),
        problem_(*call.problem),
        workspace_(workspace),
        progress_(progress),
        float8_(call),
        ops_(float8_.any() ? Float32TileOps() : TileOpsFor(problem_.dtype)),
        split_(problem_),
        terms_(problem_, call.q_rows, call.terms),
        scale_(terms_.any() ? kFinished : ScaleOf(problem_)),
        head_dim_(static_cast<int>(problem_.head_dim)),
        depth_(ops_.Words(head_dim_)),
        cols_v_(ops_.PadColumns(static_cast<int>(problem_.head_dim_v))),
        matrix_rows_(ChooseMatrixRows(call)),
        key_tile_(ChooseKeyTile(problem_.tuning, depth_ + cols_v_ / ops_.elements_per_word)),
        wide_rows_(call, workspace.kv, terms_, float8_) {}

  absl::Status Run() {
    workspace_.SetRuns(call_.q_pieces, call_.blocks);
    workspace_.CutQueries(split_.RowsPerTile(matrix_rows_));
    OrderTiles();
    if (float8_.any()) float8_.FindScales(workspace_.pool);
    const int64_t bytes = ScratchBytes();
    for (Scratch& scratch : workspace_.scratch) scratch.Reserve(bytes);
    const int64_t tasks = static_cast<int64_t>(workspace_.query_tiles.size()) * problem_.batch *
                          problem_.num_kv_heads * split_.parts;
    workspace_.pool.ParallelFor(tasks, [this](int thread, int64_t task) {
      if (!progress_.stopped()) RunTask(workspace_.scratch[thread], task);
    });
    if (!progress_.stopped()) FinishRowsOutsidePieces(call_, workspace_.q);
    return progress_.stopped() ? absl::CancelledError("forward kernel stopped") : absl::OkStatus();
  }

 private:
  // One task's rows and working memory.
  struct Task {
    const QueryTile* tile;
    int64_t batch_index;
    int64_t kv_head;
    int64_t first_head;
    int heads;
    int rows;  // matrix rows
    float* query;
    float* out;
    float* row_max;
    float* row_sum;
    float* correction;
    float* scores;
    float* weights;
    float* keys;
    float* values;
    float* convert;
    float* rounded;  // rows of q, k or v, of calls in e4m3
    float* out_row;
    int64_t* positions;      // per tile row
    int32_t* visible_begin;  // per matrix row, relative to the key tile
    int32_t* visible_end;
    // For problems with score terms.
    uint8_t* sees;        // per matrix row: some key so far
    float* add;           // rows of a group, a row every key_tile_; null: see has_addends
    float* inside;        // a row every key_tile_; null: see has_addends
    float* keeps;         // a row every key_tile_; null: see has_addends
    int64_t* key_places;  // see ScorePass::KeysOf
    TermKeys keys_at;
  };

  int64_t MaxRows() const { return int64_t{split_.RowsPerTile(matrix_rows_)} * split_.heads; }

  int64_t ScratchBytes() const {
    const int64_t rows = MaxRows();
    return Scratch::Bytes<float>(rows * depth_) + Scratch::Bytes<float>(rows * cols_v_) +
           3 * Scratch::Bytes<float>(rows) + 2 * Scratch::Bytes<float>(kRowGroup * key_tile_) +
           Scratch::Bytes<float>(key_tile_ * depth_) + Scratch::Bytes<float>(key_tile_ * cols_v_) +
           Scratch::Bytes<float>(key_tile_ * head_dim_) + Scratch::Bytes<float>(cols_v_) +
           Scratch::Bytes<int64_t>(rows) + 2 * Scratch::Bytes<int32_t>(rows) +
           (terms_.any() ? TermBytes() : 0) +
           (float8_.any() ? Scratch::Bytes<float>(RoundedCount()) : 0);
  }

  int64_t RoundedCount() const {
    return std::max<int64_t>(MaxRows(), key_tile_) *
           std::max(problem_.head_dim, problem_.head_dim_v);
  }

  int64_t TermBytes() const {
    return Scratch::Bytes<uint8_t>(MaxRows()) + 3 * Scratch::Bytes<float>(kRowGroup * key_tile_) +
           Scratch::Bytes<int64_t>(key_tile_);
  }

  // Keys that the tile reaches (a hull) in one kv run.
  RowRange Reach(const QueryTile& tile, const TokenRun& kv_run) const {
    const Band& band = problem_.bands[kv_run.document];
    return workspace_.kv.RowsAt(kv_run, tile.first_position + band.lower,
                                tile.last_position + band.upper);
  }

  // Those of a call that only begins or ends a partial reach none; their rows are not read.
  static bool ReachesKeys(const QueryTile& tile) { return tile.cost > 0; }

  // Longest first, so that no thread is left with a long task at the end.
  void OrderTiles() {
    const TokenRuns& kv = workspace_.kv;
    for (QueryTile& tile : workspace_.query_tiles) {
      const RowRange runs = kv.RunsOf(workspace_.q.runs()[tile.run].document);
      for (int64_t r = runs.begin; r < runs.end; ++r) {
        tile.cost += Reach(tile, kv.runs()[r]).size() * tile.rows;
      }
    }
    std::stable_sort(workspace_.query_tiles.begin(), workspace_.query_tiles.end(),
                     [](const QueryTile& a, const QueryTile& b) { return a.cost > b.cost; });
  }

  void RunTask(Scratch& scratch, int64_t index) {
    Task task = MakeTask(scratch, index);
    const TokenRuns& kv = workspace_.kv;
    const RowRange runs = kv.RunsOf(workspace_.q.runs()[task.tile->run].document);
    for (int64_t r = runs.begin; r < runs.end; ++r) {
      const TokenRun& run = kv.runs()[r];
      const Band& band = problem_.bands[run.document];
      const RowRange reach = Reach(*task.tile, run);
      const RowRange full = kv.RowsAt(run, task.tile->last_position + band.lower,
                                      task.tile->first_position + band.upper);
      for (int64_t begin = reach.begin; begin < reach.end; begin += key_tile_) {
        if (progress_.stopped()) return;
        const int64_t end = std::min(reach.end, begin + key_tile_);
        const bool unmasked = full.begin <= begin && end <= full.end;
        AttendTile(task, run, begin, static_cast<int>(end - begin), unmasked);
        progress_.CountTile(VisiblePairs(task) * ForwardPairWork(head_dim_, problem_.head_dim_v));
      }
    }
    for (int m = 0; m < task.rows; ++m) {
      const RowSums sums = ReachesKeys(*task.tile) ? SumsOf(task, m) : RowSums{};
      FinishRow(call_, scale_, task.batch_index, task.first_head + m % task.heads,
                LocalRow(*task.tile) + m / task.heads, sums, task.out_row);
    }
  }

  // The sums of matrix row m, done again if they left fp32's range.
  RowSums SumsOf(const Task& task, int m) {
    float* out = task.out + int64_t{m} * cols_v_;
    const RowSums sums{out, task.row_max[m], task.row_sum[m]};
    const int head_dim_v = static_cast<int>(problem_.head_dim_v);
    const TokenRun& run = workspace_.q.runs()[task.tile->run];
    const QueryRowId row{task.batch_index, task.first_head + m % task.heads,
                         LocalRow(*task.tile) + m / task.heads, run.document,
                         task.positions[m / task.heads]};
    // A sum of 0 is right for rows without keys only.
    const bool in_range =
        sums.sum == 0.0f
            ? !(terms_.any() ? task.sees[m] != 0 : wide_rows_.SeesKeys(row))
            : std::isfinite(sums.sum) && std::isfinite(sums.max) &&
                  std::isfinite(MaxMagnitude({.data = out, .rows = 1, .cols = head_dim_v}));
    float lse;
    if (in_range || !wide_rows_.Attend(row, out, &lse)) return sums;
    return {out, 0.0f, 1.0f, lse};
  }

  int64_t LocalRow(const QueryTile& tile) const {
    return workspace_.q.runs()[tile.run].local_begin + tile.begin;
  }

  Task MakeTask(Scratch& scratch, int64_t index) {
    Task task;
    const int64_t part = index % split_.parts;
    index /= split_.parts;
    task.kv_head = index % problem_.num_kv_heads;
    index /= problem_.num_kv_heads;
    task.batch_index = index % problem_.batch;
    task.tile = &workspace_.query_tiles[index / problem_.batch];
    task.first_head = task.kv_head * split_.group_size + part * split_.heads;
    task.heads = split_.HeadsOf(static_cast<int>(part));
    task.rows = task.tile->rows * task.heads;

    const int64_t rows = MaxRows();
    scratch.Restart();
    task.query = scratch.Take<float>(rows * depth_);
    task.out = scratch.Take<float>(rows * cols_v_);
    task.row_max = scratch.Take<float>(rows);
    task.row_sum = scratch.Take<float>(rows);
    task.correction = scratch.Take<float>(rows);
    task.scores = scratch.Take<float>(kRowGroup * key_tile_);
    task.weights =
        ops_.elements_per_word == 1 ? task.scores : scratch.Take<float>(kRowGroup * key_tile_);
    task.keys = scratch.Take<float>(key_tile_ * depth_);
    task.values = scratch.Take<float>(key_tile_ * cols_v_);
    task.convert = scratch.Take<float>(key_tile_ * head_dim_);
    task.out_row = scratch.Take<float>(cols_v_);
    task.rounded = float8_.any() ? scratch.Take<float>(RoundedCount()) : nullptr;
    task.positions = scratch.Take<int64_t>(rows);
    task.visible_begin = scratch.Take<int32_t>(rows);
    task.visible_end = scratch.Take<int32_t>(rows);
    if (terms_.any()) {
      task.sees = scratch.Take<uint8_t>(rows);
      std::fill_n(task.sees, task.rows, uint8_t{0});
      task.add = terms_.has_addends() ? scratch.Take<float>(kRowGroup * key_tile_) : nullptr;
      task.inside = terms_.has_inside() ? scratch.Take<float>(kRowGroup * key_tile_) : nullptr;
      task.keeps = terms_.drops() ? scratch.Take<float>(kRowGroup * key_tile_) : nullptr;
      task.key_places = scratch.Take<int64_t>(key_tile_);
    }

    if (!ReachesKeys(*task.tile)) return task;
    std::fill_n(task.out, int64_t{task.rows} * cols_v_, 0.0f);
    std::fill_n(task.row_max, task.rows, kNegativeInfinity);
    std::fill_n(task.row_sum, task.rows, 0.0f);
    const TokenRun& run = workspace_.q.runs()[task.tile->run];
    for (int r = 0; r < task.tile->rows; ++r) {
      task.positions[r] = workspace_.q.PositionOf(run, task.tile->begin + r);
    }
    SourceRows source =
        RowsOfHeads(problem_.dtype, call_.q, task.batch_index, call_.q_rows, problem_.num_heads,
                    head_dim_, task.first_head, task.heads, LocalRow(*task.tile), task.tile->rows);
    source = Operand(task, Float8Rows::kQ, source);
    ops_.pack_left(source, NegateQuery(problem_), task.query, depth_);
    return task;
  }

  // Returns the operand of the product: the rows themselves, or rounded ones, valid until the
  // next call.
  SourceRows Operand(const Task& task, Float8Rows::Tensor tensor, const SourceRows& rows) const {
    if (!float8_.any()) return rows;
    return float8_.Rounded(tensor, task.batch_index, task.kv_head, rows, task.rounded);
  }

  // Adds the keys [begin, begin + count) of the run to all rows of the task.
  void AttendTile(Task& task, const TokenRun& run, int64_t begin, int count, bool unmasked) {
    const KvBlock& block = call_.blocks[run.block];
    const int64_t row = run.local_begin + begin;
    const SourceRows keys = RowsOf(problem_.dtype, block.k, task.batch_index, block.rows,
                                   problem_.num_kv_heads, head_dim_, task.kv_head, row, count);
    SourceRows values =
        RowsOf(problem_.dtype, block.v, task.batch_index, block.rows, problem_.num_kv_heads,
               problem_.head_dim_v, task.kv_head, row, count);
    ops_.pack_right_transposed(Operand(task, Float8Rows::kK, keys), task.keys, task.convert);
    values = Operand(task, Float8Rows::kV, values);
    const bool values_not_finite = ops_.pack_right(values, task.values);
    SetVisibleRanges(task, run, begin, count, unmasked);
    if (terms_.any()) {
      task.keys_at =
          terms_.KeysOf(workspace_.kv, run, block, task.batch_index, begin, count, task.key_places);
    }
    for (int first = 0; first < task.rows; first += kRowGroup) {
      AttendGroup(task, first, std::min(kRowGroup, task.rows - first), count,
                  values_not_finite ? &values : nullptr);
    }
  }

  void SetVisibleRanges(Task& task, const TokenRun& run, int64_t begin, int count, bool unmasked) {
    if (unmasked) {
      std::fill_n(task.visible_begin, task.rows, 0);
      std::fill_n(task.visible_end, task.rows, count);
      return;
    }
    const Band& band = problem_.bands[run.document];
    for (int r = 0; r < task.tile->rows; ++r) {
      const RowRange keys =
          workspace_.kv.RowsAt(run, task.positions[r] + band.lower, task.positions[r] + band.upper);
      const int64_t from = std::clamp<int64_t>(keys.begin - begin, 0, count);
      const int64_t to = std::clamp<int64_t>(keys.end - begin, from, count);
      std::fill_n(task.visible_begin + r * task.heads, task.heads, static_cast<int32_t>(from));
      std::fill_n(task.visible_end + r * task.heads, task.heads, static_cast<int32_t>(to));
    }
  }

  // Counts the visible pairs of the current key tile.
  static int64_t VisiblePairs(const Task& task) {
    int64_t pairs = 0;
    for (int m = 0; m < task.rows; ++m) pairs += task.visible_end[m] - task.visible_begin[m];
    return pairs;
  }

  TermRow TermRowOf(const Task& task, int m) const {
    return {task.batch_index, task.first_head + m % task.heads,
            LocalRow(*task.tile) + m / task.heads, workspace_.q.runs()[task.tile->run].document,
            task.positions[m / task.heads]};
  }

  // Row r of a group's tile; null of none.
  float* GroupRow(float* tile, int r) const {
    return tile == nullptr ? nullptr : tile + int64_t{r} * key_tile_;
  }

  // Stores the score terms' addends for the rows of a group and the columns that they leave
  // visible.
  void SetAddends(Task& task, int first, int rows, int32_t* visible_begin, int32_t* visible_end) {
    for (int r = 0; r < rows; ++r) {
      const int m = first + r;
      float* add = GroupRow(task.add, r);
      float* inside = GroupRow(task.inside, r);
      if (add != nullptr && r > 0 && m % task.heads != 0 && terms_.SameForHeads()) {
        // As the head before.
        visible_begin[r] = visible_begin[r - 1];
        visible_end[r] = visible_end[r - 1];
        const int from = visible_begin[r], to = visible_end[r];
        if (from < to) {
          std::copy(add - key_tile_ + from, add - key_tile_ + to, add + from);
          if (inside != nullptr) {
            std::copy(inside - key_tile_ + from, inside - key_tile_ + to, inside + from);
          }
        }
      } else {
        visible_begin[r] = task.visible_begin[m];
        visible_end[r] = task.visible_end[m];
        terms_.Addends(TermRowOf(task, m), task.keys_at, visible_begin + r, visible_end + r, add,
                       inside);
      }
      if (visible_begin[r] < visible_end[r]) task.sees[m] = 1;
    }
  }

  // Products become finished scores, and dropout's factors are drawn.
  void FinishScores(const Task& task, int first, int rows, const SoftmaxArgs& softmax) {
    for (int r = 0; r < rows; ++r) {
      if (softmax.visible_begin[r] >= softmax.visible_end[r]) continue;
      const TermRow row = TermRowOf(task, first + r);
      terms_.Finish(row, task.keys_at, GroupRow(task.add, r), GroupRow(task.inside, r),
                    softmax.col_begin, softmax.col_end, GroupRow(softmax.scores, r), nullptr);
      if (!terms_.drops()) continue;
      terms_.Keeps(row, task.keys_at, softmax.visible_begin[r], softmax.visible_end[r],
                   GroupRow(task.keeps, r));
    }
  }

  // Matrix rows [first, first + rows) against the packed key tile.
  // `suspect_values`: the tile's values if any is NaN or infinite, else null.
  void AttendGroup(Task& task, int first, int rows, int count, const SourceRows* suspect_values) {
    const int32_t* visible_begin = task.visible_begin + first;
    const int32_t* visible_end = task.visible_end + first;
    int32_t left_begin[kRowGroup], left_end[kRowGroup];
    if (terms_.any()) {
      SetAddends(task, first, rows, left_begin, left_end);
      visible_begin = left_begin;
      visible_end = left_end;
    }
    int from = count;
    int to = 0;
    bool uniform = !terms_.masks();
    for (int r = 0; r < rows; ++r) {
      if (visible_begin[r] < visible_end[r]) {
        from = std::min(from, visible_begin[r]);
        to = std::max(to, visible_end[r]);
      }
      uniform = uniform && visible_begin[r] == 0 && visible_end[r] == count;
    }
    if (from >= to) return;

    GemmArgs scores;
    scores.rows = rows;
    scores.col_begin = from / ops_.panel * ops_.panel;
    scores.col_end = ops_.PadColumns(to);
    scores.depth_end = depth_;
    scores.left = task.query + int64_t{first} * depth_;
    scores.left_stride = depth_;
    scores.right = task.keys;
    scores.right_cols = ops_.PadColumns(count);
    scores.right_depth = depth_;
    scores.c = task.scores;
    scores.c_stride = key_tile_;
    ops_.gemm(scores);

    SoftmaxArgs softmax;
    softmax.rows = rows;
    softmax.col_begin = scores.col_begin;
    softmax.col_end = scores.col_end;
    softmax.scale = scale_;
    softmax.visible_begin = visible_begin;
    softmax.visible_end = visible_end;
    softmax.scores = task.scores;
    softmax.scores_stride = key_tile_;
    softmax.weights = task.weights;
    softmax.weights_stride = key_tile_ / ops_.elements_per_word;
    softmax.row_max = task.row_max + first;
    softmax.row_sum = task.row_sum + first;
    softmax.correction = task.correction + first;
    if (terms_.any()) {
      FinishScores(task, first, rows, softmax);
      if (terms_.drops()) softmax.keeps = task.keeps;
    }
    ops_.softmax(softmax);
    for (int r = 0; float8_.any() && r < rows; ++r) {
      Float8Rows::RoundProbabilities(softmax.weights + r * softmax.weights_stride,
                                     softmax.col_begin, softmax.col_end);
    }

    if (suspect_values != nullptr && !uniform) {
      AddVisibleValues(task, first, rows, softmax, *suspect_values);
      return;
    }
    GemmArgs outputs;
    outputs.rows = rows;
    outputs.col_end = cols_v_;
    outputs.depth_begin = scores.col_begin / ops_.elements_per_word;
    outputs.depth_end = ops_.Words(std::min(scores.col_end, count));
    outputs.left = task.weights;
    outputs.left_stride = softmax.weights_stride;
    outputs.right = task.values;
    outputs.right_cols = cols_v_;
    outputs.right_depth = ops_.Words(count);
    outputs.c = task.out + int64_t{first} * cols_v_;
    outputs.c_stride = cols_v_;
    outputs.accumulate = true;
    outputs.row_scale = softmax.correction;
    ops_.gemm(outputs);
  }

  // The product of weights and values key by key: a weight of 0 times a masked
  // key's NaN would be NaN, so masked keys must not be touched at all.
  void AddVisibleValues(Task& task, int first, int rows, const SoftmaxArgs& softmax,
                        const SourceRows& values) {
    for (int r = 0; r < rows; ++r) {
      float* out = task.out + int64_t{first + r} * cols_v_;
      Scale(softmax.correction[r], out, out, values.cols);
      const float* words = softmax.weights + r * softmax.weights_stride;
      for (int j = softmax.visible_begin[r]; j < softmax.visible_end[r]; ++j) {
        if (terms_.masks() && task.add[int64_t{r} * key_tile_ + j] == kNegativeInfinity) continue;
        AddWeightedRow(values, j, PackedElement(ops_, words, j), task.out_row, out);
      }
    }
  }

  const ForwardCall& call_;
  const AttentionProblem& problem_;
  Workspace& workspace_;
  const Progress& progress_;
  Float8Rows float8_;
  const TileOps& ops_;
  const HeadSplit split_;
  const ScorePass terms_;
  const ScoreScale scale_;
  const int head_dim_;
  const int depth_;        // words of a q or k row
  const int cols_v_;       // padded columns of v
  const int matrix_rows_;  // of a task
  const int key_tile_;     // keys packed at a time
  WideRows wide_rows_;
};

}  // namespace

absl::Status Forward(const ForwardCall& call, Workspace& workspace, const Progress& progress) {
  return ForwardPass(call, workspace, progress).Run();
}

}  // namespace ringattn::worker::cpu
