// The rule that chooses the members for a request, independent of the source of the facts.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_PLACEMENT_H_
#define RINGATTN_SERVER_CORE_REQUESTS_PLACEMENT_H_

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace ringattn::server {

// The current occupancy of one ring member.
struct Site {
  int64_t memory_bytes = 0;       // 0: unknown; the worker decides at Reserve
  int64_t reserved_bytes = 0;     // by other operations
  int operations = 0;             // that hold a slot
  int express_operations = 0;     // of `operations`
  std::set<std::string> clients;  // of all operations
  std::set<std::string> express_clients;
  bool serves = true;         // its device has kernels for the request
  bool computes = false;      // or has an operation ready to compute
  bool serves_steps = false;  // a K/V cache with a writer is on it
  double largest_cost = 0;    // of its operations, in device seconds
  // Number of its host; members of one host are neighbours. From 0 in ring order.
  int host = 0;
  bool on_slow_host = false;  // its host's devices are far slower than another host's
  // Workspace that this request is known to need there in addition to its buffers.
  int64_t workspace_bytes = 0;
};

struct PlacementRequest {
  std::string client;
  double cost_seconds = 0;   // of devices
  int64_t buffer_bytes = 0;  // on each member
  int count = 1;             // of members
  // Planning and decoding take long (kManyDocuments), even if the computation is short.
  bool many_documents = false;
};

// Slots per member.
struct SlotLimits {
  int all = 0;
  int express = 0;  // part of `all`, for requests that may take them
};

struct Placement {
  enum class Result {
    kPlaced,
    kWaitsForMemory,  // held by others
    kWaitsForSlots,   // held by others
    kNeverFits,       // too few members that serve it could ever hold it
  };
  Result result = Result::kWaitsForMemory;
  std::vector<int> ranks;   // kPlaced: ascending, `count` of them
  bool is_express = false;  // kPlaced: the same on all members
  int roomiest_rank = 0;    // kNeverFits
};

// Returns the least occupied sites (those without steps first, then by operations, bytes and rank)
// that have a free slot and enough free bytes for buffers and workspace.
//
// The sites are on the fewest hosts that could ever hold the request, the hosts with the most
// members first, because links between hosts are slow. The request waits for these hosts although
// more of them would have room at once. Among several such hosts, fast ones come first, and then
// the one with the fewest members to spare.
//
// A request takes express slots only if all of these hold: common slots do not suffice, it has few
// documents, and its client holds no express slot there. In addition, either it costs at most an
// eighth of the work that it would wait for, or the member is idle and the client has no slot
// there. A client that has taken common slots therefore keeps the express slot for its small
// requests.
//
// `only_express`: an earlier request waits for a common slot. REQUIRES: 1 <= count <= sites.size().
Placement Place(const std::vector<Site>& sites, const PlacementRequest& request,
                const SlotLimits& limits, bool only_express);

// Returns whether any site has a free common slot.
bool HasCommonSlot(const std::vector<Site>& sites, const SlotLimits& limits);

// Returns whether a request of this cost might take an express slot of any site. False is certain:
// Place would place no request that costs as much or more in an express slot.
//   client  of the request; null: any client
bool MightTakeExpress(const std::vector<Site>& sites, const std::string* client,
                      double cost_seconds, const SlotLimits& limits);

struct LeastMemory {
  int64_t free = 0;   // of the site with the least free memory
  int64_t total = 0;  // of the smallest site
};
// Ignores workspace, and sites of unknown size. A request waits for memory only if buffers and
// workspace exceed `free`, and it never fits only if they exceed `total` or too few sites serve it.
LeastMemory LeastBytes(const std::vector<Site>& sites);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_PLACEMENT_H_
