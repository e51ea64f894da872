// Which members serve a request: the rule, apart from where its facts come from.
#ifndef RINGATTN_SERVER_CORE_PLACEMENT_H_
#define RINGATTN_SERVER_CORE_PLACEMENT_H_

#include <cstdint>
#include <vector>

namespace ringattn::server {

// One member of the ring.
struct Site {
  int64_t memory_bytes = 0;     // 0: it does not say, and is asked
  int64_t workspace_bytes = 0;  // that the request is known to need beside its buffers
  int64_t reserved_bytes = 0;   // by others
  int operations = 0;           // that hold a place
  bool has_place = true;        // for one more
};

struct Placement {
  enum class Answer {
    kPlaced,
    kWaits,      // for memory or places that others hold
    kNeverFits,  // not even if nobody held anything
  };
  Answer answer = Answer::kWaits;
  std::vector<int> ranks;  // kPlaced: ascending, as many as asked for
  int roomiest_rank = 0;   // kNeverFits
};

// The idlest sites (operations, then bytes, then rank) that have a place and `buffer_bytes`
// free beside the workspace. REQUIRES: 1 <= count <= sites.size().
Placement Place(const std::vector<Site>& sites, int64_t buffer_bytes, int count);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_PLACEMENT_H_
