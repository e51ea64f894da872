#include "tests/simulation/kv_writers.h"

#include <algorithm>
#include <utility>

namespace ringattn::server::simulation {
namespace {

constexpr uint32_t kLayers = 2;
constexpr int64_t kMaxLength = 40;  // of the one sequence; fits into every cache

KvCacheSpec RandomSpec(Random& random) {
  KvCacheSpec spec;
  KvLayerGroup& group = spec.groups.emplace_back();
  for (uint32_t layer = 0; layer < kLayers; ++layer) group.layers.push_back(layer);
  group.num_kv_heads = group.num_heads = int64_t{1} << random.Below(3);
  group.head_dim = group.head_dim_v = 8;
  group.softmax_scale = 1;
  spec.block_tokens = 16;
  spec.blocks = random.OneIn(4) ? 40 : 4;
  return spec;
}

}  // namespace

void KvWriters::StartRandomCache(int max_world_size) {
  Random& random = world_->random;
  KvCacheRequested event;
  event.call = ++last_call_;
  event.id = absl::StrCat("cache-", event.call);
  event.principal = random.OneIn(2) ? "a" : "b";
  event.client = event.principal;
  if (random.OneIn(8)) event.terms.max_kv_cache_bytes = 5000;
  KvCacheSpec spec = RandomSpec(random);
  if (event.call % 3 == 0) {  // of one block, which position parts may divide
    spec.block_tokens = 64;
    spec.blocks /= 4;
  }
  event.spec = std::make_shared<const KvCacheSpec>(std::move(spec));
  event.ttl = random.Between(absl::Seconds(3), absl::Seconds(10));
  if (random.OneIn(2)) event.world_size = 1 + static_cast<int>(random.Below(max_world_size));
  // As the client library does.
  event.divide_blocks = !event.world_size.has_value();
  Cache& cache = caches_[event.id];
  cache.principal = event.principal;
  cache.ttl = event.ttl;
  creating_[event.call] = event.id;
  world_->Trace(event.id, " is requested");
  control_->Feed(event);
}

void KvWriters::OnCoordinatorRestarted() {
  // The edge ends these calls with UNAVAILABLE.
  creating_.clear();
  for (const auto& [call, opening] : std::exchange(opening_, {})) {
    OpenLater(opening.cache, opening.claim);
  }
}

void KvWriters::OnAction(const Action& action) {
  if (const auto* created = std::get_if<KvCacheAnswered>(&action)) {
    const auto found = creating_.find(created->call);
    if (found == creating_.end()) return;
    const std::string id = found->second;
    creating_.erase(found);
    ++ends_[absl::StrCat("(cache) ", created->failure ? created->failure->reason : "created")];
    if (created->failure) return;
    Cache& cache = caches_.at(id);
    cache.members = {created->response.placement().members().begin(),
                     created->response.placement().members().end()};
    cache.renewed = world_->now();
    cache.lengths[0] = 0;
    Open(id, {});
    if (world_->random.OneIn(8)) Open(id, {});  // two at once
  } else if (const auto* opened = std::get_if<KvWriterAnswered>(&action)) {
    OnOpened(opened->call, *opened);
  }
}

void KvWriters::OpenLater(const std::string& cache, const Claim& claim) {
  if (world_->faults_over && world_->random.OneIn(2)) return;
  world_->scheduler.After(world_->random.Between(absl::Milliseconds(1), absl::Seconds(3)),
                          [this, cache, claim] { Open(cache, claim); });
}

void KvWriters::Open(const std::string& id, const Claim& claim) {
  Cache& cache = caches_.at(id);
  ++cache.opens;
  KvWriterRequested event;
  event.call = ++last_call_;
  event.principal = cache.principal;
  event.id = id;
  event.token_seed = absl::StrCat("seed ", event.call);
  event.accepts_direct = true;
  event.answered_step = claim.step;
  opening_[event.call] = {id, claim};
  control_->Feed(event);
}

// The reason that the service may not end the cache so; empty: it may.
std::string KvWriters::WhyIllegalEnd(const Cache& cache, const Failure& failure) const {
  if (failure.reason == "KV_DELETED") return cache.deleted ? "" : "no client deleted it";
  if (failure.reason == "KV_EXPIRED") {
    // Faults may hold up what renews a lease.
    if (world_->weather != Weather::kCalm) return "";
    return world_->now() - cache.renewed >= cache.ttl - absl::Seconds(2) ? "" : "it was renewed";
  }
  if (failure.reason == "KV_LOST" || failure.reason == "KV_NOT_FOUND") {
    return world_->fault_injected ? "" : "no worker was lost";
  }
  return "ranks may never differ";
}

void KvWriters::OnOpened(uint64_t call, const KvWriterAnswered& answer) {
  const auto found = opening_.find(call);
  if (found == opening_.end()) return;
  const Opening opening = found->second;
  opening_.erase(found);
  Cache& cache = caches_.at(opening.cache);
  if (answer.failure) {
    const Failure& failure = *answer.failure;
    cache.open_failed = true;
    ++ends_[absl::StrCat("(writer) ", failure.reason)];
    if (failure.code == absl::StatusCode::kUnavailable) {
      return OpenLater(opening.cache, opening.claim);
    }
    if (failure.code == absl::StatusCode::kAborted) return;
    if (failure.code == absl::StatusCode::kInvalidArgument) {
      // Another OpenCache call may have undone the claimed step, even if it was never answered.
      if (cache.opens == opening.claim.opens + 1) {
        world_->Violate(opening.cache, ": a claim was refused: ", failure.message);
      }
      return;
    }
    const std::string why = WhyIllegalEnd(cache, failure);
    if (!why.empty()) world_->Violate(opening.cache, ": ", failure.reason, ", but ", why);
    return;
  }
  const v1::OpenCacheResponse& response = answer.response;
  const uint64_t settled = response.next_step() - 1;
  world_->Trace(opening.cache, " has writer ", response.epoch(), " after step ", settled);
  ++ends_["(writer) opened"];
  if (response.epoch() <= cache.newest_epoch) {
    world_->Violate(opening.cache, ": epochs do not grow");
  }
  cache.newest_epoch = response.epoch();
  cache.open_failed = false;
  cache.renewed = world_->now();
  if (settled < cache.must_have) {
    world_->Violate(opening.cache, ": step ", cache.must_have, " was undone; the log ends with ",
                    settled);
  }
  if (settled < opening.claim.step) {
    world_->Violate(opening.cache, ": the claim of step ", opening.claim.step, " was ignored");
  }
  if (cache.lengths.count(settled) == 0) {
    return world_->Violate(opening.cache, ": no writer sent step ", settled);
  }
  cache.must_have = settled;
  Writer writer;
  writer.cache = opening.cache;
  writer.epoch = response.epoch();
  writer.opens = cache.opens;
  for (const auto& [other, pending] : opening_) {
    if (pending.cache == opening.cache) writer.opens = -1;
  }
  writer.step = settled;
  writer.steps_left = 1 + static_cast<int>(world_->random.Below(30));
  for (const v1::KvShardTicket& ticket : response.shards()) writer.tokens.push_back(ticket.token());
  // As in StepOpened: the smallest length of all ranks.
  writer.length = cache.lengths[settled];
  int64_t least = writer.length;
  const auto undone = cache.kept.find(settled + 1);
  if (undone != cache.kept.end()) least = std::min(least, undone->second);
  const auto known = cache.least_lengths.find(settled);
  if (known != cache.least_lengths.end()) least = std::min(least, known->second);
  for (const std::string& member : cache.members) {
    const SimKvRanks::Rank* rank = find_worker_(member)->kv().Find(opening.cache);
    if (rank == nullptr) continue;  // just lost
    for (const auto& [sequence, length] : rank->log->blocks().sequences()) {
      if (rank->log->epoch() != writer.epoch) continue;  // fenced again
      writer.length = std::min(writer.length, length);
      if (length < least || length > cache.lengths[settled]) {
        world_->Violate(opening.cache, ": ", member, " has ", length, " entries after step ",
                        settled, ", not ", cache.lengths[settled]);
      }
    }
  }
  cache.least_lengths = {{settled, std::min(least, writer.length)}};
  cache.kept.erase(cache.kept.upper_bound(settled), cache.kept.end());
  cache.lengths.erase(cache.lengths.upper_bound(settled), cache.lengths.end());
  writers_[call] = std::move(writer);
  NextStep(call);
}

void KvWriters::NextStep(uint64_t id) {
  Writer& writer = writers_.at(id);
  if (writer.stopped) return;
  Random& random = world_->random;
  Cache& cache = caches_.at(writer.cache);
  // Another process of the same client.
  if (!world_->faults_over && random.OneIn(40)) Open(writer.cache, {});
  if (writer.steps_left-- == 0) {
    writer.stopped = true;
    if (random.OneIn(2)) {
      cache.deleted = true;
      return control_->Feed(KvCacheDeleted{writer.cache, cache.principal});
    }
    if (!world_->faults_over)
      OpenLater(writer.cache, {random.OneIn(2) ? writer.step : 0, writer.opens});
    return;
  }
  KvStep step;
  step.number = ++writer.step;
  StepRow row;
  row.sequence = 1;
  row.expected_length = writer.length;
  row.keep_length = writer.length;
  if (writer.length > kMaxLength - 4 || random.OneIn(6)) {
    row.keep_length = writer.length > 0 ? random.Below(writer.length) : 0;  // rolls back
  }
  row.append_tokens = 1 + random.Below(3);
  row.q_tokens = row.append_tokens;
  step.rows.push_back(row);
  writer.begin = std::move(step);
  writer.layer = -1;
  writer.has_checksum = false;
  cache.lengths[writer.step] = row.end();
  cache.kept[writer.step] = row.keep_length;
  SendToRanks(id);
}

void KvWriters::SendToRanks(uint64_t id) {
  Writer& writer = writers_.at(id);
  Random& random = world_->random;
  KvStepMessage message;
  message.cache = writer.cache;
  message.epoch = writer.epoch;
  message.number = writer.step;
  if (writer.layer < 0) {
    message.begin = writer.begin;
  } else {
    message.layer = static_cast<uint32_t>(writer.layer);
  }
  for (int rank = 0; rank < static_cast<int>(writer.tokens.size()); ++rank) {
    writer.awaited.insert(rank);
    message.token = writer.tokens[static_cast<size_t>(rank)];
    // A writer that crashes has reached some ranks only.
    if (random.OneIn(200)) return Stop(id, /*claims=*/false);
    Send(id, rank, message);
    if (random.OneIn(20)) Send(id, rank, message);  // its stream broke and it sent again
  }
}

void KvWriters::Send(uint64_t id, int rank, const KvStepMessage& message) {
  const std::string member = caches_.at(message.cache).members[static_cast<size_t>(rank)];
  SimWorker* worker = find_worker_(member);
  const uint64_t process = worker->process();
  world_->scheduler.After(
      world_->random.Between(absl::Microseconds(50), absl::Milliseconds(10)),
      [this, id, rank, message, worker, process] {
        if (!worker->alive() || worker->process() != process) {
          return OnAnswer(id, rank, message, {absl::UnavailableError("the worker is gone")});
        }
        worker->kv().Do(message, [this, id, rank, message](const KvStepAnswer& answer) {
          OnAnswer(id, rank, message, answer);
        });
      });
}

void KvWriters::OnAnswer(uint64_t id, int rank, const KvStepMessage& message,
                         const KvStepAnswer& answer) {
  Cache& cache = caches_.at(message.cache);
  Writer& writer = writers_.at(id);
  if (answer.status.ok() && message.epoch < cache.newest_epoch) {
    world_->Violate(message.cache, ": rank ", rank, " serves epoch ", message.epoch, " after ",
                    cache.newest_epoch, " was opened");
  }
  if (answer.status.ok()) {
    cache.renewed = world_->now();
    // A rank that begins a step has committed the one before.
    if (message.begin && !answer.refused) {
      cache.must_have = std::max(cache.must_have, message.number - 1);
    }
  }
  // A message that was sent twice may come after the next step has begun.
  if (writer.stopped || message.number < writer.step) return;
  if (!answer.status.ok()) {
    ++ends_[absl::StrCat("(step) ", absl::StatusCodeToString(answer.status.code()))];
    const bool lost = absl::IsUnavailable(answer.status);
    const bool fenced = absl::IsAborted(answer.status) || absl::IsUnauthenticated(answer.status);
    if (!lost && !fenced) {
      world_->Violate(message.cache, ": step ", message.number, ": ", answer.status.ToString());
    }
    if (fenced && message.epoch == cache.newest_epoch && opening_.empty() && !cache.deleted &&
        !cache.open_failed && !world_->fault_injected) {
      world_->Violate(message.cache, ": the newest writer is fenced");
    }
    return Stop(id, /*claims=*/false);
  }
  if (answer.refused) {
    return world_->Violate(message.cache, ": step ", message.number, " was refused");
  }
  const bool is_current =
      message.number == writer.step &&
      (message.begin ? writer.layer < 0 : writer.layer == static_cast<int>(message.layer));
  if (!is_current || writer.awaited.erase(rank) == 0) return;  // sent twice
  if (message.begin) {
    if (!writer.has_checksum) {
      writer.has_checksum = true;
      writer.checksum = answer.tables_crc32c;
    } else if (writer.checksum != answer.tables_crc32c) {
      world_->Violate(message.cache, ": ranks have different tables after step ", message.number);
    }
  }
  if (writer.awaited.empty()) OnAllAnswered(id);
}

void KvWriters::OnAllAnswered(uint64_t id) {
  Writer& writer = writers_.at(id);
  if (++writer.layer < static_cast<int>(kLayers)) return SendToRanks(id);
  writer.length = caches_.at(writer.cache).lengths[writer.step];
  if (world_->random.OneIn(60)) return Stop(id, /*claims=*/true);
  NextStep(id);
}

void KvWriters::Stop(uint64_t id, bool claims) {
  Writer& writer = writers_.at(id);
  writer.stopped = true;
  OpenLater(writer.cache, {claims ? writer.step : 0, writer.opens});
}

void KvWriters::OnRankChanged(const std::string& id) {
  const auto found = caches_.find(id);
  if (found == caches_.end()) return;
  for (const std::string& member : found->second.members) {
    const SimKvRanks::Rank* rank = find_worker_(member)->kv().Find(id);
    if (rank == nullptr) return;  // it was lost
    for (const std::string& other_member : found->second.members) {
      const SimKvRanks::Rank* other = find_worker_(other_member)->kv().Find(id);
      if (other == nullptr) return;
      const KvStepLog& a = *rank->log;
      const KvStepLog& b = *other->log;
      if (a.committed() > b.committed() + 1 || a.committed() > b.complete()) {
        world_->Violate(id, ": ", member, " has committed step ", a.committed(), ", ", other_member,
                        " step ", b.committed(), " and completed ", b.complete());
      }
    }
  }
}

}  // namespace ringattn::server::simulation
