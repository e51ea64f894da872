// Residuals: the coordinator's records of state that Forwards left with the workers, each for one
// Backward, by handle. The workers own the memory. Dropping needs no answer, since the control
// stream is ordered and later commands find the memory free.
//
//   Keep -> kept -> consumed by a Backward -> dropped
//             \-> expired, lost, evicted, deleted -> dropped
//
// Ended residuals are remembered for a while, so that a late reader learns the reason.
#ifndef RINGATTN_SERVER_CORE_REQUESTS_RESIDUALS_H_
#define RINGATTN_SERVER_CORE_REQUESTS_RESIDUALS_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "common/attention/attention_spec.h"
#include "common/plan/planner.h"
#include "server/core/events/action_batch.h"
#include "server/core/events/config.h"
#include "server/core/events/residual_view.h"

namespace ringattn::server {

struct ResidualMember {
  ConnectionId connection = 0;
  int64_t bytes = 0;  // kept on this member
};

struct Residual {
  std::string handle;
  std::string principal;                      // that may use it
  std::string client;                         // whose quota it counts for
  std::string operation_id;                   // its name in messages to workers
  std::shared_ptr<const AttentionSpec> spec;  // of the Forward
  std::shared_ptr<const Plan> plan;           // of the Forward; without spans
  uint64_t fingerprint = 0;                   // of the Forward's recipe
  std::vector<ResidualMember> members;        // by ring rank
  absl::Duration ttl;
  absl::Time expires;
  // After consumption, only the consuming request may read it again, until replay_until.
  bool consumed = false;
  std::string consumed_by;
  absl::Time replay_until;
  // Requests that name it and have not ended.
  std::set<StreamId> readers;
  uint64_t number = 0;  // order of keeping

  int64_t bytes() const;
  bool IsOn(ConnectionId connection) const;
};

// Not thread safe. References stay valid until their residual is dropped.
class Residuals {
 public:
  // Both arguments must outlive this object.
  Residuals(const CoordinatorConfig* config, ActionBatch* batch)
      : config_(*config), batch_(*batch) {}

  // Handles of residuals that operations read now. These are never dropped.
  using InUse = std::set<std::string>;

  // --- Keeping.
  // Returns an empty string if the residual is kept until its ttl expires, else the reason.
  // Consumed residuals without readers are dropped to make room. client_limit  bytes that this
  // client may keep at a time
  std::string Keep(Residual residual, std::optional<int64_t> client_limit, const InUse& in_use);
  // Counts a Forward that is served without the residual that it requested.
  void CountRefusal() { ++counts_.refused; }

  // --- Reading.
  // Returns nullopt if the request may read the residual, else the failure.
  std::optional<Failure> CheckReadable(const std::string& handle, const std::string& principal,
                                       const std::string& request_id) const;
  // Returns null if there is none.
  const Residual* Find(const std::string& handle) const;
  // REQUIRES: Find(handle) != nullptr.
  void Attach(const std::string& handle, StreamId reader);
  // The reader's request has ended. No effect if the residual has ended.
  void Detach(const std::string& handle, StreamId reader);
  // A Backward has succeeded with it.
  void Read(const std::string& handle, const std::string& request_id, bool keep);

  // --- Endings.
  void Renew(const std::string& handle, const std::string& principal, absl::Duration ttl);
  void Delete(const std::string& handle, const std::string& principal, const InUse& in_use);
  // The worker is lost, and its residuals with it. Returns the requests that name them.
  std::vector<StreamId> OnWorkerLost(ConnectionId connection);
  // The residual is missing on a worker. Returns the requests that name it.
  std::vector<StreamId> Lose(const std::string& handle);
  // Eviction order: consumed, then oldest, then awaited by a request.
  std::vector<std::string> EvictionOrder(const InUse& in_use) const;
  // Returns the requests that name it.
  std::vector<StreamId> Evict(const std::string& handle);
  // Drops residuals that have expired.
  void CheckTimers(const InUse& in_use);
  void Forgive(absl::Duration pause);

  // --- Lookups.
  // Bytes by worker; workers without residuals have no entry.
  const std::map<ConnectionId, int64_t>& bytes_by_worker() const { return bytes_by_worker_; }
  const ResidualCounts& counts() const { return counts_; }
  // Consumed residuals that are still kept; only a retry can read them.
  int64_t consumed() const { return consumed_; }

 private:
  struct Ended {
    std::string handle;
    std::string principal;
    ResidualEnd end;
  };
  using Entries = std::map<std::string, Residual>;

  void Consume(Residual& residual, const std::string& request_id, absl::Time replay_until);
  std::optional<std::string> MakeRoom(const Residual& wanted, std::optional<int64_t> client_limit,
                                      const InUse& in_use);
  int64_t BytesOfClient(const std::string& client) const;
  // Informs its workers except `except`, remembers the reason, and returns its readers.
  std::vector<StreamId> Drop(Entries::iterator residual, ResidualEnd end,
                             std::optional<ConnectionId> except = std::nullopt);

  const CoordinatorConfig& config_;
  ActionBatch& batch_;
  Entries residuals_;                       // by handle
  std::map<uint64_t, std::string> oldest_;  // handles in order of keeping
  uint64_t last_number_ = 0;
  std::map<std::string, Ended> ended_;
  std::deque<std::string> ended_order_;  // newest last
  std::map<ConnectionId, int64_t> bytes_by_worker_;
  int64_t record_bytes_ = 0;
  int64_t consumed_ = 0;
  ResidualCounts counts_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_RESIDUALS_H_
