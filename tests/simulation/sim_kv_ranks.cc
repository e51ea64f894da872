#include "tests/simulation/sim_kv_ranks.h"

#include <algorithm>
#include <utility>

#include "common/wire/durations.h"

namespace ringattn::server::simulation {

const SimKvRanks::Rank* SimKvRanks::Find(const std::string& cache) const {
  const auto found = ranks_.find(cache);
  return found == ranks_.end() ? nullptr : &found->second;
}

int64_t SimKvRanks::bytes() const {
  int64_t bytes = 0;
  for (const auto& [id, rank] : ranks_) bytes += rank.bytes;
  return bytes;
}

void SimKvRanks::Enqueue(absl::Duration time, std::function<void()> work) {
  busy_until_ = std::max(busy_until_, world_->now()) + time;
  host_.later(busy_until_ - world_->now(), std::move(work));
}

bool SimKvRanks::OnMessage(const v1::JoinResponse& message) {
  const absl::Duration soon = world_->random.Between(absl::Microseconds(10), absl::Milliseconds(5));
  if (message.has_kv_reserve()) {
    const v1::KvReserve& reserve = message.kv_reserve();
    v1::JoinRequest answer;
    v1::KvReserved* reserved = answer.mutable_kv_reserved();
    reserved->set_cache_id(reserve.cache_id());
    Rank rank;
    rank.reserve = reserve;
    const KvCacheSpec spec = *ParseKvCacheSpec(reserve.spec(), Limits());
    const KvPlacement placement = PlaceKvCache(spec, reserve.placement().members_size());
    rank.log = std::make_unique<KvStepLog>(spec, placement);
    rank.bytes = KvBytesOfRank(spec, placement, static_cast<int>(reserve.rank()));
    rank.lease_end = absl::InfiniteFuture();
    if (rank.bytes > room_ - bytes()) {
      reserved->set_reason("no memory");
    } else {
      reserved->set_ok(true);
      reserved->set_bytes(static_cast<uint64_t>(rank.bytes));
      ranks_[reserve.cache_id()] = std::move(rank);
    }
    Enqueue(soon, [this, answer] { host_.say(answer); });
    return true;
  }
  if (message.has_kv_open()) {
    Enqueue(soon, [this, open = message.kv_open()] {
      v1::JoinRequest answer;
      v1::KvOpened* opened = answer.mutable_kv_opened();
      opened->set_cache_id(open.cache_id());
      opened->set_epoch(open.epoch());
      const auto found = ranks_.find(open.cache_id());
      opened->set_missing(found == ranks_.end());
      if (found != ranks_.end()) {
        Rank& rank = found->second;
        if (!rank.log->Open(open.epoch()).ok()) return;  // a newer one has come
        rank.token = open.token();
        opened->set_committed_step(rank.log->committed());
        opened->set_complete_step(rank.log->complete());
        host_.changed(open.cache_id());
      }
      host_.say(answer);
    });
    return true;
  }
  if (message.has_kv_settle()) {
    Enqueue(soon, [this, settle = message.kv_settle()] {
      const auto found = ranks_.find(settle.cache_id());
      if (found == ranks_.end()) return;
      const absl::Status status = found->second.log->Settle(settle.epoch(), settle.step());
      v1::JoinRequest answer;
      v1::KvSettled* settled = answer.mutable_kv_settled();
      settled->set_cache_id(settle.cache_id());
      settled->set_epoch(settle.epoch());
      settled->set_ok(status.ok());
      settled->set_reason(std::string(status.message()));
      Touch(&found->second);
      host_.changed(settle.cache_id());
      host_.say(answer);
    });
    return true;
  }
  if (message.has_kv_free()) {
    for (const std::string& id : message.kv_free().cache_ids()) ranks_.erase(id);
    return true;
  }
  return false;
}

void SimKvRanks::AddTo(v1::Register* registration) const {
  registration->set_max_kv_cache_bytes(static_cast<uint64_t>(room_));
  for (const auto& [id, rank] : ranks_) {
    v1::KvHeldCache* held = registration->add_kv_caches();
    *held->mutable_reserve() = rank.reserve;
    held->set_epoch(rank.log->epoch());
    held->set_committed_step(rank.log->committed());
    held->set_complete_step(rank.log->complete());
    const absl::Duration left = rank.lease_end == absl::InfiniteFuture()
                                    ? ToDuration(rank.reserve.ttl())
                                    : rank.lease_end - world_->now();
    SetDuration(std::max(left, absl::ZeroDuration()), held->mutable_lease_left());
  }
}

void SimKvRanks::OnOrphaned() {
  for (auto& [id, rank] : ranks_) {
    if (rank.lease_end == absl::InfiniteFuture()) {
      rank.lease_end = world_->now() + ToDuration(rank.reserve.ttl());
    }
  }
  host_.later(orphan_time_, [this, orphaned = ++orphaned_] {
    if (orphaned == orphaned_ && !host_.connected()) ranks_.clear();
  });
}

void SimKvRanks::Touch(Rank* rank) {
  rank->lease_end = world_->now() + ToDuration(rank->reserve.ttl());
  if (world_->now() < rank->touched_at + absl::Seconds(1)) return;
  rank->touched_at = world_->now();
  v1::JoinRequest message;
  v1::KvTouched* touched = message.mutable_kv_touched();
  touched->set_cache_id(rank->reserve.cache_id());
  touched->set_epoch(rank->log->epoch());
  touched->set_step(rank->log->committed());
  touched->set_blocks_used(static_cast<uint64_t>(rank->log->blocks().blocks_used()));
  touched->set_sequences(static_cast<uint64_t>(rank->log->blocks().num_sequences()));
  host_.say(message);
}

void SimKvRanks::Do(const KvStepMessage& message, std::function<void(const KvStepAnswer&)> answer) {
  const absl::Duration time =
      world_->random.Between(absl::Microseconds(100), absl::Milliseconds(20));
  Enqueue(time, [this, message, answer = std::move(answer)] { answer(Answer(message)); });
}

KvStepAnswer SimKvRanks::Answer(const KvStepMessage& message) {
  const auto found = ranks_.find(message.cache);
  if (found == ranks_.end()) return {absl::UnavailableError("no such cache")};
  Rank& rank = found->second;
  if (rank.token != message.token) return {absl::UnauthenticatedError("another token")};
  KvStepAnswer answer;
  if (message.begin) {
    absl::StatusOr<KvStepLog::Begun> begun = rank.log->Begin(message.epoch, *message.begin);
    answer.status = begun.status();
    answer.refused = begun.ok() && !begun->refusals.empty();
    if (begun.ok() && !answer.refused) {
      answer.tables_crc32c = rank.log->blocks().tables_crc32c();
    }
  } else {
    const bool appends = true;
    answer.status = rank.log->StartCall(message.epoch, message.number, message.layer, appends);
    if (answer.status.ok()) rank.log->FinishCall(message.layer, appends);
  }
  if (answer.status.ok()) Touch(&rank);
  host_.changed(message.cache);
  return answer;
}

}  // namespace ringattn::server::simulation
