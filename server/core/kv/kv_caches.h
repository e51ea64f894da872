// KvCaches: the coordinator's records of K/V caches. Workers own the memory, the sequences and the
// step log; the coordinator knows who may use a cache, where it is, which writer is the newest and
// when its lease ends.
//
//   Reserve -> reserving -> idle -> opening(e) -> open(e) -> opening(e + 1) -> ...
//   Adopt   -> adopting  -> idle or open(e)          caches that an earlier coordinator made
//   any state -> ended: expired, deleted, lost, ... ; remembered for a while
//
// Epochs. Every OpenCache begins an epoch. Each rank fences older epochs and reports its log
// (KvOpened). The last step S of the log is the largest committed step of any rank, or
// answered_step if the caller claims more. Every rank commits or undoes to exactly S (KvSettle).
// Then the caller is the writer. docs/inference.md explains why this loses no answered step.
//
// Leases. A cache ends when neither a step nor a hold has renewed it. Ends are kept in order of
// time.
//
// KvFree is not answered, because the control stream is ordered: a later KvReserve finds the memory
// free.
// Tests: kv_caches_test, server/core/scenarios/testdata/kv_caches.txt, tests/simulation.
#ifndef RINGATTN_SERVER_CORE_KV_KV_CACHES_H_
#define RINGATTN_SERVER_CORE_KV_KV_CACHES_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "common/kv/cache_spec.h"
#include "common/kv/placement.h"
#include "ringattn/v1/worker_control.pb.h"
#include "server/core/events/action_batch.h"
#include "server/core/events/config.h"
#include "server/core/events/kv_events.h"
#include "server/core/kv/kv_cache_record.h"

namespace ringattn::server {

// Where a new cache goes.
struct KvReservation {
  KvPlacement placement;
  std::vector<std::pair<ConnectionId, std::string>> members;  // by rank, with names
  int64_t bytes_per_worker = 0;
  int64_t block_tokens = 0;  // of a part's block
  std::string reason;        // why these workers and parts
};

// The transport of a writer.
struct KvTransport {
  v1::Transport transport = v1::TRANSPORT_RELAY;
  std::string reason;
  std::vector<std::string> endpoints;  // by rank; empty for TRANSPORT_RELAY
  std::string region_id;               // TRANSPORT_HOST_MEMORY
};

// Not thread safe. References stay valid until their cache ends.
class KvCaches {
 public:
  // Both arguments must outlive this object.
  KvCaches(const CoordinatorConfig* config, ActionBatch* batch)
      : config_(*config), batch_(*batch) {}

  // --- Creating: kv_caches_creating.cc.
  // Answers the call if the principal's request was made before; then returns true.
  bool AnswerRepeated(const KvCacheRequested& event);
  // Returns the limit that another cache of this many bytes, summed over workers, would exceed.
  std::optional<Failure> CheckLimits(const KvCacheRequested& event, int64_t bytes) const;
  void Refuse(uint64_t call, Failure failure);
  // REQUIRES: CheckLimits permits it.
  void Reserve(const KvCacheRequested& event, const KvReservation& reservation);
  void OnReserved(ConnectionId connection, const v1::KvReserved& reserved);

  // --- Opening: kv_caches_opening.cc.
  // Returns the cache if this principal may open it now, else the failure.
  std::variant<const KvCacheRecord*, Failure> FindToOpen(const std::string& id,
                                                         const std::string& principal) const;
  // Begins an epoch. An OpenCache call that waits ends with KV_FENCED.
  // REQUIRES: FindToOpen(event.id) has a cache.
  void Open(const KvWriterRequested& event, const KvTransport& transport);
  void RefuseOpen(uint64_t call, Failure failure);
  void OnOpened(ConnectionId connection, const v1::KvOpened& opened);
  void OnSettled(ConnectionId connection, const v1::KvSettled& settled);

  // --- Leases.
  void OnTouched(ConnectionId connection, const v1::KvTouched& touched);
  // A hold. Never shortens the lease that the last step gave.
  void Renew(const std::string& id, const std::string& principal, absl::Duration ttl);
  void CheckTimers();
  void Forgive(absl::Duration pause);

  // --- Ends.
  void Delete(const std::string& id, const std::string& principal);
  // The relay reports a failure of this epoch.
  void Fail(const std::string& id, uint64_t epoch, KvCacheEnd end);
  // Ends every cache on the worker at once.
  void OnWorkerLost(ConnectionId connection, const std::string& worker);
  // The worker was ordered to end: caches on it without a writer end. The others go on until it
  // closes its stream.
  void OnWorkerLeaving(ConnectionId connection, const std::string& worker);
  void Lose(const std::string& id, const std::string& detail);

  // --- Restarts of the coordinator: kv_caches_adoption.cc.
  // Takes over the caches that a worker holds; frees those that have ended or that contradict what
  // other workers registered.
  void Adopt(ConnectionId connection, const v1::Register& registration);

  // --- Lookups: kv_caches_lookups.cc. Unknown caches and other principals' give the same failure.
  KvCacheView Find(const std::string& id, const std::string& principal) const;
  // At most `count` caches of the principal in order of ids, after `after`. An anonymous caller
  // sees those that its connection created, because ids are secrets.
  std::vector<v1::KvCacheInfo> List(const std::string& principal, const std::string& client,
                                    const std::string& after, int count) const;
  // Checks the fields of a StepHello on the relay. The shards lack their data addresses.
  KvWriterView FindWriter(const std::string& id, const std::string& principal, uint64_t epoch,
                          const std::string& token) const;
  const KvCacheRecord* Get(const std::string& id) const;
  // Bytes by worker; workers without caches have no entry.
  const std::map<ConnectionId, int64_t>& bytes_by_worker() const { return bytes_by_worker_; }
  int64_t BytesOn(ConnectionId connection) const;
  int CachesOn(ConnectionId connection) const;
  // A writer may send steps to the worker.
  bool HasWriterOn(ConnectionId connection) const;
  KvCacheCounts counts() const;
  const std::map<std::string, KvCacheRecord>& all() const { return caches_; }

 private:
  struct Ended {
    std::string principal;
    KvCacheEnd end;
    std::string detail;
  };
  using Entry = std::map<std::string, KvCacheRecord>::iterator;

  void Insert(KvCacheRecord record);
  void SetBytes(KvCacheMember* member, int64_t bytes);
  void SetState(KvCacheRecord* record, KvCacheState state, absl::Duration limit);
  // Updates the order of ends.
  void SetLeases(KvCacheRecord* record, absl::Time step_lease, absl::Time hold_lease);
  KvCacheMember* MemberOf(KvCacheRecord* record, ConnectionId connection);
  static bool AllAnswered(const KvCacheRecord& record);
  // The first worker that has not answered.
  static const std::string& LateWorker(const KvCacheRecord& record);
  v1::CreateCacheResponse ResponseOf(const KvCacheRecord& record) const;
  v1::KvCacheInfo InfoOf(const KvCacheRecord& record) const;
  void Settle(KvCacheRecord* record);
  void AnswerWriter(KvCacheRecord* record);
  // Answers the waiting OpenCache call and leaves the cache idle.
  void FailOpening(KvCacheRecord* record, Failure failure);
  // Ends a cache that was never answered to a client; its calls get `failure`.
  void Withdraw(Entry entry, Failure failure, std::optional<ConnectionId> lost = std::nullopt);
  // Frees its memory, remembers the reason, and informs its callers and its writer.
  void End(Entry entry, KvCacheEnd end, const std::string& detail,
           std::optional<ConnectionId> lost = std::nullopt);
  // Frees its memory on all workers but `lost`, and erases the record.
  void Erase(Entry entry, const char* reason, std::optional<ConnectionId> lost);
  void Remember(const std::string& id, Ended ended);
  bool AdoptOne(ConnectionId connection, const std::string& worker, const v1::KvHeldCache& held);
  void FinishAdoption(KvCacheRecord* record);

  const CoordinatorConfig& config_;
  ActionBatch& batch_;
  std::map<std::string, KvCacheRecord> caches_;                            // by id
  std::map<std::pair<std::string, std::string>, std::string> by_request_;  // principal, request_id
  std::set<std::pair<absl::Time, std::string>> lease_ends_;
  std::set<std::pair<absl::Time, std::string>> deadlines_;  // of states that wait for answers
  std::map<ConnectionId, int64_t> bytes_by_worker_;
  std::map<ConnectionId, std::set<std::string>> ids_by_worker_;
  std::map<ConnectionId, int> writers_by_worker_;
  std::map<std::string, Ended> ended_;
  std::deque<std::string> ended_order_;  // newest last
  int64_t spec_bytes_ = 0;
  KvCacheCounts counts_;  // `caches` and `bytes` are computed on demand
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_CORE_KV_KV_CACHES_H_
