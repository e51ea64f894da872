#include <algorithm>
#include <utility>

#include "common/wire/durations.h"
#include "server/core/kv/kv_caches.h"

namespace ringattn::server {

void KvCaches::Adopt(ConnectionId connection, const v1::Register& registration) {
  for (const v1::KvHeldCache& held : registration.kv_caches()) {
    const std::string& id = held.reserve().cache_id();
    const auto ended = ended_.find(id);
    if (ended == ended_.end() && AdoptOne(connection, registration.name(), held)) continue;
    const KvCacheEnd end = ended == ended_.end() ? KvCacheEnd::kLost : ended->second.end;
    batch_.SendKvFree(connection, KvCacheEndReason(end))->add_cache_ids(id);
  }
}

bool KvCaches::AdoptOne(ConnectionId connection, const std::string& worker,
                        const v1::KvHeldCache& held) {
  const v1::KvReserve& reserve = held.reserve();
  const uint32_t rank = reserve.rank();
  const auto places = static_cast<uint32_t>(reserve.placement().members_size());
  if (reserve.cache_id().empty() || rank >= places ||
      reserve.placement().members(static_cast<int>(rank)) != worker) {
    return false;
  }
  absl::StatusOr<KvCacheSpec> spec = ParseKvCacheSpec(reserve.spec(), config_.limits);
  if (!spec.ok()) return false;
  KvPlacement placement;
  placement.head_parts = static_cast<int>(reserve.placement().head_parts());
  placement.position_parts = static_cast<int>(reserve.placement().position_parts());
  if (places > static_cast<uint32_t>(config_.limits.max_world_size) ||
      placement != PlaceKvCache(*spec, static_cast<int>(places))) {
    return false;
  }
  const absl::Time lease =
      batch_.now() +
      std::clamp(ToDuration(held.lease_left()), absl::ZeroDuration(), config_.limits.max_kv_ttl);
  if (caches_.count(reserve.cache_id()) == 0) {
    if (static_cast<int64_t>(caches_.size()) >= config_.limits.max_kv_caches) return false;
    KvCacheRecord record;
    record.id = reserve.cache_id();
    record.principal = reserve.principal();
    record.client = reserve.client();
    record.spec = std::make_shared<const KvCacheSpec>(*std::move(spec));
    record.placement = placement;
    record.placement_reason = reserve.placement().reason();
    record.state = KvCacheState::kAdopting;
    record.ttl = std::min(ToDuration(reserve.ttl()), config_.limits.max_kv_ttl);
    record.step_lease = lease;
    record.deadline = batch_.now() + config_.kv_orphan_time;
    for (const std::string& name : reserve.placement().members()) {
      record.members.emplace_back().worker = name;
    }
    spec = *record.spec;
    Insert(std::move(record));
  }
  KvCacheRecord& record = caches_.at(reserve.cache_id());
  KvCacheMember& member = record.members[std::min<size_t>(rank, record.members.size() - 1)];
  if (record.state != KvCacheState::kAdopting || record.members.size() != places ||
      member.connection != 0 || member.worker != worker || *record.spec != *spec ||
      record.principal != reserve.principal()) {
    return false;
  }
  const bool is_first = std::all_of(record.members.begin(), record.members.end(),
                                    [](const KvCacheMember& each) { return !each.answered; });
  member.connection = connection;
  member.committed_step = held.committed_step();
  member.complete_step = held.complete_step();
  member.answered = true;
  ids_by_worker_[connection].insert(record.id);
  SetBytes(&member, KvBytesOfRank(*record.spec, record.placement, static_cast<int>(rank)));
  SetLeases(&record, std::max(record.step_lease, lease), record.hold_lease);
  // Epochs differ if the earlier coordinator was lost while it opened the cache. Then the older
  // writer is fenced on some ranks already.
  record.same_epoch &= is_first || record.epoch == held.epoch();
  record.epoch = std::max(record.epoch, held.epoch());
  record.last_step = std::max(record.last_step, held.committed_step());
  if (AllAnswered(record)) FinishAdoption(&record);
  return true;
}

void KvCaches::FinishAdoption(KvCacheRecord* record) {
  ++counts_.adopted;
  const bool open = record->same_epoch && record->epoch > 0;
  SetState(record, open ? KvCacheState::kOpen : KvCacheState::kIdle, absl::InfiniteDuration());
  // Its writer uses direct streams, because relayed streams ended with the earlier coordinator.
  record->transport = v1::TRANSPORT_DIRECT;
}

}  // namespace ringattn::server
