// Who broke the ring: the rule, apart from where its facts come from.
#ifndef RINGATTN_SERVER_CORE_LOSS_BLAME_H_
#define RINGATTN_SERVER_CORE_LOSS_BLAME_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/time.h"

namespace ringattn::server {

struct Standing {
  int rank = 0;
  bool silent = false;  // not heard of since the first report
  absl::Duration silence;
  // Has work to do, waits for no peer, stands still, and did not itself report
  // that the ring broke.
  bool owes_progress = false;
  uint32_t step = 0;
  uint64_t progress = 0;
};

// The rank at fault: the longest silent one, else the least advanced of those that
// owe progress (ties: the lowest rank). None if nobody is silent or owes any.
// A rank that waits or that reported is a victim, however little it has done.
std::optional<int> RankToBlame(const std::vector<Standing>& standings);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_LOSS_BLAME_H_
