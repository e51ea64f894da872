#include <algorithm>
#include <utility>

#include "common/security/secret.h"
#include "common/wire/durations.h"
#include "server/core/kv/kv_caches.h"
#include "server/core/kv/kv_failures.h"

namespace ringattn::server {
namespace {

Failure BadToken() {
  Failure failure;
  failure.code = absl::StatusCode::kUnauthenticated;
  failure.reason = "BAD_TOKEN";
  failure.message = "the token is wrong or outdated; call OpenCache";
  return failure;
}

}  // namespace

v1::KvCacheInfo KvCaches::InfoOf(const KvCacheRecord& record) const {
  v1::KvCacheInfo info;
  info.set_cache_id(record.id);
  *info.mutable_spec() = ToProto(*record.spec);
  FillPlacement(record, info.mutable_placement());
  info.set_epoch(record.epoch);
  info.set_open(record.state == KvCacheState::kOpen);
  SetDuration(std::max(record.lease_end() - batch_.now(), absl::ZeroDuration()),
              info.mutable_expires_in());
  info.set_blocks_used(record.blocks_used);
  info.set_sequences(record.sequences);
  info.set_bytes_per_worker(ResponseOf(record).bytes_per_worker());
  for (const KvCacheMember& member : record.members) {
    if (member.leaving) info.add_leaving_workers(member.worker);
  }
  return info;
}

KvCacheView KvCaches::Find(const std::string& id, const std::string& principal) const {
  KvCacheView view;
  const auto found = caches_.find(id);
  if (found != caches_.end() && found->second.principal == principal &&
      found->second.state != KvCacheState::kReserving) {
    view.info = InfoOf(found->second);
    return view;
  }
  const auto ended = ended_.find(id);
  if (found == caches_.end() && ended != ended_.end() && ended->second.principal == principal) {
    view.info.set_cache_id(id);
    view.ended = KvEnded(ended->second.end, ended->second.detail);
    return view;
  }
  view.failure = KvNotFound();
  return view;
}

std::vector<v1::KvCacheInfo> KvCaches::List(const std::string& principal, const std::string& client,
                                            const std::string& after, int count) const {
  std::vector<v1::KvCacheInfo> infos;
  for (auto next = caches_.upper_bound(after); next != caches_.end(); ++next) {
    if (static_cast<int>(infos.size()) >= count) break;
    const KvCacheRecord& record = next->second;
    if (record.principal != principal || record.state == KvCacheState::kReserving) continue;
    if (principal.empty() && record.client != client) continue;
    infos.push_back(InfoOf(record));
  }
  return infos;
}

KvWriterView KvCaches::FindWriter(const std::string& id, const std::string& principal,
                                  uint64_t epoch, const std::string& token) const {
  KvWriterView view;
  const std::variant<const KvCacheRecord*, Failure> found = FindToOpen(id, principal);
  if (const auto* failure = std::get_if<Failure>(&found)) {
    view.failure = *failure;
    return view;
  }
  const KvCacheRecord& record = *std::get<const KvCacheRecord*>(found);
  if (epoch < record.epoch || (epoch == record.epoch && record.state != KvCacheState::kOpen)) {
    view.failure = KvFenced();
  } else if (epoch > record.epoch || record.relay_token.empty() ||
             !SecretsEqual(record.relay_token, token)) {
    view.failure = BadToken();
  } else {
    view.spec = record.spec;
    view.placement = record.placement;
    for (const KvCacheMember& member : record.members) {
      view.shards.push_back({member.worker, "", member.token});
    }
  }
  return view;
}

const KvCacheRecord* KvCaches::Get(const std::string& id) const {
  const auto found = caches_.find(id);
  return found == caches_.end() ? nullptr : &found->second;
}

int64_t KvCaches::BytesOn(ConnectionId connection) const {
  const auto found = bytes_by_worker_.find(connection);
  return found == bytes_by_worker_.end() ? 0 : found->second;
}

int KvCaches::CachesOn(ConnectionId connection) const {
  const auto found = ids_by_worker_.find(connection);
  return found == ids_by_worker_.end() ? 0 : static_cast<int>(found->second.size());
}

bool KvCaches::HasWriterOn(ConnectionId connection) const {
  const auto found = writers_by_worker_.find(connection);
  return found != writers_by_worker_.end() && found->second > 0;
}

KvCacheCounts KvCaches::counts() const {
  KvCacheCounts counts = counts_;
  counts.caches = static_cast<int64_t>(caches_.size());
  for (const auto& [connection, bytes] : bytes_by_worker_) counts.bytes += bytes;
  return counts;
}

}  // namespace ringattn::server
