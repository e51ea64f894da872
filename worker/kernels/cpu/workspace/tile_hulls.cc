#include "worker/kernels/cpu/workspace/tile_hulls.h"

namespace ringattn::worker::cpu {
namespace {

// The first tile at or after `begin` that is of another document than tiles[begin].
template <typename Tile>
size_t EndOfDocument(const TokenRuns& runs, const std::vector<Tile>& tiles, size_t begin) {
  const int64_t document = runs.runs()[tiles[begin].run].document;
  size_t end = begin;
  while (end < tiles.size() && runs.runs()[tiles[end].run].document == document) ++end;
  return end;
}

}  // namespace

void FindHulls(const std::vector<Band>& bands, Workspace& workspace) {
  const std::vector<QueryTile>& queries = workspace.query_tiles;
  const std::vector<KeyTile>& keys = workspace.key_tiles;
  workspace.query_hulls.assign(queries.size(), {});
  workspace.key_hulls.assign(keys.size(), {});
  // Both lists are ordered by document.
  size_t q_begin = 0;
  size_t k_begin = 0;
  while (q_begin < queries.size() && k_begin < keys.size()) {
    const int64_t q_document = workspace.q.runs()[queries[q_begin].run].document;
    const int64_t k_document = workspace.kv.runs()[keys[k_begin].run].document;
    const size_t q_end = EndOfDocument(workspace.q, queries, q_begin);
    const size_t k_end = EndOfDocument(workspace.kv, keys, k_begin);
    if (q_document == k_document) {
      for (size_t q = q_begin; q < q_end; ++q) {
        TileHull& hull = workspace.query_hulls[q];
        for (size_t k = k_begin; k < k_end; ++k) {
          if (Reaches(queries[q], keys[k], bands[q_document])) {
            hull.Include(static_cast<int64_t>(k));
          }
        }
        for (int64_t k = hull.begin; k < hull.end; ++k) {
          workspace.key_hulls[k].Include(static_cast<int64_t>(q));
        }
      }
    }
    if (q_document <= k_document) q_begin = q_end;
    if (k_document <= q_document) k_begin = k_end;
  }
}

}  // namespace ringattn::worker::cpu
