// Regions: the coordinator's records of memory that clients share with workers
// (local_memory.proto): owner, size, and the workers that have attached it.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_REGIONS_H_
#define RINGATTN_SERVER_CORE_REQUESTS_REGIONS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "common/request/transport_choice.h"
#include "server/core/events/action_batch.h"
#include "server/core/events/config.h"
#include "server/core/ring/roster.h"

namespace ringattn::server {

// Not thread safe.
class Regions {
 public:
  // All arguments must outlive this object.
  Regions(const CoordinatorConfig* config, ActionBatch* batch, const Roster* roster)
      : config_(*config), batch_(*batch), roster_(*roster) {}

  // Announces the region to the workers and emits the answer.
  void OnAttach(const AttachRequested& event);
  void OnChanged(ConnectionId connection, const v1::RegionChanged& changed);
  // The worker's stream ended, which detaches its regions.
  void OnWorkerLost(ConnectionId connection);
  // Removes regions that no worker has attached and whose tokens have expired.
  void Sweep();
  // Extends timeouts by a pause of this process.
  void Forgive(absl::Duration pause);

  // Returns INVALID_ARGUMENT by field for a region that is too short or belongs to another
  // principal.
  std::optional<Failure> CheckLocations(const TransportChoice& choice,
                                        const std::string& principal) const;
  // Returns the reason that these members cannot reach the tensors in memory of this kind; empty if
  // they can.
  std::string CheckAttached(const TransportChoice& choice, const std::vector<ConnectionId>& members,
                            v1::RegionKind kind = v1::REGION_KIND_HOST) const;

  // Returns the reason that these members cannot use a principal's region for step rings; empty if
  // they can.
  std::string CheckStepRings(const std::string& region_id, const std::string& principal,
                             const std::vector<ConnectionId>& members) const;

  size_t size() const { return regions_.size(); }

 private:
  struct Region {
    std::string principal;
    std::string client;
    int64_t bytes = 0;
    v1::RegionKind kind = v1::REGION_KIND_HOST;
    std::set<ConnectionId> attached;
    absl::Time offered_at;  // last announcement
  };

  std::variant<v1::AttachResponse, Failure> Attach(const AttachRequested& event);
  std::variant<Region*, Failure> FindOrMake(const AttachRequested& event);
  // Removes the oldest region without an attachment, of the client that has most of them. Returns
  // false if every region is attached.
  bool EvictUnattached();
  const Region* Find(const std::string& id, const std::string& principal) const;

  const CoordinatorConfig& config_;
  ActionBatch& batch_;
  const Roster& roster_;
  std::map<std::string, Region> regions_;  // by id
};

// The transport of a request's tensors, chosen once its members are known.
struct TransportDecision {
  v1::Transport transport = v1::TRANSPORT_RELAY;
  std::string reason;  // empty if the request states no preference
};

// The members and the layout that a transport would have to serve.
struct TransportRoute {
  std::vector<ConnectionId> members;  // by ring rank
  int64_t spans = 0;                  // Plan::spans
  int64_t max_ticket_spans = 0;       // Limits
};

// Returns the first transport that the request accepts and that is available. Returns
// FAILED_PRECONDITION (TRANSPORT_UNAVAILABLE) if the request requires one that is not.
std::variant<TransportDecision, Failure> DecideTransport(const TransportChoice& choice,
                                                         const Regions& regions,
                                                         const Roster& roster,
                                                         const TransportRoute& route);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_REGIONS_H_
