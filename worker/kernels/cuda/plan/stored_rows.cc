#include "worker/kernels/cuda/plan/stored_rows.h"

#include <algorithm>
#include <utility>

#include "common/attention/band.h"
#include "common/attention/dtype.h"

namespace ringattn::worker::cuda {
namespace {

// Keys at positions [first, end), stored in columns [first + shift, end + shift).
struct Run {
  int64_t first = 0;
  int64_t end = 0;
  int64_t shift = 0;

  bool operator<(const Run& other) const { return first < other.first; }
};

// Returns the longest run of a document's keys in the calls.
Run LongestRun(const std::vector<const BiasGradientCall*>& calls, int64_t document) {
  std::vector<Run> runs;
  for (const BiasGradientCall* call : calls) {
    for (const KvBlock& block : call->blocks) {
      for (const Piece& piece : block.pieces) {
        if (piece.document != document || piece.length == 0 || piece.stride != 1) continue;
        const ScoreTerms& terms = call->problem->terms;
        const int64_t column = terms.PairColumn(piece.local_begin, piece.position);
        runs.push_back({piece.position, piece.position + piece.length, column - piece.position});
      }
    }
  }
  std::sort(runs.begin(), runs.end());
  Run run, longest;
  for (const Run& next : runs) {
    const bool goes_on = next.first <= run.end && next.shift == run.shift;
    if (!goes_on || run.first == run.end) run = next;
    run.end = std::max(run.end, next.end);
    if (run.end - run.first > longest.end - longest.first) longest = run;
  }
  return longest;
}

// Appends the rows for the queries of `calls`, all of which have the same queries.
void AppendStoredRows(const std::vector<const BiasGradientCall*>& calls,
                      std::vector<StoredRows>& stored) {
  const AttentionProblem& problem = *calls.front()->problem;
  for (const Piece& piece : calls.front()->q_pieces) {
    if (piece.length == 0 || piece.stride != 1) continue;
    const Run keys = LongestRun(calls, piece.document);
    if (keys.first == keys.end) continue;
    const Band& band = problem.bands[piece.document];
    stored.push_back({.begin = problem.terms.PairRow(piece.local_begin, piece.position),
                      .count = piece.length,
                      .first = piece.position + band.lower + keys.shift,
                      .end = piece.position + band.upper + 1 + keys.shift,
                      .low = keys.first + keys.shift,
                      .high = keys.end + keys.shift});
  }
}

}  // namespace

std::vector<StoredRows> StoredRowsOf(const std::vector<const BiasGradientCall*>& calls) {
  std::vector<StoredRows> stored;
  if (calls.empty()) return stored;
  const AttentionProblem& problem = *calls.front()->problem;
  if (problem.terms.by_keys) {  // each call stores into different rows
    for (const BiasGradientCall* call : calls) {
      if (call->problem == &problem) AppendStoredRows({call}, stored);
    }
    return stored;
  }
  std::vector<const BiasGradientCall*> alike;  // with the same queries
  for (const BiasGradientCall* call : calls) {
    if (call->problem == &problem && call->q_rows == calls.front()->q_rows &&
        call->q_pieces == calls.front()->q_pieces) {
      alike.push_back(call);
    }
  }
  AppendStoredRows(alike, stored);
  return stored;
}

std::optional<PartlyStored> PartlyStoredOf(const ZeroCall& zero,
                                           const std::vector<const BiasGradientCall*>& behind) {
  if (behind.empty() || !behind.front()->problem->terms.bias.has_value()) return std::nullopt;
  const AttentionProblem& problem = *behind.front()->problem;
  const BiasForm& form = *problem.terms.bias;
  PartlyStored partly;
  partly.planes = (form.per_batch ? problem.batch : 1) * (form.per_head ? problem.num_heads : 1);
  partly.rows = problem.terms.PlaneRows(behind.front()->q_rows);
  partly.columns = problem.terms.columns;
  partly.element_bytes = ElementBytes(form.float32 ? DType::kFloat32 : problem.dtype);
  if (partly.planes * partly.rows * partly.columns * partly.element_bytes != zero.bytes) {
    return std::nullopt;
  }
  partly.stored = StoredRowsOf(behind);
  return partly.stored.empty() ? std::nullopt : std::optional(std::move(partly));
}

}  // namespace ringattn::worker::cuda
