#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/security/token.h"
#include "server/core/kv/kv_caches.h"
#include "server/core/kv/kv_failures.h"

namespace ringattn::server {
namespace {

std::string WriterToken(const std::string& seed, const std::string& id, uint64_t epoch,
                        const std::string& who) {
  return DeriveToken(seed, absl::StrCat("kv ", absl::BytesToHexString(id), " ", epoch, " ", who));
}

}  // namespace

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

}  // namespace ringattn::server
