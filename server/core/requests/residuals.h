// Residuals: what Forwards left with the workers for a Backward each, by handle. The coordinator
// has the records, the workers the memory; a worker is told what to let go of, and does not
// answer, since what it is told later finds the memory free.
//
//   Keep -> kept -> consumed by a Backward -> dropped
//             \-> expired, lost, evicted, deleted -> dropped
//
// What was dropped is remembered for a while, so that who asks for it learns why.
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
#include "server/core/events/batch.h"
#include "server/core/events/config.h"
#include "server/core/events/residual_view.h"

namespace ringattn::server {

struct ResidualMember {
  ConnectionId connection = 0;
  int64_t bytes = 0;  // that it keeps
};

struct Residual {
  std::string handle;
  std::string principal;                      // who may use it
  std::string client;                         // whose quota it counts for
  std::string operation_id;                   // names it to the workers
  std::shared_ptr<const AttentionSpec> spec;  // the Forward's
  std::shared_ptr<const Plan> plan;           // likewise; without its spans
  uint64_t fingerprint = 0;                   // of the Forward: equal ones share plans
  std::vector<ResidualMember> members;        // by ring rank
  absl::Duration ttl;
  absl::Time expires;
  // Set once it is consumed: only this request, sent again, may read it, until then.
  bool consumed = false;
  std::string consumed_by;
  absl::Time replay_until;
  // Requests that name it and have not ended.
  std::set<StreamId> readers;
  uint64_t number = 0;  // in the order in which they were kept

  int64_t bytes() const;
  bool IsOn(ConnectionId connection) const;
};

// Not thread safe. References stay valid until their residual is dropped.
class Residuals {
 public:
  // Both outlive it.
  Residuals(const CoordinatorConfig* config, ActionBatch* batch)
      : config_(*config), batch_(*batch) {}

  // Handles whose residual a worker reads, or will: these stay, whatever happens.
  using InUse = std::set<std::string>;

  // --- Keeping.
  // Empty: it is kept, and expires after its ttl. Else why not; consumed ones that are not read
  // make room first.
  //   client_limit  what this client may have at a time
  std::string Keep(Residual residual, std::optional<int64_t> client_limit, const InUse& in_use);
  // A forward that asked for it is served without: counted.
  void CountRefusal() { ++counts_.refused; }

  // --- Reading.
  // Nothing if the request may read it.
  std::optional<Failure> WhyNot(const std::string& handle, const std::string& principal,
                                const std::string& request_id) const;
  // Null if it is gone.
  const Residual* Find(const std::string& handle) const;
  // REQUIRES: not gone.
  void Attach(const std::string& handle, StreamId reader);
  // The reader's request has ended. Nothing if the residual is gone.
  void Detach(const std::string& handle, StreamId reader);
  // A Backward has succeeded with it.
  void Read(const std::string& handle, const std::string& request_id, bool keep);

  // --- Endings.
  void Renew(const std::string& handle, const std::string& principal, absl::Duration ttl);
  void Delete(const std::string& handle, const std::string& principal, const InUse& in_use);
  // A worker is gone, and with it its residuals. The requests that name them.
  std::vector<StreamId> OnWorkerGone(ConnectionId connection);
  // It is not where it should be. The requests that name it.
  std::vector<StreamId> Lose(const std::string& handle);
  // What may go to make room, the least missed first: consumed ones, then the oldest, last those
  // that a request waits to read.
  std::vector<std::string> EvictionOrder(const InUse& in_use) const;
  // The requests that name it.
  std::vector<StreamId> Evict(const std::string& handle);
  // Those whose time is over.
  void CheckTimers(const InUse& in_use);
  void Forgive(absl::Duration pause);

  // --- Lookups.
  // No entry: none.
  const std::map<ConnectionId, int64_t>& bytes_by_worker() const { return bytes_by_worker_; }
  const ResidualCounts& counts() const { return counts_; }
  // Of those that are kept: nobody but a replay reads them.
  int64_t consumed() const { return consumed_; }

 private:
  struct Gone {
    std::string handle;
    std::string principal;
    ResidualEnd end;
  };
  using Entries = std::map<std::string, Residual>;

  void Consume(Residual& residual, const std::string& request_id, absl::Time replay_until);
  std::optional<std::string> MakeRoom(const Residual& wanted, std::optional<int64_t> client_limit,
                                      const InUse& in_use);
  int64_t BytesOfClient(const std::string& client) const;
  // Tells its workers but `besides`, remembers why, and returns its readers.
  std::vector<StreamId> Drop(Entries::iterator residual, ResidualEnd end,
                             std::optional<ConnectionId> besides = std::nullopt);

  const CoordinatorConfig& config_;
  ActionBatch& batch_;
  Entries residuals_;                       // by handle
  std::map<uint64_t, std::string> oldest_;  // their handles in the order in which they were kept
  uint64_t last_number_ = 0;
  std::map<std::string, Gone> gone_;
  std::deque<std::string> gone_order_;  // the newest last
  std::map<ConnectionId, int64_t> bytes_by_worker_;
  int64_t record_bytes_ = 0;
  int64_t consumed_ = 0;
  ResidualCounts counts_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_REQUESTS_RESIDUALS_H_
