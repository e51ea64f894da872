// The pass between the product q.k and the softmax for problems with score terms: what is added
// to each score or hides it, and what dropout keeps, a row of a key tile at a time. Finished
// scores are in natural units; kFinished is their ScoreScale.
#ifndef RINGATTN_WORKER_KERNELS_CPU_SCORE_PASS_H_
#define RINGATTN_WORKER_KERNELS_CPU_SCORE_PASS_H_

#include <cstdint>

#include "worker/kernels/attention_kernel.h"
#include "worker/kernels/cpu/simd/tile_ops.h"
#include "worker/kernels/cpu/workspace/scratch.h"
#include "worker/kernels/cpu/workspace/token_runs.h"
#include "worker/kernels/philox.h"

namespace ringattn::worker::cpu {

inline constexpr ScoreScale kFinished{1.0f, 1.44269504f, 0.0f};

// A query row's head.
struct TermRow {
  int64_t batch = 0;
  int64_t head = 0;
  int64_t local_row = 0;
  int64_t document = 0;
  int64_t position = 0;
};

// Keys of one tile: their places by column.
struct TermKeys {
  int count = 0;
  int64_t first_position = 0;
  // Position of column c where positions are not first_position + c; else null.
  const int64_t* positions = nullptr;
  // Likewise of column c in the rows of a bias and a mask (ScoreTerms::PairColumn).
  int64_t first_plane_column = 0;
  const int64_t* plane_columns = nullptr;
  const int32_t* segment_ids = nullptr;  // by column

  int64_t PositionOf(int column) const {
    return positions == nullptr ? first_position + column : positions[column];
  }
  int64_t PlaneColumnOf(int column) const {
    return plane_columns == nullptr ? first_plane_column + column : plane_columns[column];
  }
  // The key of one column.
  TermKeys At(int column) const;
};

// A pair's terms as one sees them alone.
struct PairTerm {
  bool visible = true;
  double before_softcap = 0.0;
  double after_softcap = 0.0;
  float keep = 1.0f;
};

// The score terms of one call's queries; `problem` must outlive it. Immutable, so any thread may
// use it.
class ScorePass {
 public:
  ScorePass(const AttentionProblem& problem, int64_t q_rows, const TermOperands& operands);

  bool any() const { return terms_.any(); }
  bool masks() const { return terms_.masks(); }
  bool drops() const { return terms_.dropout.threshold != 0; }
  // The largest factor of a weight.
  float keep_scale() const { return drops() ? terms_.keep_scale() : 1.0f; }
  bool has_inside() const { return terms_.bias.has_value() && terms_.bias->before_softcap; }
  bool has_slopes() const { return problem_.softcap > 0; }
  // All heads of a row have the same addends.
  bool SameForHeads() const;

  // Keys [begin, begin + count) of a run whose rows lie in `block`.
  //   positions  [count], used where positions are not consecutive
  TermKeys KeysOf(const TokenRuns& kv, const TokenRun& run, const KvBlock& block, int64_t batch,
                  int64_t begin, int count, int64_t* positions) const;

  // Whether scores have addends of their pairs. Distances are none: Finish knows them.
  bool has_addends() const { return terms_.masks(); }
  // For the columns [*begin, *end): what is added to each score, -inf where it is hidden (`add`,
  // where has_addends), and what before the softcap (`inside`, where has_inside). Then narrows the
  // range to the visible ones; empty if there are none.
  void Addends(const TermRow& row, const TermKeys& keys, int32_t* begin, int32_t* end, float* add,
               float* inside) const;
  // Columns [begin, end), multiples of 16, of a row of products become scores.
  //   slopes  null if they are not requested
  void Finish(const TermRow& row, const TermKeys& keys, const float* add, const float* inside,
              int begin, int end, float* scores, float* slopes) const;
  // Dropout's factors of the columns [begin, end).
  void Keeps(const TermRow& row, const TermKeys& keys, int begin, int end, float* factors) const;

  // The same of one pair. REQUIRES: `key` is one key.
  PairTerm TermOf(const TermRow& row, const TermKeys& key) const;
  // The score of a pair with this product, in double; slope by scale * q.k.
  double ScoreOf(const PairTerm& term, double product, double* slope) const;

 private:
  int64_t PlaneRow(int64_t plane, const TermRow& row) const {
    return plane * terms_.PlaneRows(q_rows_) + terms_.PairRow(row.local_row, row.position);
  }
  const char* BiasRow(const TermRow& row) const;
  const uint8_t* MaskRow(const TermRow& row) const;
  float SlopeOf(const TermRow& row) const;
  PhiloxRow StreamOf(const TermRow& row) const;
  int64_t Aligned(const TermRow& row) const { return row.position + terms_.shifts[row.document]; }
  int32_t SegmentIdOf(const TermRow& row) const {
    return operands_.q_segment_ids[row.batch * q_rows_ + row.local_row];
  }
  void AddBias(const TermRow& row, const TermKeys& keys, int begin, int count, float* add,
               float* inside) const;
  // For keys whose positions are not consecutive.
  void SubtractDistances(const TermRow& row, const TermKeys& keys, int begin, int end,
                         float* scores) const;
  void HideByMask(const TermRow& row, const TermKeys& keys, int begin, int count, float* add) const;

  const AttentionProblem& problem_;
  const ScoreTerms& terms_;
  const int64_t q_rows_;
  const TermOperands operands_;
  const DType bias_dtype_;
};

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_SCORE_PASS_H_
