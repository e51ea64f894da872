// Regions: memory that clients share with workers (local_memory.proto), as far as the
// coordinator knows it: whose it is, how large, and which workers have it.
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
#include "server/core/events/batch.h"
#include "server/core/events/config.h"
#include "server/core/ring/roster.h"

namespace ringattn::server {

// Not thread safe.
class Regions {
 public:
  // All outlive it.
  Regions(const CoordinatorConfig* config, ActionBatch* batch, const Roster* roster)
      : config_(*config), batch_(*batch), roster_(*roster) {}

  // Tells the workers that the region may come and emits the answer.
  void OnAttach(const AttachRequested& event);
  void OnChanged(ConnectionId connection, const v1::RegionChanged& changed);
  // The worker's stream has ended, and its regions with it.
  void OnWorkerGone(ConnectionId connection);
  // Forgets those that nobody has and nobody can get any more.
  void Sweep();
  // The process itself did not run for so long.
  void Forgive(absl::Duration pause);

  // INVALID_ARGUMENT by field: a region that is not the principal's, or too short.
  std::optional<Failure> WhyRefused(const TransportChoice& choice,
                                    const std::string& principal) const;
  // Why these members cannot take the tensors from their places in memory of this kind; empty:
  // they can.
  std::string CheckAttached(const TransportChoice& choice, const std::vector<ConnectionId>& members,
                            v1::RegionKind kind = v1::REGION_KIND_HOST) const;

  size_t size() const { return regions_.size(); }

 private:
  struct Region {
    std::string principal;
    std::string client;
    int64_t bytes = 0;
    v1::RegionKind kind = v1::REGION_KIND_HOST;
    std::set<ConnectionId> attached;
    absl::Time offered_at;  // last
  };

  std::variant<v1::AttachResponse, Failure> Attach(const AttachRequested& event);
  std::variant<Region*, Failure> FindOrMake(const AttachRequested& event);
  const Region* Find(const std::string& id, const std::string& principal) const;

  const CoordinatorConfig& config_;
  ActionBatch& batch_;
  const Roster& roster_;
  std::map<std::string, Region> regions_;  // by id
};

// How a request's tensors travel, once its members are known.
struct TransportDecision {
  v1::Transport transport = v1::TRANSPORT_RELAY;
  std::string reason;  // empty where the request says nothing of transports
};

// Where a request's tensors would go.
struct TransportRoute {
  std::vector<ConnectionId> members;  // by ring rank
  int64_t spans = 0;                  // Plan::spans
  int64_t max_ticket_spans = 0;       // Limits
};

// The first of the transports that the request accepts and can have.
// FAILED_PRECONDITION, TRANSPORT_UNAVAILABLE, if it requires another than it could.
std::variant<TransportDecision, Failure> DecideTransport(const TransportChoice& choice,
                                                         const Regions& regions,
                                                         const Roster& roster,
                                                         const TransportRoute& route);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_REGIONS_H_
