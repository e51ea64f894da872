// Which query tiles and key tiles of a backward call meet.
#ifndef RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_TILE_HULLS_H_
#define RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_TILE_HULLS_H_

#include <vector>

#include "worker/kernels/cpu/workspace/workspace.h"

namespace ringattn::worker::cpu {

// True if some row of q may see some key of kv; both of the band's document.
// (Rows and keys with strides may still miss each other inside.)
inline bool Reaches(const QueryTile& q, const KeyTile& kv, const Band& band) {
  return q.first_position + band.lower <= kv.last_position &&
         kv.first_position <= q.last_position + band.upper;
}

// Fills query_hulls and key_hulls from query_tiles and key_tiles. Key tile k is
// in query tile q's hull if and only if q is in those that k's hull spans and
// query_hulls[q] contains k. bands: per document.
void FindHulls(const std::vector<Band>& bands, Workspace& workspace);

}  // namespace ringattn::worker::cpu

#endif  // RINGATTN_WORKER_KERNELS_CPU_WORKSPACE_TILE_HULLS_H_
