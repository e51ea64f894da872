// Counts the work of a set of q rows with a set of keys by interval arithmetic. Schedules, reports
// and the cost model use the counts; results do not depend on them.
#ifndef RINGATTN_COMMON_SCHEDULE_ROUTE_WORK_COUNT_H_
#define RINGATTN_COMMON_SCHEDULE_ROUTE_WORK_COUNT_H_

#include <cstdint>
#include <vector>

#include "common/attention/band.h"

namespace ringattn {

// Tile size of the counts.
inline constexpr int64_t kTileRows = 128;

struct WorkCount {
  // Tiles of kTileRows x kTileRows, aligned to the beginnings of the q piece and the key piece,
  // that have at least one visible pair (by their hulls).
  int64_t tiles = 0;
  // Pairs (i, j) that are not masked. Exact.
  int64_t pairs = 0;

  bool operator==(const WorkCount&) const = default;
};

// REQUIRES: q and kv are sorted by document, then by position, and no piece begins before the
// previous one has ended, as CutIntoPieces returns them; bands has one entry per document.
// Closed form in O(pieces), except that tiles of bands narrower than the stride of q are counted
// one by one.
WorkCount CountWork(const std::vector<Piece>& q, const std::vector<Piece>& kv,
                    const std::vector<Band>& bands);

// Returns the hull of the keys that at least one row of q sees, in local rows of the buffer that kv
// describes. REQUIRES: as above, and kv in the order of local rows. O(pieces) at most; searches
// from both ends until it finds a visible key.
RowRange NeededRows(const std::vector<Piece>& q, const std::vector<Piece>& kv,
                    const std::vector<Band>& bands);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_ROUTE_WORK_COUNT_H_
