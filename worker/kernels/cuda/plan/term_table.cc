#include "worker/kernels/cuda/plan/term_table.h"

#include <cassert>
#include <map>

namespace ringattn::worker::cuda {
namespace {

// The blocks' pieces with their indices over all blocks, as in the plans.
struct BlockSpan {
  const KvBlock* block;
  const Piece* piece;
};

std::vector<BlockSpan> KeyPieces(const std::vector<KvBlock>& blocks) {
  std::vector<BlockSpan> pieces;
  for (const KvBlock& block : blocks) {
    for (const Piece& piece : block.pieces) pieces.push_back({&block, &piece});
  }
  return pieces;
}

TermRange RangeOf(const AttentionProblem& problem, const Piece& q, int64_t q_row,
                  const BlockSpan& keys, int64_t k_row) {
  TermRange range;
  range.q_position = q.PositionOf(q_row - q.local_begin);
  range.k_position = keys.piece->PositionOf(k_row - keys.piece->local_begin);
  range.plane_row = problem.terms.PairRow(q_row, range.q_position);
  range.plane_column = problem.terms.PairColumn(k_row, range.k_position);
  // A deterministic problem may have no terms, and then no shifts.
  if (!problem.terms.shifts.empty()) range.shift = problem.terms.shifts[q.document];
  range.segment_ids = keys.block->segment_ids;
  range.document = static_cast<int32_t>(problem.terms.BatchRow(q.document, q.document));
  return range;
}

}  // namespace

TermParams TermsOf(const AttentionProblem& problem, const TermOperands& operands, int64_t q_rows) {
  const ScoreTerms& terms = problem.terms;
  TermParams params;
  params.dtype = problem.dtype;
  params.packed = terms.packed;
  params.slopes_per_batch = static_cast<int64_t>(terms.alibi_slopes.size()) != problem.num_heads;
  params.by_keys = terms.by_keys;
  params.plane_rows = terms.PlaneRows(q_rows);
  params.columns = terms.columns;
  if (terms.bias.has_value()) {
    params.bias = operands.bias;
    params.bias_dtype = terms.bias->float32 ? DType::kFloat32 : problem.dtype;
    params.bias_per_batch = terms.bias->per_batch;
    params.bias_per_head = terms.bias->per_head;
    params.bias_before_softcap = terms.bias->before_softcap;
  }
  if (terms.mask.has_value()) {
    params.mask = operands.mask;
    params.mask_row_bytes = terms.mask_row_bytes();
    params.mask_per_batch = terms.mask->per_batch;
    params.mask_per_head = terms.mask->per_head;
    params.mask_bits = terms.mask->bits;
  }
  if (terms.segment_ids) params.q_segment_ids = operands.q_segment_ids;
  const DropoutForm& dropout = terms.dropout;
  params.threshold = dropout.threshold;
  params.keep_scale = terms.keep_scale();
  params.key0 = static_cast<uint32_t>(dropout.seed);
  params.key1 = static_cast<uint32_t>(dropout.seed >> 32);
  params.first_batch = dropout.first_batch;
  params.first_head = dropout.first_head;
  params.first_query = dropout.first_query;
  params.first_key = dropout.first_key;
  params.head_step = dropout.head_step;
  return params;
}

std::vector<TermRange> TermRangesOf(const ForwardCall& call, const ForwardPlan& plan) {
  const std::vector<BlockSpan> keys = KeyPieces(call.blocks);
  std::map<int64_t, const Piece*> queries;  // by first row
  for (const Piece& piece : call.q_pieces) {
    if (piece.length > 0) queries[piece.local_begin] = &piece;
  }
  std::vector<TermRange> ranges(plan.ranges.size());
  for (const ForwardTile& tile : plan.tiles) {
    const auto after = queries.upper_bound(tile.q_row_begin);
    assert(after != queries.begin());
    const Piece& q = *std::prev(after)->second;
    for (int32_t i = tile.range_begin; i < tile.range_end; ++i) {
      const KvRange& range = plan.ranges[i];
      ranges[i] = RangeOf(*call.problem, q, tile.q_row_begin, keys[range.piece], range.row_begin);
    }
  }
  return ranges;
}

std::vector<TermRange> TermRangesOf(const BackwardCall& call, const BackwardPlan& plan) {
  const std::vector<BlockSpan> keys = KeyPieces(call.blocks);
  std::vector<TermRange> ranges(plan.ranges.size());
  for (const BackwardTile& tile : plan.tiles) {
    for (int32_t i = tile.range_begin; i < tile.range_end; ++i) {
      const QRange& range = plan.ranges[i];
      ranges[i] = RangeOf(*call.problem, call.q_pieces[range.piece], range.row_begin,
                          keys[tile.piece], tile.row_begin);
    }
  }
  return ranges;
}

}  // namespace ringattn::worker::cuda
