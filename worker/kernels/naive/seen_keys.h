// Which keys a query row sees and with what score: the part of attention that every
// option changes, in fp64, one pair at a time, visibility by the band's definition. The
// twin (naive_kernels.h) and the exact values that kernels are judged by stand on it.
#ifndef RINGATTN_WORKER_KERNELS_NAIVE_SEEN_KEYS_H_
#define RINGATTN_WORKER_KERNELS_NAIVE_SEEN_KEYS_H_

#include <cstdint>
#include <vector>

#include "worker/kernels/attention_kernel.h"

namespace ringattn::worker {

struct SeenKey {
  size_t block = 0;
  int64_t row = 0;
  double score = 0.0;
  double slope = 1.0;      // derivative of the score by scale * q.k
  double magnitude = 0.0;  // |scale| * sum of |q k|, and what the terms add
  double keep = 1.0;       // dropout's factor of the weight
};

// A query row's head in q [batch, rows, num_heads, head_dim].
struct QueryHead {
  int64_t batch = 0;
  int64_t row = 0;
  int64_t head = 0;
};

// Element offset of a row's head in [batch, rows, heads, dim].
inline int64_t RowOffset(int64_t batch, int64_t rows, int64_t row, int64_t heads, int64_t head,
                         int64_t dim) {
  return ((batch * rows + row) * heads + head) * dim;
}

// The K/V head that a query head uses.
inline int64_t KvHeadOf(const AttentionProblem& problem, int64_t head) {
  return head / (problem.num_heads / problem.num_kv_heads);
}

double Dot(DType dtype, const void* x, int64_t x_offset, const void* y, int64_t y_offset,
           int64_t dim);

// For the rows of one q buffer. `problem`, `q` and `blocks` outlive it. Immutable.
class SeenKeys {
 public:
  SeenKeys(const AttentionProblem& problem, int64_t q_rows, const std::vector<Piece>& q_pieces,
           const void* q, const std::vector<KvBlock>& blocks, const TermOperands& operands = {});

  // The key's position in its document, -1 if it is in none.
  int64_t PositionOf(const SeenKey& key) const { return k_places_[key.block][key.row].position; }
  // Where the pair of a query row and a key is in a plane of a bias or a mask.
  int64_t PlaneElementOf(int64_t q_row, size_t block, int64_t k_row) const;

  // In the order of blocks and their rows.
  std::vector<SeenKey> Of(const QueryHead& query) const;

  // PlaneElementOf keys that the band shows to a row, whatever else may hide them.
  std::vector<int64_t> PlaneElementsShownTo(int64_t row) const;

 private:
  // Where a row is: its document and position there.
  struct Place {
    int64_t document = -1;  // -1: in no piece
    int64_t position = 0;
  };
  static std::vector<Place> PlacesOf(const std::vector<Piece>& pieces, int64_t rows);
  bool Sees(const Place& q, const Place& k) const;
  // Adds the score terms; false if they hide the pair. key.score is scale * q.k.
  bool Finish(const QueryHead& query, SeenKey& key) const;
  bool IsHidden(const QueryHead& query, const SeenKey& key) const;

  const AttentionProblem& problem_;
  const int64_t q_rows_;
  const void* const q_;
  const std::vector<KvBlock>& blocks_;
  const TermOperands operands_;
  std::vector<Place> q_places_;
  std::vector<std::vector<Place>> k_places_;  // by block
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_NAIVE_SEEN_KEYS_H_
