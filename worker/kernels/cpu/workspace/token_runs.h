// TokenRuns: the rows of a buffer as runs in which positions increase.
//
// Inside a run the keys that a position sees are one contiguous range, however many pieces form the
// run. So many small pieces (striped blocks) still fill whole tiles, and masks are two integers per
// row.
#ifndef RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_TOKEN_RUNS_H_
#define RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_TOKEN_RUNS_H_

#include <cstdint>
#include <vector>

#include "common/attention/band.h"

namespace ringattn::worker::cpu {

// Pieces of one document that follow one another in memory with increasing positions.
struct TokenRun {
  int64_t document = 0;
  int64_t local_begin = 0;
  int64_t length = 0;
  int first_piece = 0;  // index into TokenRuns' pieces
  int end_piece = 0;
  int block = 0;  // caller's tag: which KvBlock
};

// Immutable between Build calls; const methods may be called by any thread.
class TokenRuns {
 public:
  void Clear();
  // Adds the runs of one buffer. Empty pieces are dropped.
  void Add(const std::vector<Piece>& pieces, int block);
  // Orders the runs by document; within one, in the order of their adding.
  void SortByDocument();

  const std::vector<TokenRun>& runs() const { return runs_; }
  // The runs of `document`, as indices [begin, end). REQUIRES: SortByDocument.
  RowRange RunsOf(int64_t document) const;

  int64_t PositionOf(const TokenRun& run, int64_t row) const;
  // Rows of the run whose positions lie in [first, last].
  RowRange RowsAt(const TokenRun& run, int64_t first, int64_t last) const;

 private:
  int64_t LowerBound(const TokenRun& run, int64_t position) const;

  std::vector<Piece> pieces_;
  std::vector<TokenRun> runs_;
};

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_TOKEN_RUNS_H_
