// Determines which keys a query row sees and with which scores, in fp64, one pair at a time, with
// visibility by the definition of bands. Every option of attention takes effect here. The naive
// kernels and the exact values for judging kernels use it.
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
  double slope = 1.0;      // derivative of the score with respect to scale * q.k
  double magnitude = 0.0;  // |scale| * sum of |q k|, plus the terms' magnitudes
  double keep = 1.0;       // dropout's factor of the weight
};

// One row and head of q [batch, rows, num_heads, head_dim].
struct QueryHead {
  int64_t batch = 0;
  int64_t row = 0;
  int64_t head = 0;
};

// Returns the element offset of a row and head in [batch, rows, heads, dim].
inline int64_t RowOffset(int64_t batch, int64_t rows, int64_t row, int64_t heads, int64_t head,
                         int64_t dim) {
  return ((batch * rows + row) * heads + head) * dim;
}

// Returns the K/V head that a query head uses.
inline int64_t KvHeadOf(const AttentionProblem& problem, int64_t head) {
  return head / (problem.num_heads / problem.num_kv_heads);
}

double Dot(DType dtype, const void* x, int64_t x_offset, const void* y, int64_t y_offset,
           int64_t dim);

// The seen keys of the rows of one q buffer. Immutable; thread safe. `problem`, `q` and `blocks`
// must outlive it.
class SeenKeys {
 public:
  SeenKeys(const AttentionProblem& problem, int64_t q_rows, const std::vector<Piece>& q_pieces,
           const void* q, const std::vector<KvBlock>& blocks, const TermOperands& operands = {});

  // Returns the key's position in its document, or -1 if it is in none.
  int64_t PositionOf(const SeenKey& key) const { return k_positions_[key.block][key.row].position; }
  // Returns the element of a bias or mask plane for a query row and a key.
  int64_t PlaneElementOf(int64_t q_row, size_t block, int64_t k_row) const;

  // Returns the keys that a query sees, in the order of blocks and their rows.
  std::vector<SeenKey> Of(const QueryHead& query) const;

  // Returns PlaneElementOf for the keys in a row's band, even if other terms hide them.
  std::vector<int64_t> PlaneElementsShownTo(int64_t row) const;

 private:
  // The document of a row, and its position there.
  struct DocumentPosition {
    int64_t document = -1;  // -1: in no span
    int64_t position = 0;
  };
  static std::vector<DocumentPosition> PositionsOf(const std::vector<Piece>& pieces, int64_t rows);
  bool Sees(const DocumentPosition& q, const DocumentPosition& k) const;
  // Adds the score terms to key.score, which is scale * q.k. Returns false if they hide the pair.
  bool Finish(const QueryHead& query, SeenKey& key) const;
  bool IsHidden(const QueryHead& query, const SeenKey& key) const;

  const AttentionProblem& problem_;
  const int64_t q_rows_;
  const void* const q_;
  const std::vector<KvBlock>& blocks_;
  const TermOperands operands_;
  std::vector<DocumentPosition> q_positions_;
  std::vector<std::vector<DocumentPosition>> k_positions_;  // by block
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_KERNELS_NAIVE_SEEN_KEYS_H_
