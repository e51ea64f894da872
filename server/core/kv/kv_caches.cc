#include "server/core/kv/kv_caches.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/core/kv/kv_failures.h"

namespace ringattn::server {

// --------------------------------------------------------------------- records

void KvCaches::Insert(KvCacheRecord record) {
  const std::string id = record.id;
  record.spec_bytes = SpecBytes(*record.spec);
  spec_bytes_ += record.spec_bytes;
  if (!record.request_id.empty()) by_request_[{record.principal, record.request_id}] = id;
  lease_ends_.emplace(record.lease_end(), id);
  deadlines_.emplace(record.deadline, id);
  for (const KvCacheMember& member : record.members) {
    if (member.connection == 0) continue;
    bytes_by_worker_[member.connection] += member.bytes;
    ids_by_worker_[member.connection].insert(id);
  }
  caches_.emplace(id, std::move(record));
}

void KvCaches::SetBytes(KvCacheMember* member, int64_t bytes) {
  bytes_by_worker_[member->connection] += bytes - member->bytes;
  member->bytes = bytes;
}

void KvCaches::SetState(KvCacheRecord* record, KvCacheState state, absl::Duration limit) {
  deadlines_.erase({record->deadline, record->id});
  record->deadline = batch_.now() + limit;
  deadlines_.emplace(record->deadline, record->id);
  const int change = static_cast<int>(HasWriter(state)) - static_cast<int>(record->has_writer());
  counts_.open += static_cast<int>(state == KvCacheState::kOpen) -
                  static_cast<int>(record->state == KvCacheState::kOpen);
  record->state = state;
  for (KvCacheMember& member : record->members) {
    member.answered = false;
    if (change != 0) writers_by_worker_[member.connection] += change;
  }
}

void KvCaches::SetLeases(KvCacheRecord* record, absl::Time step_lease, absl::Time hold_lease) {
  lease_ends_.erase({record->lease_end(), record->id});
  record->step_lease = step_lease;
  record->hold_lease = hold_lease;
  lease_ends_.emplace(record->lease_end(), record->id);
}

KvCacheMember* KvCaches::MemberOf(KvCacheRecord* record, ConnectionId connection) {
  for (KvCacheMember& member : record->members) {
    if (member.connection == connection) return &member;
  }
  return nullptr;
}

bool KvCaches::AllAnswered(const KvCacheRecord& record) {
  return std::all_of(record.members.begin(), record.members.end(),
                     [](const KvCacheMember& member) { return member.answered; });
}

const std::string& KvCaches::LateWorker(const KvCacheRecord& record) {
  for (const KvCacheMember& member : record.members) {
    if (!member.answered) return member.worker;
  }
  return record.members.front().worker;
}

// ---------------------------------------------------------------------- leases

void KvCaches::OnTouched(ConnectionId connection, const v1::KvTouched& touched) {
  const auto found = caches_.find(touched.cache_id());
  if (found == caches_.end()) return;
  KvCacheRecord& record = found->second;
  const KvCacheMember* member = MemberOf(&record, connection);
  if (member == nullptr || record.state == KvCacheState::kReserving) return;
  if (!touched.failure().empty()) {
    const bool differ = touched.failure() == KvCacheEndReason(KvCacheEnd::kRanksDiffer);
    return End(found, differ ? KvCacheEnd::kRanksDiffer : KvCacheEnd::kLost,
               absl::StrCat("worker ", member->worker, ": ", touched.failure()));
  }
  if (touched.epoch() != record.epoch) return;  // an earlier writer's
  SetLeases(&record, batch_.now() + record.ttl, record.hold_lease);
  record.last_step = std::max(record.last_step, touched.step());
  record.blocks_used = touched.blocks_used();
  record.sequences = touched.sequences();
}

void KvCaches::Renew(const std::string& id, const std::string& principal, absl::Duration ttl) {
  const auto found = caches_.find(id);
  if (found == caches_.end() || found->second.principal != principal) return;
  SetLeases(&found->second, found->second.step_lease, batch_.now() + ttl);
}

void KvCaches::CheckTimers() {
  const absl::Time now = batch_.now();
  while (!lease_ends_.empty() && lease_ends_.begin()->first <= now) {
    End(caches_.find(lease_ends_.begin()->second), KvCacheEnd::kExpired, "");
  }
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const auto found = caches_.find(deadlines_.begin()->second);
    KvCacheRecord& record = found->second;
    switch (record.state) {
      case KvCacheState::kReserving:
        Withdraw(found, KvReserveInterrupted(LateWorker(record), "it did not answer in time",
                                             config_.retry_after));
        break;
      case KvCacheState::kAdopting:
        End(found, KvCacheEnd::kLost, "not all of its workers have joined again");
        break;
      case KvCacheState::kOpening:
      case KvCacheState::kSettling:
        FailOpening(&record,
                    KvBusy(LateWorker(record), config_.control_timeout, config_.retry_after));
        break;
      case KvCacheState::kIdle:
      case KvCacheState::kOpen:
        return;  // no deadline, and the set is ordered
    }
  }
}

void KvCaches::Forgive(absl::Duration pause) {
  lease_ends_.clear();
  deadlines_.clear();
  for (auto& [id, record] : caches_) {
    record.step_lease += pause;
    record.hold_lease += pause;
    record.deadline += pause;
    lease_ends_.emplace(record.lease_end(), id);
    deadlines_.emplace(record.deadline, id);
  }
}

// ------------------------------------------------------------------------ ends

void KvCaches::Delete(const std::string& id, const std::string& principal) {
  const auto found = caches_.find(id);
  if (found == caches_.end() || found->second.principal != principal) return;
  End(found, KvCacheEnd::kDeleted, "");
}

void KvCaches::Fail(const std::string& id, uint64_t epoch, KvCacheEnd end) {
  const auto found = caches_.find(id);
  if (found == caches_.end() || found->second.epoch != epoch) return;
  End(found, end, "");
}

void KvCaches::Lose(const std::string& id, const std::string& detail) {
  const auto found = caches_.find(id);
  if (found != caches_.end()) End(found, KvCacheEnd::kLost, detail);
}

void KvCaches::OnWorkerLost(ConnectionId connection, const std::string& worker) {
  const auto on_worker = ids_by_worker_.find(connection);
  if (on_worker == ids_by_worker_.end()) return;
  for (const std::string& id : std::set<std::string>(on_worker->second)) {
    const auto found = caches_.find(id);
    if (found->second.state == KvCacheState::kReserving) {
      Withdraw(found, KvReserveInterrupted(worker, "it was lost", config_.retry_after), connection);
    } else {
      const bool left = MemberOf(&found->second, connection)->leaving;
      End(found, KvCacheEnd::kLost,
          absl::StrCat("worker ", worker, left ? ", which was ordered to end" : ""), connection);
    }
  }
}

void KvCaches::OnWorkerLeaving(ConnectionId connection, const std::string& worker) {
  const auto on_worker = ids_by_worker_.find(connection);
  if (on_worker == ids_by_worker_.end()) return;
  for (const std::string& id : std::set<std::string>(on_worker->second)) {
    const auto found = caches_.find(id);
    if (found->second.state == KvCacheState::kReserving) {
      Withdraw(found, KvReserveInterrupted(worker, "it leaves", config_.retry_after));
    } else if (!found->second.has_writer()) {
      End(found, KvCacheEnd::kLost, absl::StrCat("worker ", worker, " leaves"));
    } else {
      MemberOf(&found->second, connection)->leaving = true;
    }
  }
}

void KvCaches::Withdraw(Entry entry, Failure failure, std::optional<ConnectionId> lost) {
  for (uint64_t call : entry->second.creating_calls) Refuse(call, failure);
  Erase(entry, KvCacheEndReason(KvCacheEnd::kDeleted), lost);
}

void KvCaches::End(Entry entry, KvCacheEnd end, const std::string& detail,
                   std::optional<ConnectionId> lost) {
  KvCacheRecord& record = entry->second;
  const Failure failure = KvEnded(end, detail);
  for (uint64_t call : record.creating_calls) Refuse(call, failure);
  if (record.opening) RefuseOpen(record.opening->call, failure);
  if (record.epoch > 0) batch_.Emit(KvWriterEnded{record.id, record.epoch, failure});
  ++counts_.ended[static_cast<size_t>(end)];
  Remember(record.id, {record.principal, end, detail});
  Erase(entry, KvCacheEndReason(end), lost);
}

void KvCaches::Erase(Entry entry, const char* reason, std::optional<ConnectionId> lost) {
  KvCacheRecord& record = entry->second;
  SetState(&record, KvCacheState::kIdle, absl::InfiniteDuration());  // counts it as closed
  lease_ends_.erase({record.lease_end(), record.id});
  deadlines_.erase({record.deadline, record.id});
  if (!record.request_id.empty()) by_request_.erase({record.principal, record.request_id});
  spec_bytes_ -= record.spec_bytes;
  for (const KvCacheMember& member : record.members) {
    if (member.connection == 0) continue;
    int64_t& bytes = bytes_by_worker_[member.connection];
    bytes -= member.bytes;
    std::set<std::string>& ids = ids_by_worker_[member.connection];
    ids.erase(record.id);
    if (ids.empty()) {
      ids_by_worker_.erase(member.connection);
      bytes_by_worker_.erase(member.connection);
      writers_by_worker_.erase(member.connection);
    }
    if (member.connection != lost) {
      batch_.SendKvFree(member.connection, reason)->add_cache_ids(record.id);
    }
  }
  caches_.erase(entry);
}

void KvCaches::Remember(const std::string& id, Ended ended) {
  if (!ended_.emplace(id, std::move(ended)).second) return;
  ended_order_.push_back(id);
  if (static_cast<int64_t>(ended_order_.size()) > config_.limits.ended_residuals_kept) {
    ended_.erase(ended_order_.front());
    ended_order_.pop_front();
  }
}

}  // namespace ringattn::server
