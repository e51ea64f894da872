#include "worker/kernels/cpu/workspace/token_runs.h"

#include <algorithm>

namespace ringattn::worker::cpu {

void TokenRuns::Clear() {
  pieces_.clear();
  runs_.clear();
}

void TokenRuns::Add(const std::vector<Piece>& pieces, int block) {
  const size_t own_runs = runs_.size();
  for (const Piece& piece : pieces) {
    if (piece.length <= 0) continue;
    const int index = static_cast<int>(pieces_.size());
    if (runs_.size() > own_runs) {
      TokenRun& last_run = runs_.back();
      const Piece& last = pieces_.back();
      if (last_run.document == piece.document &&
          last_run.local_begin + last_run.length == piece.local_begin &&
          last.PositionOf(last.length - 1) < piece.position) {
        last_run.length += piece.length;
        last_run.end_piece = index + 1;
        pieces_.push_back(piece);
        continue;
      }
    }
    pieces_.push_back(piece);
    runs_.push_back({piece.document, piece.local_begin, piece.length, index, index + 1, block});
  }
}

void TokenRuns::SortByDocument() {
  std::stable_sort(runs_.begin(), runs_.end(),
                   [](const TokenRun& a, const TokenRun& b) { return a.document < b.document; });
}

RowRange TokenRuns::RunsOf(int64_t document) const {
  const auto begin =
      std::lower_bound(runs_.begin(), runs_.end(), document,
                       [](const TokenRun& run, int64_t wanted) { return run.document < wanted; });
  auto end = begin;
  while (end != runs_.end() && end->document == document) ++end;
  return {begin - runs_.begin(), end - runs_.begin()};
}

int64_t TokenRuns::PositionOf(const TokenRun& run, int64_t row) const {
  const int64_t local = run.local_begin + row;
  const auto after = std::upper_bound(
      pieces_.begin() + run.first_piece, pieces_.begin() + run.end_piece, local,
      [](int64_t wanted, const Piece& piece) { return wanted < piece.local_begin; });
  const Piece& piece = *(after - 1);
  return piece.PositionOf(local - piece.local_begin);
}

int64_t TokenRuns::LowerBound(const TokenRun& run, int64_t position) const {
  const auto piece = std::lower_bound(
      pieces_.begin() + run.first_piece, pieces_.begin() + run.end_piece, position,
      [](const Piece& p, int64_t wanted) { return p.PositionOf(p.length - 1) < wanted; });
  if (piece == pieces_.begin() + run.end_piece) return run.length;
  const int64_t first_row = piece->local_begin - run.local_begin;
  if (position <= piece->position) return first_row;
  return first_row + (position - piece->position + piece->stride - 1) / piece->stride;
}

RowRange TokenRuns::RowsAt(const TokenRun& run, int64_t first, int64_t last) const {
  if (first > last) return {};
  const RowRange range{LowerBound(run, first), LowerBound(run, last + 1)};
  return range.empty() ? RowRange{} : range;
}

}  // namespace ringattn::worker::cpu
