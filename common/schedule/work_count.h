// How much work a set of q rows has with a set of keys, by interval arithmetic:
// for schedules, reports and the cost model, never for the result.
#ifndef RINGATTN_COMMON_SCHEDULE_WORK_COUNT_H_
#define RINGATTN_COMMON_SCHEDULE_WORK_COUNT_H_

#include <cstdint>
#include <vector>

#include "common/attention/band.h"

namespace ringattn {

// Side of the tiles that work is counted in.
inline constexpr int64_t kTileRows = 128;

struct WorkCount {
  // Tiles of kTileRows x kTileRows, aligned to the beginnings of the q piece and
  // the key piece, that have at least one visible pair (by their hulls).
  int64_t tiles = 0;
  // Pairs (i, j) that are not masked. Exact.
  int64_t pairs = 0;

  bool operator==(const WorkCount&) const = default;
};

// REQUIRES: both sorted by document, and within one by position, no piece beginning
// before the one before it has ended, as CutIntoPieces has them; bands has one entry per
// document.
// In closed form: O(pieces), but for bands narrower than the stride of q, whose tiles
// are counted one by one.
WorkCount CountWork(const std::vector<Piece>& q, const std::vector<Piece>& kv,
                    const std::vector<Band>& bands);

// The hull, in local rows of the buffer that kv describes, of the keys that at
// least one row of q sees. REQUIRES: as above, and kv in the order of local rows.
// O(pieces) at most; from both ends it walks only until something is seen.
RowRange NeededRows(const std::vector<Piece>& q, const std::vector<Piece>& kv,
                    const std::vector<Band>& bands);

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_WORK_COUNT_H_
