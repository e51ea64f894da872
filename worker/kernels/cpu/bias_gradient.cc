#include "worker/kernels/cpu/bias_gradient.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "worker/kernels/cpu/nonfinite.h"
#include "worker/kernels/cpu/score_pass.h"
#include "worker/kernels/cpu/simd/elementwise.h"
#include "worker/kernels/cpu/simd/term_ops.h"
#include "worker/kernels/cpu/wide_rows.h"
#include "worker/kernels/work.h"

namespace ringattn::worker::cpu {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Rows of q and keys that are computed at a time. The sums over what shares a bias stay in the
// task, so nothing is added by two threads.
constexpr int kRows = 48;
constexpr int kKeys = 384;

class BiasGradientPass {
 public:
  BiasGradientPass(const BiasGradientCall& call, Workspace& workspace, const Progress& progress)
      : call_(call),
        problem_(*call.problem),
        bias_(*problem_.terms.bias),
        workspace_(workspace),
        progress_(progress),
        ops_(TileOpsFor(problem_.dtype)),
        terms_(problem_, call.q_rows, call.terms),
        dtype_(bias_.float32 ? DType::kFloat32 : problem_.dtype),
        head_dim_(static_cast<int>(problem_.head_dim)),
        head_dim_v_(static_cast<int>(problem_.head_dim_v)),
        depth_(ops_.Words(head_dim_)),
        depth_v_(ops_.Words(head_dim_v_)) {}

  absl::Status Run() {
    workspace_.SetRuns(call_.q_pieces, call_.blocks);
    workspace_.CutQueries(kRows);
    workspace_.CutKeys(kKeys);
    const int64_t bytes = ScratchBytes();
    for (Scratch& scratch : workspace_.scratch) scratch.Reserve(bytes);
    const int64_t planes =
        (bias_.per_batch ? problem_.batch : 1) * (bias_.per_head ? problem_.num_heads : 1);
    const int64_t tiles = static_cast<int64_t>(workspace_.key_tiles.size());
    workspace_.pool.ParallelFor(planes * tiles, [this, tiles](int thread, int64_t task) {
      if (!progress_.stopped()) {
        RunTask(workspace_.scratch[thread], task / tiles, workspace_.key_tiles[task % tiles]);
      }
    });
    return progress_.stopped() ? absl::CancelledError("bias gradient stopped") : absl::OkStatus();
  }

 private:
  // The work of one thread: one plane of the bias and one key tile.
  struct Task {
    int64_t plane;
    const KeyTile* keys;
    int64_t packed_batch = -1;  // whose k and v are packed
    int64_t packed_head = -1;
    SourceRows k_rows;
    SourceRows v_rows;
    TermKeys keys_at;
    float* keys_transposed;
    float* values_transposed;
    float* convert;
    float* query;
    float* dout;
    float* scores;
    float* dp;
    float* add;
    float* inside;
    float* slopes;
    float* keeps;
    float* sums;  // of the plane, [kRows, kKeys]
    float lse[kRows];
    float delta[kRows];
    int32_t band_begin[kRows];
    int32_t band_end[kRows];
    int32_t visible_begin[kRows];
    int32_t visible_end[kRows];
    int64_t* key_places;
  };

  int64_t ScratchBytes() const {
    return Scratch::Bytes<float>(kKeys * depth_) + Scratch::Bytes<float>(kKeys * depth_v_) +
           Scratch::Bytes<float>(kKeys * std::max(head_dim_, head_dim_v_)) +
           Scratch::Bytes<float>(kRows * depth_) + Scratch::Bytes<float>(kRows * depth_v_) +
           7 * Scratch::Bytes<float>(kRows * kKeys) + Scratch::Bytes<int64_t>(kKeys);
  }

  void RunTask(Scratch& scratch, int64_t plane, const KeyTile& keys) {
    scratch.Restart();
    Task task;
    task.plane = plane;
    task.keys = &keys;
    task.keys_transposed = scratch.Take<float>(kKeys * depth_);
    task.values_transposed = scratch.Take<float>(kKeys * depth_v_);
    task.convert = scratch.Take<float>(kKeys * std::max(head_dim_, head_dim_v_));
    task.query = scratch.Take<float>(kRows * depth_);
    task.dout = scratch.Take<float>(kRows * depth_v_);
    for (float** tile :
         {&task.scores, &task.dp, &task.add, &task.inside, &task.slopes, &task.keeps, &task.sums}) {
      *tile = scratch.Take<float>(kRows * kKeys);
    }
    task.key_places = scratch.Take<int64_t>(kKeys);
    const int64_t document = workspace_.kv.runs()[keys.run].document;
    for (const QueryTile& queries : workspace_.query_tiles) {
      if (progress_.stopped()) return;
      if (workspace_.q.runs()[queries.run].document != document) continue;
      if (!SetBand(task, queries)) continue;
      RunBlock(task, queries);
    }
  }

  // The columns that the band lets each row see; false if none.
  bool SetBand(Task& task, const QueryTile& queries) {
    const TokenRun& q_run = workspace_.q.runs()[queries.run];
    const TokenRun& kv_run = workspace_.kv.runs()[task.keys->run];
    const Band& band = problem_.bands[kv_run.document];
    const int count = task.keys->rows;
    bool any = false;
    for (int r = 0; r < queries.rows; ++r) {
      const int64_t position = workspace_.q.PositionOf(q_run, queries.begin + r);
      const RowRange seen =
          workspace_.kv.RowsAt(kv_run, position + band.lower, position + band.upper);
      const int64_t from = std::clamp<int64_t>(seen.begin - task.keys->begin, 0, count);
      const int64_t to = std::clamp<int64_t>(seen.end - task.keys->begin, from, count);
      task.band_begin[r] = static_cast<int32_t>(from);
      task.band_end[r] = static_cast<int32_t>(to);
      any = any || from < to;
    }
    return any;
  }

  void RunBlock(Task& task, const QueryTile& queries) {
    std::fill_n(task.sums, kRows * kKeys, 0.0f);
    const int64_t heads = problem_.num_heads;
    int64_t summed = 0;
    for (int64_t b = 0; b < problem_.batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        if (PlaneOf(bias_, heads, b, h) != task.plane) continue;
        AddHead(task, queries, b, h, /*first=*/summed == 0);
        ++summed;
      }
    }
    Store(task, queries);
    int64_t pairs = 0;
    for (int r = 0; r < queries.rows; ++r) pairs += task.band_end[r] - task.band_begin[r];
    progress_.CountTile(summed * pairs * BiasGradientPairWork(head_dim_, head_dim_v_));
  }

  void PackKeys(Task& task, int64_t batch, int64_t head) {
    const int64_t kv_head = head / (problem_.num_heads / problem_.num_kv_heads);
    if (task.packed_batch == batch && task.packed_head == kv_head) return;
    task.packed_batch = batch;
    task.packed_head = kv_head;
    const TokenRun& run = workspace_.kv.runs()[task.keys->run];
    const KvBlock& block = call_.blocks[run.block];
    const int64_t row = run.local_begin + task.keys->begin;
    const int count = task.keys->rows;
    task.k_rows = RowsOf(problem_.dtype, block.k, batch, block.rows, problem_.num_kv_heads,
                         head_dim_, kv_head, row, count);
    task.v_rows = RowsOf(problem_.dtype, block.v, batch, block.rows, problem_.num_kv_heads,
                         head_dim_v_, kv_head, row, count);
    ops_.pack_right_transposed(task.k_rows, task.keys_transposed, task.convert);
    ops_.pack_right_transposed(task.v_rows, task.values_transposed, task.convert);
    task.keys_at =
        terms_.KeysOf(workspace_.kv, run, block, batch, task.keys->begin, count, task.key_places);
  }

  TermRow TermRowOf(const QueryTile& queries, int64_t batch, int64_t head, int r) const {
    const TokenRun& run = workspace_.q.runs()[queries.run];
    return {batch, head, run.local_begin + queries.begin + r, run.document,
            workspace_.q.PositionOf(run, queries.begin + r)};
  }

  float* InsideOf(const Task& task, int r) const {
    return terms_.has_inside() ? task.inside + r * kKeys : nullptr;
  }
  // Only there does the softcap come after the bias.
  bool wants_slopes() const { return terms_.has_inside() && terms_.has_slopes(); }

  void AddHead(Task& task, const QueryTile& queries, int64_t batch, int64_t head, bool first) {
    PackKeys(task, batch, head);
    int from = task.keys->rows, to = 0;
    for (int r = 0; r < queries.rows; ++r) {
      const TermRow row = TermRowOf(queries, batch, head, r);
      const int64_t at = (batch * problem_.num_heads + head) * call_.q_rows + row.local_row;
      task.lse[r] = call_.lse[at];
      task.delta[r] = call_.delta[at];
      task.visible_begin[r] = task.band_begin[r];
      task.visible_end[r] =
          task.lse[r] == kNegativeInfinity ? task.band_begin[r] : task.band_end[r];
      terms_.Addends(row, task.keys_at, task.visible_begin + r, task.visible_end + r,
                     task.add + r * kKeys, InsideOf(task, r));
      if (task.visible_begin[r] >= task.visible_end[r]) continue;
      from = std::min(from, static_cast<int>(task.visible_begin[r]));
      to = std::max(to, static_cast<int>(task.visible_end[r]));
    }
    if (from >= to) return;
    const GradientArgs gradient = Multiply(task, queries, batch, head, from, to);
    ScoreGradients(gradient, task.dp);
    for (int r = 0; r < queries.rows; ++r) AddRow(task, queries, batch, head, r, first);
  }

  // Finished scores and dp of one head.
  GradientArgs Multiply(Task& task, const QueryTile& queries, int64_t batch, int64_t head, int from,
                        int to) {
    const int64_t local = TermRowOf(queries, batch, head, 0).local_row;
    const SourceRows q = RowsOf(problem_.dtype, call_.q, batch, call_.q_rows, problem_.num_heads,
                                head_dim_, head, local, queries.rows);
    const SourceRows dout = RowsOf(problem_.dtype, call_.dout, batch, call_.q_rows,
                                   problem_.num_heads, head_dim_v_, head, local, queries.rows);
    ops_.pack_left(q, NegateQuery(problem_), task.query, depth_);
    ops_.pack_left(dout, false, task.dout, depth_v_);
    GemmArgs scores;
    scores.rows = queries.rows;
    scores.col_begin = from / ops_.panel * ops_.panel;
    scores.col_end = ops_.PadColumns(to);
    scores.depth_end = scores.right_depth = depth_;
    scores.left = task.query;
    scores.left_stride = depth_;
    scores.right = task.keys_transposed;
    scores.right_cols = ops_.PadColumns(task.keys->rows);
    scores.c = task.scores;
    scores.c_stride = kKeys;
    ops_.gemm(scores);
    GemmArgs dp = scores;
    dp.depth_end = dp.right_depth = depth_v_;
    dp.left = task.dout;
    dp.left_stride = depth_v_;
    dp.right = task.values_transposed;
    dp.c = task.dp;
    ops_.gemm(dp);
    for (int r = 0; r < queries.rows; ++r) {
      if (task.visible_begin[r] >= task.visible_end[r]) continue;
      const TermRow row = TermRowOf(queries, batch, head, r);
      terms_.Finish(row, task.keys_at, task.add + r * kKeys, InsideOf(task, r), scores.col_begin,
                    scores.col_end, task.scores + r * kKeys,
                    wants_slopes() ? task.slopes + r * kKeys : nullptr);
      if (!terms_.drops()) continue;
      terms_.Keeps(row, task.keys_at, task.visible_begin[r], task.visible_end[r],
                   task.keeps + r * kKeys);
    }
    GradientArgs gradient;
    gradient.rows = queries.rows;
    gradient.col_begin = scores.col_begin;
    gradient.col_end = scores.col_end;
    gradient.scale = kFinished;
    gradient.visible_begin = task.visible_begin;
    gradient.visible_end = task.visible_end;
    gradient.lse = task.lse;
    gradient.delta = task.delta;
    gradient.scores = task.scores;
    gradient.dp = task.dp;
    gradient.stride = kKeys;
    gradient.terms = true;
    gradient.slopes = wants_slopes() ? task.slopes : nullptr;
    gradient.keeps = terms_.drops() ? task.keeps : nullptr;
    return gradient;
  }

  // A row of one head into the plane's sums; what left fp32's range on its way is done again.
  void AddRow(Task& task, const QueryTile& queries, int64_t batch, int64_t head, int r,
              bool first) {
    const int from = task.visible_begin[r], count = task.visible_end[r] - from;
    if (count <= 0) return;
    float* ds = task.dp + r * kKeys + from;
    if (!std::isfinite(MaxMagnitude({.data = ds, .rows = 1, .cols = count}))) {
      for (int c = 0; c < count; ++c) {
        if (!std::isfinite(ds[c])) ds[c] = InDouble(task, queries, batch, head, r, from + c, ds[c]);
      }
    }
    float* sums = task.sums + r * kKeys + from;
    // A sum of one is that one, -0 too.
    if (first) {
      std::copy_n(ds, count, sums);
    } else {
      AddScaled(1.0f, ds, sums, count);
    }
  }

  float InDouble(const Task& task, const QueryTile& queries, int64_t batch, int64_t head, int r,
                 int column, float otherwise) const {
    const TermRow row = TermRowOf(queries, batch, head, r);
    const PairTerm term = terms_.TermOf(row, task.keys_at.At(column));
    if (!term.visible) return 0.0f;
    float a[kMaxHeadDim], b[kMaxHeadDim];
    const auto dot = [&](const void* tensor, int dim, const SourceRows& rows) {
      LoadRow(RowsOf(problem_.dtype, tensor, batch, call_.q_rows, problem_.num_heads, dim, head,
                     row.local_row, 1),
              0, a);
      LoadRow(rows, column, b);
      double sum = 0;
      for (int d = 0; d < dim; ++d) sum += static_cast<double>(a[d]) * b[d];
      return sum;
    };
    double slope;
    const double score =
        Saturate(terms_.ScoreOf(term, dot(call_.q, head_dim_, task.k_rows), &slope));
    const double p = std::exp(std::min(0.0, score - task.lse[r]));
    const double dp = dot(call_.dout, head_dim_v_, task.v_rows) * term.keep;
    const double ds = p * (dp - task.delta[r]) * (wants_slopes() ? slope : 1.0);
    return std::isfinite(ds) ? Saturate(ds) : otherwise;
  }

  void Store(const Task& task, const QueryTile& queries) const {
    const int64_t bytes = ElementBytes(dtype_);
    const ScoreTerms& terms = problem_.terms;
    for (int r = 0; r < queries.rows; ++r) {
      const int from = task.band_begin[r], count = task.band_end[r] - from;
      if (count <= 0) continue;
      const TermRow at = TermRowOf(queries, 0, 0, r);
      const int64_t plane_row =
          task.plane * terms.PlaneRows(call_.q_rows) + terms.PairRow(at.local_row, at.position);
      char* row = static_cast<char*>(call_.dbias) + plane_row * terms.columns * bytes;
      const float* sums = task.sums + r * kKeys + from;
      if (task.keys_at.plane_columns == nullptr) {
        Convert(dtype_, sums, row + task.keys_at.PlaneColumnOf(from) * bytes, count);
        continue;
      }
      for (int c = 0; c < count; ++c) {
        Convert(dtype_, sums + c, row + task.keys_at.PlaneColumnOf(from + c) * bytes, 1);
      }
    }
  }

  const BiasGradientCall& call_;
  const AttentionProblem& problem_;
  const BiasForm& bias_;
  Workspace& workspace_;
  const Progress& progress_;
  const TileOps& ops_;
  const ScorePass terms_;
  const DType dtype_;
  const int head_dim_;
  const int head_dim_v_;
  const int depth_;
  const int depth_v_;
};

}  // namespace

absl::Status BiasGradient(const BiasGradientCall& call, Workspace& workspace,
                          const Progress& progress) {
  return BiasGradientPass(call, workspace, progress).Run();
}

}  // namespace ringattn::worker::cpu
