#include "worker/kernels/cpu/workspace/workspace.h"

namespace ringattn::worker::cpu {
namespace {

// Cuts every run into tiles; the last of a run may be short.
template <typename Tile>
void Cut(const TokenRuns& runs, int rows_per_tile, std::vector<Tile>& tiles) {
  tiles.clear();
  for (size_t r = 0; r < runs.runs().size(); ++r) {
    const TokenRun& run = runs.runs()[r];
    for (int64_t begin = 0; begin < run.length; begin += rows_per_tile) {
      Tile tile;
      tile.run = static_cast<int>(r);
      tile.begin = begin;
      tile.rows = static_cast<int>(std::min<int64_t>(rows_per_tile, run.length - begin));
      tile.first_position = runs.PositionOf(run, begin);
      tile.last_position = runs.PositionOf(run, begin + tile.rows - 1);
      tiles.push_back(tile);
    }
  }
}

}  // namespace

void Workspace::SetRuns(const std::vector<Piece>& q_pieces, const std::vector<KvBlock>& blocks) {
  q.Clear();
  q.Add(q_pieces, 0);
  q.SortByDocument();
  kv.Clear();
  for (size_t b = 0; b < blocks.size(); ++b) kv.Add(blocks[b].pieces, static_cast<int>(b));
  kv.SortByDocument();
}

void Workspace::CutQueries(int rows_per_tile) { Cut(q, rows_per_tile, query_tiles); }
void Workspace::CutKeys(int rows_per_tile) { Cut(kv, rows_per_tile, key_tiles); }

}  // namespace ringattn::worker::cpu
