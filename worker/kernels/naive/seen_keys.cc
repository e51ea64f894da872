#include "worker/kernels/naive/seen_keys.h"

#include <cmath>

#include "common/oracle/numeric.h"
#include "common/oracle/pair_terms.h"

namespace ringattn::worker {

double Dot(DType dtype, const void* x, int64_t x_offset, const void* y, int64_t y_offset,
           int64_t dim) {
  double sum = 0.0;
  for (int64_t d = 0; d < dim; ++d) {
    sum += oracle::Load(dtype, x, x_offset + d) * oracle::Load(dtype, y, y_offset + d);
  }
  return sum;
}

SeenKeys::SeenKeys(const AttentionProblem& problem, int64_t q_rows,
                   const std::vector<Piece>& q_pieces, const void* q,
                   const std::vector<KvBlock>& blocks, const TermOperands& operands)
    : problem_(problem),
      q_rows_(q_rows),
      q_(q),
      blocks_(blocks),
      operands_(operands),
      q_positions_(PositionsOf(q_pieces, q_rows)) {
  for (const KvBlock& block : blocks) k_positions_.push_back(PositionsOf(block.pieces, block.rows));
}

std::vector<SeenKeys::DocumentPosition> SeenKeys::PositionsOf(const std::vector<Piece>& pieces,
                                                              int64_t rows) {
  std::vector<DocumentPosition> places(rows);
  for (const Piece& piece : pieces) {
    for (int64_t r = 0; r < piece.length; ++r) {
      places[piece.local_begin + r] = {piece.document, piece.position + piece.stride * r};
    }
  }
  return places;
}

bool SeenKeys::Sees(const DocumentPosition& q, const DocumentPosition& k) const {
  if (q.document < 0 || q.document != k.document) return false;
  const Band& band = problem_.bands[q.document];
  const int64_t difference = k.position - q.position;
  return band.lower <= difference && difference <= band.upper;
}

int64_t SeenKeys::PlaneElementOf(int64_t q_row, size_t block, int64_t k_row) const {
  const ScoreTerms& terms = problem_.terms;
  return terms.PairRow(q_row, q_positions_[q_row].position) * terms.columns +
         terms.PairColumn(k_row, k_positions_[block][k_row].position);
}

bool SeenKeys::IsHidden(const QueryHead& query, const SeenKey& key) const {
  const ScoreTerms& terms = problem_.terms;
  const KvBlock& block = blocks_[key.block];
  if (terms.segment_ids) {
    const int32_t q_id = operands_.q_segment_ids[query.batch * q_rows_ + query.row];
    const int32_t k_id = block.segment_ids[query.batch * block.rows + key.row];
    if (q_id < 0 || q_id != k_id) return true;
  }
  if (!terms.mask.has_value()) return false;
  const int64_t plane = PlaneOf(*terms.mask, problem_.num_heads, query.batch, query.head);
  const int64_t rows = terms.PlaneRows(q_rows_);
  if (!terms.mask->bits) {
    const int64_t at = plane * rows * terms.columns + PlaneElementOf(query.row, key.block, key.row);
    return operands_.mask[at] == 0;
  }
  const int64_t position = PositionOf(key);
  const int64_t byte = (plane * rows + query.row) * terms.mask_row_bytes() + position / 8;
  return (operands_.mask[byte] >> (position % 8) & 1) == 0;
}

bool SeenKeys::Finish(const QueryHead& query, SeenKey& key) const {
  const AttentionProblem& p = problem_;
  const ScoreTerms& terms = p.terms;
  if (IsHidden(query, key)) return false;
  const DocumentPosition& q = q_positions_[query.row];
  const DocumentPosition& k = k_positions_[key.block][key.row];
  const int64_t batch_row = terms.BatchRow(query.batch, q.document);
  double after = 0.0;
  if (terms.bias.has_value()) {
    const int64_t plane = PlaneOf(*terms.bias, p.num_heads, query.batch, query.head);
    const int64_t at = plane * terms.PlaneRows(q_rows_) * terms.columns +
                       PlaneElementOf(query.row, key.block, key.row);
    const DType dtype = terms.bias->float32 ? DType::kFloat32 : p.dtype;
    const double bias = oracle::Load(dtype, operands_.bias, at);
    if (std::isinf(bias) && bias < 0) return false;
    (terms.bias->before_softcap ? key.score : after) += bias;
    key.magnitude += std::abs(bias);
  }
  if (!terms.alibi_slopes.empty()) {
    const bool shared = static_cast<int64_t>(terms.alibi_slopes.size()) == p.num_heads;
    const double slope = terms.alibi_slopes[(shared ? 0 : batch_row * p.num_heads) + query.head];
    const double distance =
        static_cast<double>(std::abs(q.position + terms.shifts[q.document] - k.position));
    after -= slope * distance;
    key.magnitude += std::abs(slope * distance);
  }
  if (p.softcap != 0.0f) {
    const double t = std::tanh(key.score / p.softcap);
    key.score = p.softcap * t;
    key.slope = 1.0 - t * t;
  }
  key.score += after;
  if (terms.dropout.threshold != 0) {
    const bool keeps = oracle::Keeps(terms.dropout, batch_row, query.head, q.position, k.position);
    key.keep = keeps ? 65536.0 / (65536.0 - terms.dropout.threshold) : 0.0;
  }
  return true;
}

std::vector<SeenKey> SeenKeys::Of(const QueryHead& query) const {
  const AttentionProblem& p = problem_;
  const int64_t q_offset =
      RowOffset(query.batch, q_rows_, query.row, p.num_heads, query.head, p.head_dim);
  const int64_t kv_head = KvHeadOf(p, query.head);
  std::vector<SeenKey> seen;
  for (size_t n = 0; n < blocks_.size(); ++n) {
    const KvBlock& block = blocks_[n];
    for (int64_t j = 0; j < block.rows; ++j) {
      if (!Sees(q_positions_[query.row], k_positions_[n][j])) continue;
      const int64_t k_offset =
          RowOffset(query.batch, block.rows, j, p.num_kv_heads, kv_head, p.head_dim);
      SeenKey key{n, j};
      double dot = 0.0;
      for (int64_t d = 0; d < p.head_dim; ++d) {
        const double term =
            oracle::Load(p.dtype, q_, q_offset + d) * oracle::Load(p.dtype, block.k, k_offset + d);
        dot += term;
        key.magnitude += std::abs(p.softmax_scale * term);
      }
      key.score = p.softmax_scale * dot;
      if (Finish(query, key)) seen.push_back(key);
    }
  }
  return seen;
}

std::vector<int64_t> SeenKeys::PlaneElementsShownTo(int64_t row) const {
  std::vector<int64_t> elements;
  for (size_t n = 0; n < blocks_.size(); ++n) {
    for (int64_t j = 0; j < blocks_[n].rows; ++j) {
      if (Sees(q_positions_[row], k_positions_[n][j]))
        elements.push_back(PlaneElementOf(row, n, j));
    }
  }
  return elements;
}

}  // namespace ringattn::worker
