#include "server/core/kv/kv_caches.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/security/token.h"
#include "common/wire/durations.h"
#include "server/core/kv/kv_failures.h"

namespace ringattn::server {
namespace {

// Zeroing a reservation takes time. Memory is written at 10 GB/s or faster.
constexpr int64_t kZeroedBytesPerSecond = 1'000'000'000;
// Of all specifications together, mostly sinks: the largest, 256 KiB, for 1,024 caches.
constexpr int64_t kMaxSpecBytesOfAll = 256 * kMiB;

int64_t SpecBytes(const KvCacheSpec& spec) {
  int64_t bytes = static_cast<int64_t>(sizeof(KvCacheSpec) + spec.label.size());
  for (const KvLayerGroup& group : spec.groups) {
    bytes += static_cast<int64_t>(sizeof(KvLayerGroup) + group.layers.size() * sizeof(uint32_t) +
                                  group.sinks.size() * sizeof(float));
  }
  return bytes;
}

// Takes the same time for all tokens of one length.
bool SameToken(const std::string& a, const std::string& b) {
  if (a.empty() || a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

std::string WriterToken(const std::string& seed, const std::string& id, uint64_t epoch,
                        const std::string& who) {
  return DeriveToken(seed, absl::StrCat("kv ", absl::BytesToHexString(id), " ", epoch, " ", who));
}

bool HasWriter(KvCacheState state) {
  return state == KvCacheState::kOpening || state == KvCacheState::kSettling ||
         state == KvCacheState::kOpen;
}

void FillPlacement(const KvCacheRecord& record, v1::KvPlacement* placement) {
  placement->set_head_parts(record.placement.head_parts);
  placement->set_position_parts(record.placement.position_parts);
  for (const KvCacheMember& member : record.members) placement->add_members(member.worker);
}

Failure BadToken() {
  Failure failure;
  failure.code = absl::StatusCode::kUnauthenticated;
  failure.reason = "BAD_TOKEN";
  failure.message = "the token is wrong or outdated; call OpenCache";
  return failure;
}

}  // namespace

int64_t KvCacheRecord::bytes() const {
  int64_t bytes = 0;
  for (const KvCacheMember& member : members) bytes += member.bytes;
  return bytes;
}

bool KvCacheRecord::IsOn(ConnectionId connection) const {
  return std::any_of(members.begin(), members.end(),
                     [&](const KvCacheMember& member) { return member.connection == connection; });
}

bool KvCacheRecord::has_writer() const { return HasWriter(state); }

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

// -------------------------------------------------------------------- creating

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
  record.placement = reservation.placement;
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

// --------------------------------------------------------------------- opening

std::variant<const KvCacheRecord*, Failure> KvCaches::FindToOpen(
    const std::string& id, const std::string& principal) const {
  const auto found = caches_.find(id);
  if (found != caches_.end() && found->second.principal == principal) {
    if (found->second.state == KvCacheState::kAdopting) return KvNotYetAdopted(config_.retry_after);
    if (found->second.state == KvCacheState::kReserving) return KvNotFound();
    return &found->second;
  }
  const auto ended = ended_.find(id);
  if (found == caches_.end() && ended != ended_.end() && ended->second.principal == principal) {
    return KvEnded(ended->second.end, ended->second.detail);
  }
  return KvNotFound();
}

void KvCaches::RefuseOpen(uint64_t call, Failure failure) {
  batch_.Emit(KvWriterAnswered{call, std::move(failure), {}});
}

void KvCaches::Open(const KvWriterRequested& event, const KvTransport& transport) {
  KvCacheRecord& record = caches_.at(event.id);
  if (record.opening) RefuseOpen(record.opening->call, KvFenced());
  if (record.epoch > 0) batch_.Emit(KvWriterEnded{record.id, record.epoch, KvFenced()});
  record.opening = event;
  ++record.epoch;
  record.transport = transport.transport;
  record.transport_reason = transport.reason;
  record.relay_token.clear();
  if (transport.transport == v1::TRANSPORT_RELAY) {
    record.relay_token = WriterToken(event.token_seed, record.id, record.epoch, "relay");
  }
  record.opening->endpoints = transport.endpoints;
  SetState(&record, KvCacheState::kOpening, config_.control_timeout);
  SetLeases(&record, batch_.now() + record.ttl, record.hold_lease);
  for (size_t rank = 0; rank < record.members.size(); ++rank) {
    KvCacheMember& member = record.members[rank];
    member.token = WriterToken(event.token_seed, record.id, record.epoch, absl::StrCat(rank));
    v1::KvOpen* open = batch_.Send(member.connection)->mutable_kv_open();
    open->set_cache_id(record.id);
    open->set_epoch(record.epoch);
    open->set_token(member.token);
    open->set_region_id(transport.region_id);
  }
}

void KvCaches::OnOpened(ConnectionId connection, const v1::KvOpened& opened) {
  const auto found = caches_.find(opened.cache_id());
  if (found == caches_.end()) return;
  KvCacheRecord& record = found->second;
  KvCacheMember* member = MemberOf(&record, connection);
  if (member == nullptr) return;
  if (opened.missing()) {
    return End(found, KvCacheEnd::kLost,
               absl::StrCat("worker ", member->worker, " does not have it"));
  }
  if (record.state != KvCacheState::kOpening || opened.epoch() != record.epoch) return;
  member->answered = true;
  member->committed_step = opened.committed_step();
  member->complete_step = opened.complete_step();
  if (AllAnswered(record)) Settle(&record);
}

void KvCaches::Settle(KvCacheRecord* record) {
  uint64_t committed = 0;
  uint64_t complete = record->members.front().complete_step;
  for (const KvCacheMember& member : record->members) {
    committed = std::max(committed, member.committed_step);
    complete = std::min(complete, member.complete_step);
  }
  if (complete < committed) {
    return End(caches_.find(record->id), KvCacheEnd::kInconsistent,
               absl::StrCat("a worker has committed step ", committed,
                            ", another has completed step ", complete));
  }
  const uint64_t answered = record->opening->answered_step;
  if (complete < answered) return FailOpening(record, KvStepNotAnswered(answered, complete));
  record->settled_step = std::max(committed, answered);
  SetState(record, KvCacheState::kSettling, config_.control_timeout);
  for (const KvCacheMember& member : record->members) {
    v1::KvSettle* settle = batch_.Send(member.connection)->mutable_kv_settle();
    settle->set_cache_id(record->id);
    settle->set_epoch(record->epoch);
    settle->set_step(record->settled_step);
  }
}

void KvCaches::OnSettled(ConnectionId connection, const v1::KvSettled& settled) {
  const auto found = caches_.find(settled.cache_id());
  if (found == caches_.end()) return;
  KvCacheRecord& record = found->second;
  KvCacheMember* member = MemberOf(&record, connection);
  if (member == nullptr || record.state != KvCacheState::kSettling ||
      settled.epoch() != record.epoch) {
    return;
  }
  if (!settled.ok()) {
    return End(found, KvCacheEnd::kInconsistent,
               absl::StrCat("worker ", member->worker, ": ", settled.reason()));
  }
  member->answered = true;
  if (AllAnswered(record)) AnswerWriter(&record);
}

void KvCaches::AnswerWriter(KvCacheRecord* record) {
  const KvWriterRequested event = *std::exchange(record->opening, std::nullopt);
  SetState(record, KvCacheState::kOpen, absl::InfiniteDuration());
  SetLeases(record, batch_.now() + record->ttl, record->hold_lease);
  record->last_step = record->settled_step;
  ++counts_.opened;
  KvWriterAnswered answer{event.call, std::nullopt, {}};
  v1::OpenCacheResponse& response = answer.response;
  response.set_epoch(record->epoch);
  response.set_next_step(record->settled_step + 1);
  FillPlacement(*record, response.mutable_placement());
  response.set_transport(record->transport);
  response.set_transport_reason(record->transport_reason);
  response.set_token(record->relay_token);
  if (record->transport != v1::TRANSPORT_RELAY) {
    for (size_t rank = 0; rank < record->members.size(); ++rank) {
      v1::KvShardTicket* ticket = response.add_shards();
      ticket->set_rank(static_cast<uint32_t>(rank));
      ticket->set_worker(record->members[rank].worker);
      ticket->add_endpoints(event.endpoints[rank]);
      ticket->set_token(record->members[rank].token);
    }
  }
  batch_.Emit(std::move(answer));
}

void KvCaches::FailOpening(KvCacheRecord* record, Failure failure) {
  RefuseOpen(std::exchange(record->opening, std::nullopt)->call, std::move(failure));
  SetState(record, KvCacheState::kIdle, absl::InfiniteDuration());
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

// -------------------------------------------------------------------- adoption

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

// --------------------------------------------------------------------- lookups

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
  } else if (epoch > record.epoch || !SameToken(record.relay_token, token)) {
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
