// Which members serve a request: the rule, apart from where its facts come from.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_PLACEMENT_H_
#define RINGATTN_SERVER_CORE_REQUESTS_PLACEMENT_H_

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace ringattn::server {

// One member of the ring, as it is occupied now.
struct Site {
  int64_t memory_bytes = 0;       // 0: it does not say, and is asked
  int64_t reserved_bytes = 0;     // by others
  int operations = 0;             // that hold a place
  int express_operations = 0;     // of these
  std::set<std::string> clients;  // of all operations
  std::set<std::string> express_clients;
  bool serves = true;       // its device has kernels for the request
  bool computes = false;    // or has something to compute
  double largest_cost = 0;  // of its operations, in device seconds
  // What this request is known to need there beside its buffers.
  int64_t workspace_bytes = 0;
};

struct PlacementRequest {
  std::string client;
  double cost_seconds = 0;   // of devices
  int64_t buffer_bytes = 0;  // on each member
  int count = 1;             // of members
  // Planning and decoding it take long (kManyDocuments), however little it computes.
  bool many_documents = false;
};

// Places per member.
struct PlaceLimits {
  int all = 0;
  int express = 0;  // of these, for requests that may take them
};

struct Placement {
  enum class Answer {
    kPlaced,
    kWaitsForMemory,  // that others hold
    kWaitsForPlaces,  // likewise
    kNeverFits,       // not even if nobody held anything; of members that serve it, enough exist
  };
  Answer answer = Answer::kWaitsForMemory;
  std::vector<int> ranks;   // kPlaced: ascending, as many as asked for
  bool is_express = false;  // kPlaced: the same on all members
  int roomiest_rank = 0;    // kNeverFits
};

// The idlest sites (operations, then bytes, then rank) that have a place and the buffers' bytes
// free beside the workspace. A request takes express places if there are no others, it has not
// many documents, its client has none there, and either it costs at most an eighth of what it would
// wait for, or nothing computes there and its client has no place at all: one that has taken the
// common places keeps the express one for its small requests. `only_express`: one whose turn is
// earlier waits for a common place. REQUIRES: 1 <= count <= sites.size().
Placement Place(const std::vector<Site>& sites, const PlacementRequest& request,
                const PlaceLimits& limits, bool only_express);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_PLACEMENT_H_
