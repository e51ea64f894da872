#include <algorithm>
#include <utility>

#include "common/wire/durations.h"
#include "server/core/kv/kv_caches.h"
#include "server/core/kv/kv_failures.h"

namespace ringattn::server {
namespace {

// Zeroing a reservation takes time. Memory is written at 10 GB/s or faster.
constexpr int64_t kZeroedBytesPerSecond = 1'000'000'000;
// Limit of all specifications together, which are mostly sinks: the largest, 256 KiB, for 1,024
// caches.
constexpr int64_t kMaxSpecBytesOfAll = 256 * kMiB;

}  // namespace

bool KvCaches::AnswerRepeated(const KvCacheRequested& event) {
  if (event.request_id.empty()) return false;
  const auto found = by_request_.find({event.principal, event.request_id});
  if (found == by_request_.end()) return false;
  KvCacheRecord& record = caches_.at(found->second);
  if (record.fingerprint != event.fingerprint) {
    Refuse(event.call, KvRequestIdReused());
  } else if (record.state == KvCacheState::kReserving) {
    record.creating_calls.push_back(event.call);
  } else {
    batch_.Emit(KvCacheAnswered{event.call, std::nullopt, ResponseOf(record)});
  }
  return true;
}

std::optional<Failure> KvCaches::CheckLimits(const KvCacheRequested& event, int64_t bytes) const {
  const Limits& limits = config_.limits;
  if (static_cast<int64_t>(caches_.size()) >= limits.max_kv_caches) {
    return TooManyKvCaches(static_cast<int64_t>(caches_.size()), limits.max_kv_caches,
                           config_.retry_after);
  }
  if (spec_bytes_ + SpecBytes(*event.spec) > kMaxSpecBytesOfAll) {
    return KvSpecsTooLarge(kMaxSpecBytesOfAll, config_.retry_after);
  }
  int64_t caches = 0, held = 0;
  for (const auto& [id, record] : caches_) {
    if (record.client != event.client) continue;
    ++caches;
    held += record.bytes();
  }
  if (event.terms.max_kv_caches && caches >= *event.terms.max_kv_caches) {
    return KvClientHasTooManyCaches(event.client, *event.terms.max_kv_caches);
  }
  std::optional<int64_t> max_bytes = event.terms.max_kv_cache_bytes;
  if (!max_bytes && limits.max_kv_cache_bytes > 0) max_bytes = limits.max_kv_cache_bytes;
  if (max_bytes && bytes > *max_bytes - held) {
    return KvQuota(event.client, held, bytes, *max_bytes);
  }
  return std::nullopt;
}

void KvCaches::Refuse(uint64_t call, Failure failure) {
  ++counts_.refused;
  batch_.Emit(KvCacheAnswered{call, std::move(failure), {}});
}

void KvCaches::Reserve(const KvCacheRequested& event, const KvReservation& reservation) {
  KvCacheRecord record;
  record.id = event.id;
  record.principal = event.principal;
  record.client = event.client;
  record.request_id = event.request_id;
  record.fingerprint = event.fingerprint;
  record.spec = event.spec;
  if (reservation.block_tokens != event.spec->block_tokens) {
    KvCacheSpec divided = *event.spec;
    divided.block_tokens = reservation.block_tokens;
    record.spec = std::make_shared<const KvCacheSpec>(std::move(divided));
  }
  record.placement = reservation.placement;
  record.placement_reason = reservation.reason;
  record.ttl = event.ttl;
  record.step_lease = absl::InfiniteFuture();  // begins when the client learns the id
  record.creating_calls = {event.call};
  record.deadline = batch_.now() + config_.control_timeout +
                    absl::Seconds(reservation.bytes_per_worker / kZeroedBytesPerSecond);
  for (const auto& [connection, name] : reservation.members) {
    KvCacheMember& member = record.members.emplace_back();
    member.connection = connection;
    member.worker = name;
    member.bytes = reservation.bytes_per_worker;
  }
  const v1::KvCacheSpec spec = ToProto(*record.spec);
  for (size_t rank = 0; rank < record.members.size(); ++rank) {
    v1::KvReserve* reserve = batch_.Send(record.members[rank].connection)->mutable_kv_reserve();
    reserve->set_cache_id(record.id);
    *reserve->mutable_spec() = spec;
    FillPlacement(record, reserve->mutable_placement());
    reserve->set_rank(static_cast<uint32_t>(rank));
    reserve->set_principal(record.principal);
    reserve->set_client(record.client);
    SetDuration(record.ttl, reserve->mutable_ttl());
  }
  Insert(std::move(record));
}

void KvCaches::OnReserved(ConnectionId connection, const v1::KvReserved& reserved) {
  const auto found = caches_.find(reserved.cache_id());
  if (found == caches_.end() || found->second.state != KvCacheState::kReserving) return;
  KvCacheRecord& record = found->second;
  KvCacheMember* member = MemberOf(&record, connection);
  if (member == nullptr || member->answered) return;
  if (!reserved.ok()) {
    const std::string worker = member->worker;
    return Withdraw(found,
                    reserved.malformed() ? KvReserveMalformed(worker, reserved.reason())
                    : reserved.unsupported()
                        ? KvUnsupported(worker, reserved.reason())
                        : KvReserveRefused(worker, reserved.reason(), config_.retry_after),
                    connection);
  }
  member->answered = true;
  if (reserved.bytes() > 0) SetBytes(member, static_cast<int64_t>(reserved.bytes()));
  if (!AllAnswered(record)) return;
  SetState(&record, KvCacheState::kIdle, absl::InfiniteDuration());
  SetLeases(&record, batch_.now() + record.ttl, record.hold_lease);
  ++counts_.created;
  for (uint64_t call : std::exchange(record.creating_calls, {})) {
    batch_.Emit(KvCacheAnswered{call, std::nullopt, ResponseOf(record)});
  }
}

v1::CreateCacheResponse KvCaches::ResponseOf(const KvCacheRecord& record) const {
  v1::CreateCacheResponse response;
  response.set_cache_id(record.id);
  FillPlacement(record, response.mutable_placement());
  int64_t largest = 0;
  for (const KvCacheMember& member : record.members) largest = std::max(largest, member.bytes);
  response.set_bytes_per_worker(static_cast<uint64_t>(largest));
  return response;
}

}  // namespace ringattn::server
