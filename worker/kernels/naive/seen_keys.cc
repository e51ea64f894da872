#include "worker/kernels/naive/seen_keys.h"

#include <cmath>

#include "common/oracle/numeric.h"

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
                   const std::vector<KvBlock>& blocks)
    : problem_(problem),
      q_rows_(q_rows),
      q_(q),
      blocks_(blocks),
      q_places_(PlacesOf(q_pieces, q_rows)) {
  for (const KvBlock& block : blocks) k_places_.push_back(PlacesOf(block.pieces, block.rows));
}

std::vector<SeenKeys::Place> SeenKeys::PlacesOf(const std::vector<Piece>& pieces, int64_t rows) {
  std::vector<Place> places(rows);
  for (const Piece& piece : pieces) {
    for (int64_t r = 0; r < piece.length; ++r) {
      places[piece.local_begin + r] = {piece.document, piece.position + piece.stride * r};
    }
  }
  return places;
}

bool SeenKeys::Sees(const Place& q, const Place& k) const {
  if (q.document < 0 || q.document != k.document) return false;
  const Band& band = problem_.bands[q.document];
  const int64_t difference = k.position - q.position;
  return band.lower <= difference && difference <= band.upper;
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
      if (!Sees(q_places_[query.row], k_places_[n][j])) continue;
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
      if (p.softcap != 0.0f) {
        const double t = std::tanh(key.score / p.softcap);
        key.score = p.softcap * t;
        key.slope = 1.0 - t * t;
      }
      seen.push_back(key);
    }
  }
  return seen;
}

}  // namespace ringattn::worker
