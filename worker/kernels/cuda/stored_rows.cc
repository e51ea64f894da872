#include "worker/kernels/cuda/stored_rows.h"

#include <algorithm>
#include <utility>

#include "common/attention/band.h"
#include "common/attention/dtype.h"

namespace ringattn::worker::cuda {
namespace {

using Interval = std::pair<int64_t, int64_t>;  // [first, second)

// The longest run of positions of a document that the calls have keys of.
Interval LongestRun(const std::vector<const BiasGradientCall*>& calls, int64_t document) {
  std::vector<Interval> runs;
  for (const BiasGradientCall* call : calls) {
    for (const KvBlock& block : call->blocks) {
      for (const Piece& piece : block.pieces) {
        if (piece.document != document || piece.length == 0 || piece.stride != 1) continue;
        runs.emplace_back(piece.position, piece.position + piece.length);
      }
    }
  }
  std::sort(runs.begin(), runs.end());
  Interval run = {0, 0}, longest = {0, 0};
  for (const Interval& next : runs) {
    if (next.first > run.second || run.first == run.second) run = next;
    run.second = std::max(run.second, next.second);
    if (run.second - run.first > longest.second - longest.first) longest = run;
  }
  return longest;
}

}  // namespace

std::vector<StoredRows> StoredRowsOf(const std::vector<const BiasGradientCall*>& calls) {
  std::vector<StoredRows> stored;
  if (calls.empty()) return stored;
  const AttentionProblem& problem = *calls.front()->problem;
  std::vector<const BiasGradientCall*> alike;  // of the same queries
  for (const BiasGradientCall* call : calls) {
    if (call->problem == &problem && call->q_rows == calls.front()->q_rows &&
        call->q_pieces == calls.front()->q_pieces) {
      alike.push_back(call);
    }
  }
  for (const Piece& piece : calls.front()->q_pieces) {
    if (piece.length == 0 || piece.stride != 1) continue;
    const auto [low, high] = LongestRun(alike, piece.document);
    if (low == high) continue;
    const Band& band = problem.bands[piece.document];
    stored.push_back({.begin = piece.local_begin,
                      .count = piece.length,
                      .first = piece.position + band.lower,
                      .end = piece.position + band.upper + 1,
                      .low = low,
                      .high = high});
  }
  return stored;
}

std::optional<PartlyStored> PartlyStoredOf(const ZeroCall& zero,
                                           const std::vector<const BiasGradientCall*>& behind) {
  if (behind.empty() || !behind.front()->problem->terms.bias.has_value()) return std::nullopt;
  const AttentionProblem& problem = *behind.front()->problem;
  const BiasForm& form = *problem.terms.bias;
  PartlyStored partly;
  partly.planes = (form.per_batch ? problem.batch : 1) * (form.per_head ? problem.num_heads : 1);
  partly.rows = behind.front()->q_rows;
  partly.columns = problem.terms.columns;
  partly.element_bytes = ElementBytes(form.float32 ? DType::kFloat32 : problem.dtype);
  if (partly.planes * partly.rows * partly.columns * partly.element_bytes != zero.bytes) {
    return std::nullopt;
  }
  partly.stored = StoredRowsOf(behind);
  return partly.stored.empty() ? std::nullopt : std::optional(std::move(partly));
}

}  // namespace ringattn::worker::cuda
