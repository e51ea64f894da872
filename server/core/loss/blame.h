// The rule that decides which member broke the ring, independent of the source of the evidence.
#ifndef RINGATTN_SERVER_CORE_LOSS_BLAME_H_
#define RINGATTN_SERVER_CORE_LOSS_BLAME_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/time.h"

namespace ringattn::server {

struct RankState {
  int rank = 0;
  bool silent = false;  // no message since the first report
  absl::Duration silence;
  // It has work to do, waits for no peer, makes no progress, and did not itself report a broken
  // ring.
  bool owes_progress = false;
  uint32_t step = 0;
  uint64_t progress = 0;
};

// Returns the rank at fault: the longest silent rank, else the least advanced rank that owes
// progress (ties: the lowest rank). Returns nullopt if there is neither. Ranks that wait or that
// reported the failure are never blamed, however little they have computed.
std::optional<int> RankToBlame(const std::vector<RankState>& ranks);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_LOSS_BLAME_H_
